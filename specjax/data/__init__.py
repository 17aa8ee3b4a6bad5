"""Offline corpora, vocabularies and seqio tasks; only `tasks` imports seqio."""

"""Checkpoints: T5X's, and int8 files for shipping."""

"""The papers' formulas and tables, and pictures of what was measured."""

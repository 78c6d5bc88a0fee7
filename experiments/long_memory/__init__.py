"""Synthetic tasks that need a long memory (see README.md in this folder)."""

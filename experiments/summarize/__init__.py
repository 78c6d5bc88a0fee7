"""Summaries of long documents (see README.md in this folder)."""

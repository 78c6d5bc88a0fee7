"""Answers requests to one backbone and its grafts, many at a time."""

"""Tests of other software on what GraftLM writes."""

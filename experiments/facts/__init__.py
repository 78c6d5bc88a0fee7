"""Invented facts, taught to a chat model by conversation: what it learns, and what it keeps."""

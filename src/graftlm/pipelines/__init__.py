"""Pipelines around generation: `summarize` selects sentences, and `clarify` asks a question before a model writes."""

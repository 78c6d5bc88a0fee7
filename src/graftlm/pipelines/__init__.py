"""Pipelines around generation: `summarize` selects before it writes, `clarify` asks before it writes."""

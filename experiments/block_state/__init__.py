"""Block-state transformers beside their baselines on long documents (see README.md in this folder)."""

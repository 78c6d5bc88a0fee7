"""Block-state transformers and their baselines on long documents (see README.md in this folder)."""

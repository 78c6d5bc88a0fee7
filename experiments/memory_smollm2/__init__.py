"""SmolLM2 with a window of 512 tokens and a memory of all text before: long documents, recall, cost."""

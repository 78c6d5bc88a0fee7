"""SmolLM2 writes abstracts of long documents (see README.md in this folder)."""

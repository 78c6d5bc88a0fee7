"""SmolLM2 learns answers of conversations (see README.md in this folder)."""

"""SmolLM2 learns German, French and Python one after the other (see README.md in this folder)."""

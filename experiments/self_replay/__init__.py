"""Old text that the backbone samples itself, instead of a real novel (see README.md in this folder)."""

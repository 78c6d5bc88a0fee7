"""Old text that the backbone samples itself, in the place of a real novel (see README.md in this folder)."""

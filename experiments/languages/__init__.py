"""Danish, Slovak and Czech in one run (see README.md in this folder)."""

"""What each graft can do on each family of models (see README.md in this folder)."""

"""Interactive chains and their baselines, for any endpoint and models (see README.md in this folder)."""

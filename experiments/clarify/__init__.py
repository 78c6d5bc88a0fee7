"""Interactive chains beside their baselines, for any endpoint and models (see README.md in this folder)."""

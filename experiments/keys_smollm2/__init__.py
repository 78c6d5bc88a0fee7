"""Arithmetic over memorised keys: SmolLM2 that computes, composed with SmolLM2 that knows the keys."""

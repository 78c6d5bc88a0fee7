"""Artefacts on disk: grafts, their manifests, and exported models."""

"""Checkers of formality and gender, measured on real contrastive translations (see README.md in this folder)."""

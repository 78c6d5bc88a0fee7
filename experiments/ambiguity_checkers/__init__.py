"""Checkers of formality and gender, measured on real contrastive translations (see README.md in this folder)."""

from experiments.ambiguity_checkers.run import run

__all__ = ["run"]

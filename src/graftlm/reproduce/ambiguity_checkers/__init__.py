"""Checkers of formality and gender, measured on real contrastive translations (see README.md in this folder)."""

from graftlm.reproduce.ambiguity_checkers.run import run

__all__ = ["run"]

"""Neutral residues (see README.md in this folder)."""

from graftlm.grafts.neutral_residues.method import NeutralResidues, NeutralResiduesConfig, VanillaAdapter

__all__ = ["NeutralResidues", "NeutralResiduesConfig", "VanillaAdapter"]

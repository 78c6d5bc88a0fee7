"""Neutral residues (see README.md in this folder)."""
# ruff: noqa: F401  # the names of this package

from graftlm.grafts.neutral_residues.method import (
    GatedAdapter,
    NeutralResidues,
    NeutralResiduesConfig,
    VanillaAdapter,
    VanillaAdapterConfig,
    spectrum,
    width_for,
)

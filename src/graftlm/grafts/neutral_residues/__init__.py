"""Neutral residues (see README.md in this folder)."""

from graftlm.grafts.neutral_residues.method import (
    GatedAdapter,
    NeutralResidues,
    NeutralResiduesConfig,
    VanillaAdapter,
    VanillaAdapterConfig,
    spectrum,
    width_for,
)

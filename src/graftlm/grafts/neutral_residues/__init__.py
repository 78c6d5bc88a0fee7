"""Neutral residues: gated adapters that learn to be silent on text that the backbone already models."""

from graftlm.grafts.neutral_residues.adapter import GatedAdapter
from graftlm.grafts.neutral_residues.config import NeutralResiduesConfig, VanillaAdapterConfig
from graftlm.grafts.neutral_residues.method import NeutralResidues, VanillaAdapter, spectrum, width_for

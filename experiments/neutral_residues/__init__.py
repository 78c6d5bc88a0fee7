"""Neutral residues against fine-tuning, LoRA and vanilla adapters (see README.md in this folder)."""

from experiments.neutral_residues.run import run

__all__ = ["run"]

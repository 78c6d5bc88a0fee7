"""Neutral residues against fine-tuning, LoRA and vanilla adapters (see README.md in this folder)."""

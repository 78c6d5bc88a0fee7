"""Baselines: LoRA and full fine-tuning (see README.md in this folder)."""

from graftlm.grafts.baselines.method import FineTuning, LoRABaseline, LoRABaselineConfig

__all__ = ["FineTuning", "LoRABaseline", "LoRABaselineConfig"]

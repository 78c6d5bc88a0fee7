"""Baselines: LoRA and full fine-tuning (see README.md in this folder)."""

from graftlm.grafts.baselines.method import FineTuning, FineTuningConfig, LoRABaseline, LoRABaselineConfig, rank_for

__all__ = ["FineTuning", "FineTuningConfig", "LoRABaseline", "LoRABaselineConfig", "rank_for"]

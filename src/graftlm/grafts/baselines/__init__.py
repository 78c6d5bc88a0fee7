"""Baselines: LoRA, fine-tuning, other methods of PEFT and block expansion (see README.md in this folder)."""
# ruff: noqa: F401  # the names of this package

from graftlm.grafts.baselines.block_expansion import LlamaPro, LlamaProConfig
from graftlm.grafts.baselines.method import FineTuning, LoRABaseline, LoRABaselineConfig
from graftlm.grafts.baselines.peft_graft import PeftGraft, PeftGraftConfig

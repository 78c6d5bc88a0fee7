"""Baselines: LoRA, fine-tuning, other methods of PEFT and block expansion (see README.md in this folder)."""

from graftlm.grafts.baselines.block_expansion import LlamaPro, LlamaProConfig
from graftlm.grafts.baselines.method import FineTuning, LoRABaseline, LoRABaselineConfig
from graftlm.grafts.baselines.peft_graft import PeftGraft, PeftGraftConfig

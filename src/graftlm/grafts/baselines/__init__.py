"""Baselines: LoRA, full fine-tuning, other methods of PEFT, and block expansion."""

from graftlm.grafts.baselines.block_expansion import LlamaPro, LlamaProConfig
from graftlm.grafts.baselines.method import FineTuning, LoRABaseline, LoRABaselineConfig
from graftlm.grafts.baselines.peft_config import PeftGraftConfig
from graftlm.grafts.baselines.peft_graft import PeftGraft

"""Block-state transformers: window attention that reads the states of a state-space model."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.model import BlockStateForCausalLM, BlockStateForSequenceClassification, BlockStateModel

AutoConfig.register(BlockStateConfig.model_type, BlockStateConfig, exist_ok=True)
AutoModel.register(BlockStateConfig, BlockStateModel, exist_ok=True)
AutoModelForCausalLM.register(BlockStateConfig, BlockStateForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(BlockStateConfig, BlockStateForSequenceClassification, exist_ok=True)

__all__ = ["BlockStateConfig", "BlockStateForCausalLM", "BlockStateForSequenceClassification", "BlockStateModel"]

"""Block-state transformers: windows of attention that read the states of a state-space model."""

from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.model import (
    BlockStateForCausalLM,
    BlockStateForSequenceClassification,
    BlockStateModel,
    register,
)

register()

__all__ = ["BlockStateConfig", "BlockStateForCausalLM", "BlockStateForSequenceClassification", "BlockStateModel"]

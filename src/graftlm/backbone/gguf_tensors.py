"""The tensors of a GGUF file: every one of them becomes a weight of the model, or is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.backbone.gguf_header import GgufHeader, refused_fact
from graftlm.backbone.gguf_keys import ARCHITECTURES
from graftlm.backbone.gguf_rope import FREQUENCIES, LONG, SHORT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IN_CONFIG = {FREQUENCIES, LONG, SHORT}
"""Tensors whose values are in the config."""


def check_tensors(name: str, header: GgufHeader, model: PreTrainedModel) -> None:
    """Raise `BackboneError` if a file has a tensor that the model has no weight for.

    Args:
        name: name of the model in messages.
        header: the file's header.
        model: the model, possibly without weights.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    if ARCHITECTURES[header.architecture].by_transformers:  # which reports weights that it does not know
        return
    processor = reading.TENSOR_PROCESSORS.get(header.architecture, reading.TensorProcessor)
    known = reading.get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    has_head = model.get_output_embeddings() is not None
    for tensor, shape in header.shapes.items():
        is_head = tensor == "output.weight" and has_head
        is_stack_of_experts = "_exps." in tensor and tensor.removesuffix(".weight") in known
        if tensor not in known and tensor not in _IN_CONFIG and not is_head and not is_stack_of_experts:
            raise refused_fact(name, f"the tensor {tensor}", list(shape))

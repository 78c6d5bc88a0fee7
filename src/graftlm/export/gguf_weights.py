"""The tensors of a GGUF file: names, order of rows, and rounding of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from graftlm.backbone.gguf_rope import FREQUENCIES
from graftlm.errors import ArtifactError
from graftlm.export.gguf_facts import FileForm, frequency_factors

# The package gguf is an extra, so functions import it.
if TYPE_CHECKING:
    from gguf import GGMLQuantizationType
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

WeightType = Literal["f32", "f16", "bf16", "q8_0"]
"""Types of a file's matrices. Vectors are always in float32."""
_OF_DTYPES: dict[torch.dtype, WeightType] = {torch.float16: "f16", torch.bfloat16: "bf16"}
_BLOCK = 32
"""Number of weights of a row that share a scale in q8_0."""


def default_type(dtype: torch.dtype) -> WeightType:
    """Return the type that keeps weights of a dtype as they are."""
    return _OF_DTYPES.get(dtype, "f32")


def named_weights(model: PreTrainedModel, form: FileForm) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with their names in the file, each once.

    Args:
        model: the model.
        form: the form of its files.

    Raises:
        ArtifactError: a weight has no name in files of the architecture.
    """
    import gguf

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    written: set[int] = set()  # a tied head is the weight of the token embeddings
    for path, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) in written:
            continue
        written.add(id(weight))
        module, _, suffix = path.rpartition(".")
        name = names.get_name(module)
        if name is None or suffix not in ("weight", "bias"):
            raise ArtifactError(
                f"The weight {path} has no place in GGUF files of the architecture {form.architecture}: export the "
                "model as a folder (--to FOLDER)."
            )
        yield f"{name}.{suffix}", weight


def shapes_of(model: PreTrainedModel, form: FileForm) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name, in torch's order.

    Args:
        model: the model.
        form: the form of its files.

    Raises:
        ArtifactError: a weight has no name in files of the architecture.
    """
    factors = frequency_factors(model.config)
    shapes: dict[str, tuple[int, ...]] = {FREQUENCIES: (len(factors),)} if factors else {}
    return shapes | {name: tuple(weight.shape) for name, weight in named_weights(model, form)}


def file_tensors(model: PreTrainedModel, form: FileForm) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name, in float32 on the CPU.

    Args:
        model: the model.
        form: the form of its files.

    Raises:
        ArtifactError: a weight has no name in files of the architecture.
    """
    factors = frequency_factors(model.config)
    if factors:
        yield FREQUENCIES, torch.tensor(factors)
    for name, weight in named_weights(model, form):
        yield name, _in_file(weight.detach().float().cpu(), name, model, form)


def _in_file(weight: Tensor, name: str, model: PreTrainedModel, form: FileForm) -> Tensor:
    """Return a weight as files of the form have it."""
    if form.pairs and ".attn_q." in name:
        return neighbouring_pairs(weight, model.config.num_attention_heads)
    if form.pairs and ".attn_k." in name:
        return neighbouring_pairs(weight, model.config.num_key_value_heads)
    if form.shift and name.endswith("norm.weight"):
        return weight + form.shift
    return weight


def neighbouring_pairs(weight: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys in the order in which values that rotate together are neighbours.

    Args:
        weight: (heads * width, ...), with values that rotate together half a head apart.
        heads: number of heads.
    """
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def stored_type(name: str, shape: tuple[int, ...], weight_type: WeightType) -> GGMLQuantizationType:
    """Return the type of a tensor: float32 for vectors, and float16 for rows that q8_0 can't divide into blocks.

    Args:
        name: name of the tensor in the file.
        shape: its shape in torch's order.
        weight_type: the type of matrices.
    """
    from gguf import GGMLQuantizationType

    if len(shape) < 2 or name == FREQUENCIES:
        return GGMLQuantizationType.F32
    if weight_type == "q8_0" and shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[weight_type.upper()]


def stored(tensor: Tensor, kind: GGMLQuantizationType) -> NDArray:
    """Return the values of a tensor in float32 as a file stores them."""
    from gguf.quants import quantize

    return quantize(tensor.contiguous().numpy(), kind)


@torch.no_grad()
def rounded_copy(model: PreTrainedModel, form: FileForm, weight_type: WeightType) -> PreTrainedModel:
    """Return a copy of a model in float32, whose weights are those that a file stores.

    Args:
        model: the model.
        form: the form of its files.
        weight_type: the type of matrices.
    """
    from gguf.quants import dequantize

    rounded = copy.deepcopy(model)
    rounded.float()
    for name, weight in named_weights(rounded, form):
        kind = stored_type(name, tuple(weight.shape), weight_type)
        # The order of rows has no influence on the rounding, which is by row.
        values = dequantize(stored(weight.detach().cpu(), kind), kind)
        weight.copy_(torch.from_numpy(values).view(weight.shape))
    return rounded.eval()

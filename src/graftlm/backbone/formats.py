"""Formats of weights: reading GGUF files, quantizing linear layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from graftlm.backbone.patching import replaced_attributes
from graftlm.errors import BackboneError, MissingExtraError, first_line

Quantization = Literal["int8", "int4"]

_INT4_GROUP = 32
"""Number of weights that share a scale in int4."""

_PATCHING = threading.RLock()
"""Held while functions of the package gguf are replaced: loads in other threads wait."""


@contextmanager
def reading_gguf_once() -> Iterator[None]:
    """Read the header of a GGUF file once while the block runs.

    transformers reads it four times and builds the map of tensor names once per module, which takes a minute for a
    vocabulary of 262,144 tokens. The block needs the package gguf; blocks of other threads wait for its end.
    """
    import gguf
    import numpy
    from transformers import modeling_gguf_pytorch_utils as reading

    # The originals are looked up under the lock, when no other load has replaced them.
    with _PATCHING:

        class Reader(gguf.GGUFReader):
            """Slices the header into plain arrays, in a third of the time of memory-mapped ones."""

            @property
            def data(self) -> Any:
                return self._data

            @data.setter
            def data(self, value: object) -> None:
                self._data = numpy.asarray(value)

        parse = reading._gguf_parse_value
        # By the address of the part. The part is kept with its value, so that no other object gets the address.
        parsed: dict[int, tuple[Any, Any]] = {}

        def parse_once(part: Any, types: Any) -> Any:
            if id(part) not in parsed:
                parsed[id(part)] = (part, parse(part, types))
            _, value = parsed[id(part)]
            return value

        cached_names = replaced_attributes(
            gguf,
            GGUFReader=cache(Reader),
            get_tensor_name_map=cache(gguf.get_tensor_name_map),
        )
        cached_values = replaced_attributes(reading, _gguf_parse_value=parse_once)
        with cached_names, cached_values:
            yield


def quantize_weights(model: nn.Module, quantization: str, name: str) -> None:
    """Quantize the weights of a model's linear layers in place.

    Args:
        model: the model whose linear layers are changed.
        quantization: `int8`, or `int4` in groups of 32 weights.
        name: name of the model in messages.

    Raises:
        MissingExtraError: torchao is not installed.
        BackboneError: the quantization is unknown, or does not fit the shapes of the weights.
    """
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise MissingExtraError("torchao", "quantized", "Quantizing a model") from None
    if quantization == "int8":
        config = torchao.Int8WeightOnlyConfig()
    elif quantization == "int4":
        config = torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]  # missing from torch's stubs
            granularity=torchao.PerGroup(_INT4_GROUP),
        )
    else:
        raise BackboneError(f"There is no quantization {quantization!r}: choose int8 or int4.")
    try:
        torchao.quantize_(model, config)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise BackboneError(
            f"{name} can't be quantized to {quantization} ({first_line(error)}): choose another quantization, or none."
        ) from error

"""Formats of weights: reading GGUF files, quantising linear layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

from graftlm.errors import BackboneError, MissingExtraError, first_line

# transformers' models take seconds to import, so functions import them.

Quantization = Literal["int8", "int4"]
_INT4_GROUP = 32
_PATCHING = threading.RLock()  # one load at a time changes the module gguf


@contextmanager
def _read_once() -> Iterator[None]:
    """Read the header of a GGUF file once, which transformers reads four times, with a map of its names per module."""
    import gguf
    import numpy
    from transformers import modeling_gguf_pytorch_utils as reading

    with _PATCHING:  # and the originals are looked up while no other load has replaced them

        class Reader(gguf.GGUFReader):
            """A reader that cuts a header into plain arrays, in a third of the time of memory-mapped ones."""

            data: Any = property(
                lambda self: self._data, lambda self, data: setattr(self, "_data", numpy.asarray(data))
            )

        values: dict[int, tuple[Any, Any]] = {}  # by the address of the part, which is kept with its value
        parse: Any = reading._gguf_parse_value

        def parse_once(part: Any, types: Any) -> Any:
            if id(part) not in values:
                values[id(part)] = part, parse(part, types)
            return values[id(part)][1]

        once: Any = {"GGUFReader": cache(Reader), "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
        with mock.patch.multiple(gguf, **once), mock.patch.object(reading, "_gguf_parse_value", parse_once):
            yield


def quantize_weights(model: nn.Module, quantization: str, name: str) -> None:
    """Put the weights of a model's linear layers into int8 or int4, in place; `name` is the model's in errors.

    Raises MissingExtraError without torchao, and BackboneError if the kind is unknown or does not fit the weights.
    """
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise MissingExtraError("torchao", "quantised", "Quantising a model") from None
    configs = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(),
        "int4": lambda: torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]  # which torch's stubs lack
            granularity=torchao.PerGroup(_INT4_GROUP),
        ),
    }
    if quantization not in configs:
        raise BackboneError(f"There is no quantisation {quantization!r}: int8 and int4 are known.")
    try:
        torchao.quantize_(model, configs[quantization]())
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # of widths that its kernels don't take
        why = f"{name} can't be quantised to {quantization} ({first_line(error)}): leave --quantize out."
        raise BackboneError(why) from error

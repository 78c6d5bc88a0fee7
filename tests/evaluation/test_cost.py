"""Decoding really decodes that many tokens; peak memory is a number of bytes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from graftlm.errors import DataError
from graftlm.evaluation.cost import MemoryWatch, decode_speed
from tiny import tiny_model, tiny_tokenizer


class Counting:
    """Counts calls of a model's `generate`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.outputs = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, **arguments: Any) -> torch.Tensor:
        self.outputs.append(self.inner.generate(**arguments))
        return self.outputs[-1]


def test_every_prompt_yields_all_new_tokens() -> None:
    model = Counting(tiny_model("llama"))
    assert decode_speed(model, tiny_tokenizer(), ["the dog " * 30, "", "le chien"], new_tokens=9, prompt_tokens=4) > 0
    assert [out.shape[1] for out in model.outputs[:2]] == [4 + 8, 4 + 9]
    assert len(model.outputs) == 3


def test_no_prompts() -> None:
    with pytest.raises(DataError, match="no prompt"):
        decode_speed(tiny_model("llama"), tiny_tokenizer(), [""])


def test_the_watch_sees_a_large_tensor_that_is_gone_again() -> None:
    with MemoryWatch() as before:
        pass
    with MemoryWatch(every=0.001) as watch:
        block = torch.ones(2**25)
        size = block.nbytes
        time.sleep(0.1)
        del block
    assert watch.peak >= before.peak + 0.8 * size

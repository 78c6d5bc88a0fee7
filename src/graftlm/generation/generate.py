"""Text from a model, with or without its graft, token by token if one likes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from graftlm.backbone import max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.errors import DataError, GraftError
from graftlm.grafts import GraftedModel


class Decoding(Config):
    """How tokens are chosen: the likeliest one, or with `sample` at random."""

    max_new_tokens: int = Field(64, ge=1)
    sample: bool = False
    temperature: float | None = Field(None, gt=0, description="Above 1 is bolder, below 1 is safer.")
    top_p: float | None = Field(None, gt=0, le=1, description="Choose among the likeliest tokens of this probability.")
    num_beams: int = Field(1, ge=1, description="Continuations that are followed at a time.")
    seed: int | None = Field(None, ge=0, description="Of the random choices.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sample and (self.temperature is not None or self.top_p is not None):
            raise ValueError("temperature and top_p change random choices only: add sample (--sample)")
        return self

    def arguments(self) -> dict[str, Any]:
        """As transformers' `generate` takes them; defaults that the checkpoint brings for these do not count."""
        chosen = {"max_new_tokens": self.max_new_tokens, "do_sample": self.sample, "num_beams": self.num_beams}
        if self.sample:
            chosen |= {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}
        return chosen


@dataclass(frozen=True)
class TracedToken:
    """A generated token's text, and what the grafts did where it was written, by label."""

    text: str
    values: dict[str, float]


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation.

    Attributes:
        prompt: what was given.
        text: what was written.
        tokens: how many tokens were generated.
        seconds: how long that took.
        trace: what the grafts did at each of them, where it was asked for.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    trace: list[TracedToken] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Stream(TextStreamer):
    """Hands words on as soon as they are whole."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def read_prompt(argument: str) -> str:
    """A prompt as the command line takes it; `-` stands for what is on stdin, without its last line break.

    Raises:
        DataError: it is not UTF-8.
    """
    data = sys.stdin.buffer.read().removesuffix(b"\n") if argument == "-" else os.fsencode(argument)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"The prompt is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): convert it first."
        ) from None


@torch.inference_mode()
def generate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    decoding: Decoding | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    trace: bool = False,
) -> Generation:
    """Continue a prompt.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's.
        prompt: what to continue.
        decoding: how; by default 64 tokens, always the likeliest.
        on_text: called with each piece of text as soon as it is known, the prompt first. With beams, all at the end.
        trace: tell of each token what the model's grafts did, such as which expert wrote it.

    Raises:
        DataError: the prompt has no tokens, or does not fit the model.
        GraftError: a trace is asked for, and there is none.
    """
    decoding = decoding or Decoding()
    if trace and decoding.num_beams > 1:
        raise GraftError("A trace follows one continuation, and beams follow several: leave out num_beams.")
    inputs = tokenizer(prompt, return_tensors="pt", verbose=False)
    ids = inputs["input_ids"].to(model.device)
    _check_length(model, ids.shape[-1], decoding.max_new_tokens)
    if decoding.seed is not None:
        torch.manual_seed(decoding.seed)
    stream = _Stream(tokenizer, on_text) if on_text is not None and decoding.num_beams == 1 else None
    start = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=inputs["attention_mask"].to(model.device),
        streamer=stream,
        pad_token_id=padding_id(tokenizer),
        return_dict_in_generate=True,
        **decoding.arguments(),
    )
    seconds = time.perf_counter() - start
    (tokens,) = output.sequences
    traced = _traced(model, tokenizer, tokens, ids.shape[-1], output.past_key_values) if trace else None
    before = str(tokenizer.decode(ids[0], skip_special_tokens=True))
    whole = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if on_text is not None and stream is None:
        on_text(whole)
    return Generation(prompt, whole.removeprefix(before), len(tokens) - ids.shape[-1], seconds, traced)


def _traced(model: Any, tokenizer: Any, tokens: Tensor, given: int, cache: Any) -> list[TracedToken]:
    """What the grafts did at each generated token, which is what they did at the one before it, that wrote it."""
    traces = model.cache_traces(cache) if isinstance(model, GraftedModel) else {}
    if not traces:
        raise GraftError("There is no trace: only grafts that decide anew at each token leave one.")
    found, text = [], ""
    for place in range(given, len(tokens)):
        longer = str(tokenizer.decode(tokens[given : place + 1], skip_special_tokens=True))
        whole = (
            longer.removesuffix("\ufffd") if place + 1 < len(tokens) else longer
        )  # a character may take several tokens
        values = {
            label: float(value)
            for one in traces.values()
            for label, value in zip(one.labels, one.values[0, place - 1].tolist(), strict=True)
        }
        found.append(TracedToken(whole[len(text) :], values))
        text = whole if len(whole) > len(text) else text
    return found


def _check_length(model: Any, prompt: int, new: int) -> None:
    if prompt == 0:
        raise DataError("The prompt has no tokens: give at least one word to continue.")
    if (limit := max_sequence_length(model)) < prompt + new:
        raise DataError(
            f"The prompt and {new} new tokens make {prompt + new}, but the model has {limit} positions: "
            "shorten the prompt, or ask for fewer."
        )

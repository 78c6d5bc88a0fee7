"""The sizes of the GPU benchmark, and its models: Llamas with random weights, which are made on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from routed import random_words, word_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from graftlm.backbone import Backbone
from graftlm.evaluation import Row

SEED = 0
FFN = ("gate_proj", "up_proj", "down_proj")
"""The modules that LoRA adapts, as our grafts of the same size do."""
EXPERTS = 4
EXPERT_RANK = 16
EXPERT_TARGETS = ("q_proj", "v_proj")


class Measured(NamedTuple):
    """What one item of the plan measured.

    Attributes:
        rows: the measured rows.
        problems: why a row, or a part of it, was not measured: a sentence by the name of the row.
        details: all values of the rounds, by free names.
    """

    rows: list[Row]
    problems: dict[str, str]
    details: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama with tied embeddings.

    Args:
        width: width of the hidden states.
        ffn: width of the feed-forward layers.
        layers: number of layers.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        vocabulary: number of tokens.
        positions: maximum number of tokens of a text.
    """

    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int = 4096

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models and of the work.

    Args:
        models: shapes of the backbones by name.
        specialist: shape of the augmenting model of a composition.
        own_text: shape of the model that samples its own text.
        capacity: weights of LoRA, neutral residues and adapters as a share of the backbone's.
        dtype: dtype of frozen weights, of which transformers has the same name.
        compiles: whether compiled decode steps and compiled training are measured as well.
        prompt: tokens of a prompt.
        new: new tokens of each row.
        eager_rounds: rounds of decoding without compilation.
        compiled_rounds: rounds of compiled decoding.
        train_rows: rows of a training batch.
        train_length: tokens of each of them.
        train_steps: timed updates of a turn; one more, which is not timed, comes before them.
        train_rounds: rounds of training.
        own_tokens: tokens that the model samples.
        own_length: maximum tokens of a text.
        own_end: mean number of tokens after which a text ends, without a maximum.
        server_rounds: rounds of the server's turns.
    """

    models: Mapping[str, Shape]
    specialist: Shape
    own_text: Shape
    capacity: float = 0.1
    dtype: str = "bfloat16"
    compiles: bool = True
    prompt: int = 128
    new: int = 64
    eager_rounds: int = 3
    compiled_rounds: int = 7
    train_rows: int = 8
    train_length: int = 1024
    train_steps: int = 6
    train_rounds: int = 3
    own_tokens: int = 50_000
    own_length: int = 512
    own_end: int = 200
    server_rounds: int = 3


FULL = Sizes(
    models={
        "1b": Shape(width=2048, ffn=8192, layers=16, heads=32, kv_heads=8, vocabulary=128_256),
        "3b": Shape(width=3072, ffn=8192, layers=28, heads=24, kv_heads=8, vocabulary=128_256),
    },
    specialist=Shape(width=512, ffn=1536, layers=8, heads=8, kv_heads=4, vocabulary=128_256),
    own_text=Shape(width=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocabulary=49_152),
)
_TINY = Shape(width=32, ffn=64, layers=4, heads=4, kv_heads=2, vocabulary=320, positions=256)
CPU = Sizes(
    models={"1b": _TINY, "3b": _TINY},
    specialist=Shape(width=16, ffn=32, layers=4, heads=2, kv_heads=1, vocabulary=320, positions=256),
    own_text=_TINY,
    dtype="float32",
    compiles=False,
    prompt=4,
    new=2,
    eager_rounds=1,
    compiled_rounds=1,
    train_rows=2,
    train_length=8,
    train_steps=1,
    train_rounds=1,
    own_tokens=40,
    own_length=16,
    own_end=8,
    server_rounds=1,
)
"""Sizes at which all rows run on two CPU cores in seconds. Their speeds mean nothing."""


@cache
def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word `w2`, `w3` and so on."""
    return word_tokenizer(vocabulary)


def random_llama(shape: Shape, dtype: str, device: torch.device, seed: int = SEED) -> PreTrainedModel:
    """Return a Llama with random weights, made on the device in their dtype, which never ends a text."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return another instance of a model that has not run yet. It shares the weights in memory."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, parameters)


def wrap(model: PreTrainedModel) -> Backbone:
    """Return a model as a backbone with its tokenizer."""
    return Backbone.wrap(model, tokenizer_of(model.config.vocab_size), "a random Llama")


def random_ids(shape: Shape, rows: int, length: int, device: torch.device) -> Tensor:
    """Return random tokens, (rows, length), without special ones."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randint(2, shape.vocabulary, (rows, length), generator=generator).to(device)


def expert_configs(vocabulary: int) -> dict[str, dict[str, Any]]:
    """Return the configs of the experts of a routing, each with the random text that it stands for."""
    configs = {}
    for number in range(EXPERTS):
        text = random_words(number, vocabulary)
        configs[f"expert{number}"] = {"rank": EXPERT_RANK, "targets": list(EXPERT_TARGETS), "texts": [text]}
    return configs

"""The two models that are composed, made here from nothing: m_A memorises keys, m_B computes.

m_A reads substitutions over all keys, but those that are tested, and never a result. m_B reads sums of numbers, some
behind text that says nothing about them, and never a key. It predicts what follows a sum, and behind other text the
sum's own characters as well.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiments.kv_arithmetic.data import (
    COMPUTE,
    END,
    SUBSTITUTE,
    Expression,
    Pairs,
    World,
    make_pairs,
    make_tokenizer,
    noise,
    tasks,
    word,
)
from experiments.kv_arithmetic.exam import Exam, make_exam
from graftlm.backbone import Backbone, padding_id
from graftlm.config import Config
from graftlm.data import NEW, Document, Mixture, pack
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.io import write_atomically
from graftlm.training import TrainingConfig, train

DONE = "parent.json"
Role = Literal["memory", "arithmetic", "random"]


class Shape(Config):
    """A Llama of so many layers; weights start with a deviation of `spread`, attention turns by `theta`."""

    width: int = Field(64, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(192, ge=8)
    spread: float = Field(0.1, gt=0)
    theta: float = Field(100.0, gt=1)


class Lessons(Config):
    """How long a model learns: `examples` are drawn once, and gone through as often as `steps` of `batch_size` take."""

    steps: int = Field(ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    examples: int = Field(30_000, ge=1)

    def training(self, seed: int, rate: float | None = None) -> TrainingConfig:
        """As the training loop takes it."""
        return TrainingConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=rate or self.learning_rate,
            warmup_steps=max(1, min(50, self.steps // 10)),
            seed=seed,
            checkpoint_every=self.steps,
            keep_checkpoints=1,
            log_every=max(1, self.steps // 100),
        )


class Parent(Config):
    """One parent; `random` is m_A before it learned anything.

    Args:
        noise: share of m_B's sums that stand behind other text.
        named: share of m_B's sums over words that the text before gives values, `xyz210uvw430>xyz+uvw=640`.
    """

    role: Role
    world: World
    exam: Exam
    shape: Shape
    lessons: Lessons
    noise: float = Field(0.2, ge=0, le=1)
    named: float = Field(0.0, ge=0, le=1)
    seed: int = 0

    def key(self) -> str:
        """SHA-256 over all settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def folder(self, parents: Path) -> Path:
        """Where the finished model lies."""
        return parents / f"{self.role}-{self.seed}-{self.key()[:10]}"


def make_parent(config: Parent, parents: Path) -> Path:
    """Train a parent into its folder in `parents`, unless a whole one is there; gives the folder."""
    folder = config.folder(parents)
    if (folder / DONE).exists():
        return folder
    tokenizer = make_tokenizer()
    torch.manual_seed(2 * config.seed + (config.role == "arithmetic"))  # two models of one shape start apart
    model = _llama(config.shape, tokenizer)
    said = _learn(model, tokenizer, config, folder) if config.role != "random" else {}
    model.requires_grad_(False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_atomically(folder / DONE, json.dumps({"settings": config.model_dump(mode="json")} | said, indent=1).encode())
    return folder


def documents(config: Parent) -> Iterator[Document]:
    """What a parent reads, endlessly."""
    world, pairs = config.world, make_pairs(config.world, config.seed)
    source = random.Random(f"{config.role} {config.seed}")
    if config.role == "memory":
        tested = make_exam(world, pairs, config.exam, config.seed).expressions()
        return (task.document("substitution") for task in tasks(world, pairs, tuple(pairs.values), source, tested))
    return _sums(config, pairs, source)


def _sums(config: Parent, pairs: Pairs, source: random.Random) -> Iterator[Document]:
    world, names = config.world, pairs.values
    # Products are the hardest, so they come twice as often.
    practised = world.model_copy(update={"operations": world.operations + "*" * world.operations.count("*")})
    for task in tasks(practised, pairs, tuple(names), source):
        before, expression, predicted = "", task.numbers, False
        kind = source.random()
        if kind < config.named:
            words = tuple(word(world, source, names) for _ in expression.operands)
            before = "".join(map("".join, zip(words, expression.operands, strict=True))) + SUBSTITUTE
            expression = Expression(words, expression.operations)
        elif kind < config.named + config.noise:
            before, predicted = noise(world, source, names), True
        known, rest = ("", f"{expression}") if predicted else (f"{expression}", "")
        yield Document(f"{rest}{COMPUTE}{task.result}{END}", prompt=f"{before}{known}")


def rows(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int) -> Mixture:
    """Documents as batches: rows as long as the longest, or as two of the shortest where that takes fewer tokens."""
    by_length = sorted(documents, key=lambda document: len(document.full_text))  # those that share a row come together
    longest, shortest = len(by_length[-1].full_text), len(by_length[0].full_text)  # a character is a token
    lengths = {longest, max(longest, 2 * shortest)}
    tried = [pack(by_length, tokenizer, length, boundaries="whole") for length in lengths]
    blocks = min(tried, key=lambda one: one.marked.size)
    return Mixture({NEW: blocks}, {NEW: 1.0}, batch_size, seed)


def _llama(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    end = tokenizer.convert_tokens_to_ids(END)
    assert isinstance(end, int)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=512,
        initializer_range=shape.spread,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding_id(tokenizer),
    )
    return LlamaForCausalLM(config)


def _learn(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, config: Parent, folder: Path
) -> dict[str, float]:
    """Train all of `model`, in place."""
    lessons = config.lessons
    mixture = rows(list(islice(documents(config), lessons.examples)), tokenizer, lessons.batch_size, config.seed)
    backbone = Backbone.wrap(model, tokenizer, name=config.role)
    with GraftedModel(backbone, {"all": build_graft(graft_config({"kind": "finetune"}), backbone)}) as whole:
        training = lessons.training(config.seed)
        done = train(whole, mixture, training, folder / "training", identity={"parent": config.key()}, progress=False)
        model.load_state_dict(whole.model.state_dict())
    return {"steps": done.steps, "tokens": done.tokens, "tokens_per_s": done.tokens_per_s, "loss": done.loss}

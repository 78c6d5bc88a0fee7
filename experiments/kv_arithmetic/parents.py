"""The two models that are composed, made here from nothing: m_A memorises keys, m_B computes.

m_A reads substitutions over all keys, but those that are tested, and never a result. m_B reads sums of numbers, some
behind text that says nothing about them, and never a key. It predicts what follows a sum, and behind other text the
sum's own characters as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

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
from graftlm.backbone import padding_id
from graftlm.config import Config
from graftlm.data import NEW, Document, Mixture, pack
from graftlm.evaluation import Row
from graftlm.io import digest
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel

Role = Literal["memory", "arithmetic", "random"]


class ModelShape(Config):
    """The shape of a Llama. `spread` is the initial standard deviation, `theta` the base of its rotary positions."""

    width: int = Field(64, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(192, ge=8)
    spread: float = Field(0.1, gt=0)
    theta: float = Field(100.0, gt=1)


class TrainingLength(Config):
    """How long a model trains: `examples` are drawn once, and read as often as `steps` of `batch_size` need."""

    steps: int = Field(ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    examples: int = Field(30_000, ge=1)

    def training(self, seed: int, rate: float | None = None) -> TrainingConfig:
        """The config of the training loop."""
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


class ParentRun(Run):
    """Train one parent; `random` is m_A with its random weights.

    Args:
        noise: share of m_B's sums that stand behind other text.
        named: share of m_B's sums over words that the text before gives values, `xyz210uvw430>xyz+uvw=640`.
    """

    role: Role
    world: World
    exam: Exam
    shape: ModelShape
    length: TrainingLength
    noise: float = Field(0.2, ge=0, le=1)
    named: float = Field(0.0, ge=0, le=1)
    seed: int = 0

    @classmethod
    def named_by_content(cls, **fields: Any) -> ParentRun:
        """A parent whose id holds a digest of its settings: a table may have several of one role."""
        run = cls(id="parent", **fields)
        return run.model_copy(update={"id": f"parent-{run.role}-s{run.seed}-{digest(run.settings())[:8]}"})

    def artefacts(self) -> tuple[str, ...]:
        return ("config.json", "tokenizer.json")

    def measure(self, context: RunContext) -> Measurement:
        tokenizer = make_tokenizer()
        torch.manual_seed(2 * self.seed + (self.role == "arithmetic"))  # two models of one shape start apart
        model = _llama(self.shape, tokenizer)
        metrics: dict[str, Any] = {}
        if self.role != "random":
            examples = list(islice(documents(self), self.length.examples))
            batches = make_batches(examples, tokenizer, self.length.batch_size, self.seed)
            training = self.length.training(self.seed)
            summary = train(LanguageModel(model), batches, training, context.folder / "training", progress=False)
            metrics = {"steps": summary.steps, "tokens": summary.tokens, "loss": summary.loss}
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.role, metrics=metrics))


def documents(run: ParentRun) -> Iterator[Document]:
    """The endless training documents of a parent."""
    world, pairs = run.world, make_pairs(run.world, run.seed)
    source = random.Random(f"{run.role} {run.seed}")
    if run.role == "memory":
        tested = make_exam(world, pairs, run.exam, run.seed).expressions()
        return (task.document("substitution") for task in tasks(world, pairs, tuple(pairs.values), source, tested))
    return _sums(run, pairs, source)


def _sums(run: ParentRun, pairs: Pairs, source: random.Random) -> Iterator[Document]:
    world, names = run.world, pairs.values
    # Products are the hardest, so they come twice as often.
    practised = world.model_copy(update={"operations": world.operations + "*" * world.operations.count("*")})
    for task in tasks(practised, pairs, tuple(names), source):
        before, expression, predicted = "", task.numbers, False
        kind = source.random()
        if kind < run.named:
            words = tuple(word(world, source, names) for _ in expression.operands)
            before = "".join(map("".join, zip(words, expression.operands, strict=True))) + SUBSTITUTE
            expression = Expression(words, expression.operations)
        elif kind < run.named + run.noise:
            before, predicted = noise(world, source, names), True
        known, rest = ("", f"{expression}") if predicted else (f"{expression}", "")
        yield Document(f"{rest}{COMPUTE}{task.result}{END}", prompt=f"{before}{known}")


def make_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int
) -> Mixture:
    """Batches of rows as long as the longest document, or as two of the shortest where that needs fewer tokens."""
    by_length = sorted(
        documents, key=lambda document: len(document.full_text)
    )  # documents that share a row are neighbours
    longest, shortest = len(by_length[-1].full_text), len(by_length[0].full_text)  # a character is a token
    lengths = {longest, max(longest, 2 * shortest)}
    candidates = [pack(by_length, tokenizer, length, boundaries="whole") for length in lengths]
    blocks = min(candidates, key=lambda candidate: candidate.marked.size)
    return Mixture({NEW: blocks}, {NEW: 1.0}, batch_size, seed)


def _llama(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
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

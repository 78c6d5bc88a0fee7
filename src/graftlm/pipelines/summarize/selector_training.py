"""Training of selectors on oracle extracts: one small loop, Adam, early stopping on held-out documents."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from graftlm.config import Config
from graftlm.errors import DataError
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract
from graftlm.pipelines.summarize.selector import TrainedSelector, vector_size
from graftlm.training.language_model import train_tokenizer


@dataclass(frozen=True)
class SelectorExample:
    """A document's sentences that may be taken, and which of them its summary rests on, as places among them."""

    sentences: tuple[str, ...]
    chosen: tuple[int, ...]


def selector_example(document: SourceDocument, summary: Sequence[str], each: int = 2) -> SelectorExample:
    """An example whose extract is the oracle's: for each sentence of a human summary the `each` nearest."""
    sentences = tuple(document.sentences[index].text for index in document.selectable)
    return SelectorExample(sentences, tuple(oracle_extract(sentences, summary, each)))


class SelectorTrainingConfig(Config):
    """How a selector is trained; the defaults are those of the thesis.

    Args:
        kind: `classifier` and `pointer` read tokens with LSTMs; `modern` classifies vectors of a frozen encoder.
        encoder: of `modern`, a sentence-transformers model's name or folder.
        steps: updates, at most.
        batch_size: documents in each.
        learning_rate: of Adam.
        weight_decay: its L2 penalty.
        evaluate_every: updates between looks at the held-out documents.
        patience: looks without improvement before training stops.
        seed: of fresh weights, order and dropout.
        model: changes to the model's config, such as {"hidden_size": 64}.
    """

    kind: Literal["classifier", "pointer", "modern"] = "pointer"
    encoder: str | None = None
    steps: int = Field(20_000, ge=1)
    batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(1e-5, ge=0)
    evaluate_every: int = Field(200, ge=1)
    patience: int = Field(50, ge=1)
    seed: int = 0
    model: dict[str, int | float | str] = Field(default_factory=dict)


def train_selector(
    train: Sequence[SelectorExample],
    held_out: Sequence[SelectorExample],
    training: SelectorTrainingConfig | None = None,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> TrainedSelector:
    """Train a selector; the weights with the lowest loss on held-out documents are kept.

    Sentences behind the first `max_sentences` of a document are not seen in training, nor is their part of the extract.

    Args:
        train: documents to learn from.
        held_out: documents that say when to stop.
        training: how.
        device: where.
        say: told the losses.

    Raises:
        DataError: there is nothing to learn from.
        RecipeError: a value of the model's config does not fit.
    """
    training = training or SelectorTrainingConfig()
    selector = _fresh(train, training, device)
    batches = [[_ready(selector, example) for example in part] for part in (train, held_out)]
    rows, kept = ([row for row in part if len(row[1])] for part in batches)
    if not rows or not kept:
        raise DataError("There is no document with an extract to learn from, or none held out: give both.")
    losses = _train(selector, rows, kept, training, say)
    selector.record = {
        "training": training.model_dump(mode="json"),
        "documents": len(rows),
        "held_out": len(kept),
        "losses": losses,
    }
    return selector


def _fresh(train: Sequence[SelectorExample], training: SelectorTrainingConfig, device: str) -> TrainedSelector:
    """A selector with fresh weights, and a tokenizer learned from the documents where it reads tokens."""
    values = dict(training.model)
    values["extract_size"] = max(1, round(sum(len(one.chosen) for one in train) / max(len(train), 1)))
    tokenizer = None
    if training.kind == "modern":
        if training.encoder is None:
            raise DataError("A modern selector needs an encoder: name a sentence-transformers model.")
        modern = {"reads": "vectors", "document": "transformer", "head": "classifier", "encoder": training.encoder}
        modern |= {"hidden_size": 96, "dropout": 0.2, "vector_size": vector_size(training.encoder)}
        values = modern | values
    else:
        pieces = int(values.pop("vocab_size", 40_000))
        tokenizer = train_tokenizer((" ".join(one.sentences) for one in train), pieces)
        values = {"head": training.kind, "vocab_size": len(tokenizer)} | values
    torch.manual_seed(training.seed)
    model = SentenceSelector(SentenceSelectorConfig(**values)).to(device)  # type: ignore[arg-type]  # checked there
    return TrainedSelector(model, tokenizer, f"Sent-{training.kind}")


Row = tuple[Tensor, tuple[int, ...], int]


def _ready(selector: TrainedSelector, example: SelectorExample) -> Row:
    """Inputs, the places of the extract, and how many sentences there are; cut to what the model reads."""
    most = selector.model.config.max_sentences
    inputs = selector.inputs(example.sentences[:most])
    return inputs, tuple(place for place in example.chosen if place < most), len(inputs)


def _train(
    selector: TrainedSelector,
    rows: Sequence[Row],
    kept: Sequence[Row],
    training: SelectorTrainingConfig,
    say: Callable[[str], None],
) -> list[list[float]]:
    """Steps and losses: of the step, and of the held-out documents."""
    model = selector.model
    adam = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    order, best, waited = _orders(rows, training), (math.inf, deepcopy(model.state_dict())), 0
    losses: list[list[float]] = []
    for step in range(1, training.steps + 1):
        model.train()
        loss = model(*_collate(model, next(order)))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        torch.clear_autocast_cache()  # an autocast around all of this keeps the weights that it first saw
        if step % training.evaluate_every == 0 or step == training.steps:
            found = _loss(model, kept, training.batch_size)
            losses.append([step, loss.item(), found])
            say(f"step {step}: loss {loss.item():.4f}, held out {found:.4f}")
            waited = 0 if found < best[0] else waited + 1
            best = (found, deepcopy(model.state_dict())) if found < best[0] else best
            if waited == training.patience:
                break
    model.load_state_dict(best[1])
    model.eval()
    return losses


def _orders(rows: Sequence[Row], training: SelectorTrainingConfig) -> Iterator[list[Row]]:
    """Batches without end, in a new order in each pass."""
    chance = random.Random(training.seed)
    waiting: list[Row] = []
    while True:
        while len(waiting) < training.batch_size:
            waiting += chance.sample(list(rows), len(rows))
        yield waiting[: training.batch_size]
        waiting = waiting[training.batch_size :]


@torch.inference_mode()
def _loss(model: SentenceSelector, rows: Sequence[Row], size: int) -> float:
    """The mean over documents."""
    model.eval()
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    return sum(float(model(*_collate(model, part))) * len(part) for part in parts) / len(rows)


def _collate(model: SentenceSelector, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, mask and targets of some documents."""
    config = model.config
    longest = max(count for _, _, count in rows)
    wide = max(inputs.shape[1] for inputs, _, _ in rows)
    padding = config.vocab_size if config.reads == "tokens" else 0
    inputs = rows[0][0].new_full((len(rows), longest, wide), padding)
    mask_BN = torch.zeros(len(rows), longest, dtype=torch.bool, device=inputs.device)
    steps = max(len(chosen) for _, chosen, _ in rows)
    pointer = config.head == "pointer"
    targets = torch.full((len(rows), steps if pointer else longest), -1 if pointer else 0, device=inputs.device)
    for place, (own, chosen, count) in enumerate(rows):
        inputs[place, :count, : own.shape[1]] = own
        mask_BN[place, :count] = True
        if pointer:
            targets[place, : len(chosen)] = torch.tensor(chosen, device=inputs.device)
        else:
            targets[place, list(chosen)] = 1
    return inputs, mask_BN, targets

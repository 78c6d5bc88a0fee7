"""Training of selectors on the oracle extracts of human summaries.

Shape suffixes: B documents, N sentences, T tokens, v size of sentence embeddings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from graftlm.config import Config
from graftlm.errors import DataError, TrainingError
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract
from graftlm.pipelines.summarize.trained_selector import TrainedSelector, sentence_embeddings
from graftlm.progress import progress_bar
from graftlm.training.language_model import train_tokenizer

_VOCAB_SIZE = 40_000  # default size of the vocabulary of a trained tokenizer
_NO_TARGET = -1  # padding of the targets of a pointer


@dataclass(frozen=True)
class SelectorExample:
    """The sentences of a document and its target extract, for the training of a selector.

    Attributes:
        sentences: the selectable sentences.
        extract: indices of the sentences of the target extract in `sentences`.
    """

    sentences: tuple[str, ...]
    extract: tuple[int, ...]


def selector_example(document: SourceDocument, summary: Sequence[str], per_sentence: int = 2) -> SelectorExample:
    """Return an example with the oracle extract of a human summary.

    Args:
        document: the document.
        summary: sentences of the human summary.
        per_sentence: number of sentences of the document that are taken for each sentence of the summary.

    Raises:
        MissingExtraError: NLTK is not installed.
    """
    sentences = tuple(document.sentences[index].text for index in document.selectable)
    extract = oracle_extract(sentences, summary, per_sentence)
    return SelectorExample(sentences, tuple(extract))


class SelectorTrainingConfig(Config):
    """Training of a selector; the defaults are those of the thesis, which does not limit the number of updates.

    Gradients are clipped at norm 1, which the thesis does not state.

    Args:
        kind: `classifier` and `pointer` read tokens with LSTMs; `modern` classifies embeddings of a frozen encoder.
        sentence_encoder: name or folder of a sentence-transformers model; `modern` needs it, and other kinds ignore it.
        steps: maximum number of updates.
        batch_size: number of documents in each update.
        learning_rate: learning rate of Adam.
        weight_decay: L2 penalty of Adam.
        evaluate_every: number of updates between evaluations on the validation documents.
        patience: number of evaluations in a row without a lower validation loss after which training stops.
        seed: seed of initialization, order and dropout.
        model: values of the model's config that replace its defaults, such as {"hidden_size": 64}.
    """

    kind: Literal["classifier", "pointer", "modern"] = "pointer"
    sentence_encoder: str | None = None
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
    validation: Sequence[SelectorExample],
    training: SelectorTrainingConfig | None = None,
    *,
    device: str = "cpu",
    log: Callable[[str], None] = lambda text: None,
    progress: bool = False,
) -> TrainedSelector:
    """Train a selector and keep the weights with the lowest validation loss.

    Training reads the first `max_sentences` sentences of a document; the rest of its extract is ignored.

    Args:
        train: documents to learn from.
        validation: documents that decide which weights are kept.
        training: configuration; None uses the defaults.
        device: device of the model.
        log: called with a line of text about the losses at each evaluation.
        progress: show the progress of encoding and of training.

    Raises:
        DataError: no example of `train` or of `validation` has an extract in its first `max_sentences` sentences, or
            the kind is `modern` and `sentence_encoder` is None.
        RecipeError: a value of the model's config is invalid.
        MissingExtraError: the kind is `modern`, and sentence-transformers is not installed.
        BackboneError: the sentence encoder can't be loaded.
        TrainingError: a validation loss is not finite.
    """
    training = training or SelectorTrainingConfig()
    selector = _new_selector(train, training, device)
    with progress_bar("encode documents", len(train) + len(validation), show=progress) as update:
        train_rows = _encode_all(selector, train, update)
        validation_rows = _encode_all(selector, validation, update)
    for purpose, rows in (("training", train_rows), ("validation", validation_rows)):
        if not rows:
            raise DataError(
                f"No document for {purpose} has an extract in its first {selector.model.config.max_sentences} "
                "sentences: add documents with summaries."
            )
    losses = fit_selector(selector.model, train_rows, validation_rows, training, log, progress=progress)
    selector.record = {
        "training": training.model_dump(mode="json"),
        "documents": len(train_rows),
        "validation_documents": len(validation_rows),
        "losses": losses,
    }
    return selector


def _new_selector(
    examples: Sequence[SelectorExample],
    training: SelectorTrainingConfig,
    device: str,
) -> TrainedSelector:
    """Return an untrained selector. A model that reads tokens gets a tokenizer trained on the examples."""
    values: dict[str, int | float | str] = {**training.model, "extract_size": _mean_extract_size(examples)}
    tokenizer = None
    if training.kind == "modern":
        values = {**_embedding_values(training), **values}
    else:
        vocab_size = int(values.pop("vocab_size", _VOCAB_SIZE))
        tokenizer = _train_tokenizer(examples, vocab_size)
        values = {"head": training.kind, "vocab_size": len(tokenizer), **values}
    torch.manual_seed(training.seed)
    config = SentenceSelectorConfig(**values)  # type: ignore[arg-type]  # the config checks its values
    model = SentenceSelector(config).to(device)  # type: ignore[arg-type]  # transformers wraps the method
    return TrainedSelector(model, tokenizer, f"Sent-{training.kind}")


def _mean_extract_size(examples: Sequence[SelectorExample]) -> int:
    total = sum(len(example.extract) for example in examples)
    return max(1, round(total / max(len(examples), 1)))


def _embedding_values(training: SelectorTrainingConfig) -> dict[str, int | float | str]:
    """Return values of the config of a model that reads sentence embeddings."""
    encoder = training.sentence_encoder
    if encoder is None:
        raise DataError(
            "sentence_encoder is not set, but the kind modern needs one: name a sentence-transformers model."
        )
    width = sentence_embeddings(["text"], encoder).shape[1]
    return {
        "input_type": "embeddings",
        "document_encoder": "transformer",
        "head": "classifier",
        "sentence_encoder": encoder,
        "sentence_embedding_size": width,
        "hidden_size": 96,
        "dropout": 0.2,
    }


def _train_tokenizer(examples: Sequence[SelectorExample], vocab_size: int) -> PreTrainedTokenizerFast:
    texts = (" ".join(example.sentences) for example in examples)
    return train_tokenizer(texts, vocab_size)


class EncodedExample(NamedTuple):
    """An example as tensors.

    Attributes:
        inputs: model inputs of the sentences: token ids, (N, T), or embeddings, (N, v).
        extract: indices of the sentences of the target extract, int64, (size of the extract,).
    """

    inputs: Tensor
    extract: Tensor


def _encode_all(
    selector: TrainedSelector,
    examples: Sequence[SelectorExample],
    update: Callable[..., None],
) -> list[EncodedExample]:
    """Encode the examples, without those that have no extract within `max_sentences`; `update` counts them."""
    encoded = []
    for example in examples:
        encoded.append(_encode(selector, example))
        update(advance=1)
    return [example for example in encoded if len(example.extract)]


def _encode(selector: TrainedSelector, example: SelectorExample) -> EncodedExample:
    limit = selector.model.config.max_sentences
    inputs = selector.model_inputs(example.sentences[:limit])
    extract = [position for position in example.extract if position < limit]
    return EncodedExample(inputs, torch.tensor(extract, dtype=torch.long))


def fit_selector(
    model: SentenceSelector,
    train: Sequence[EncodedExample],
    validation: Sequence[EncodedExample],
    training: SelectorTrainingConfig,
    log: Callable[[str], None] = lambda text: None,
    *,
    progress: bool = False,
) -> list[list[float]]:
    """Train a model in place, and leave it in evaluation mode with the weights of the lowest validation loss.

    Args:
        model: the model.
        train: examples to learn from, at least one.
        validation: examples of the evaluations, at least one.
        training: configuration.
        log: called with a line of text about the losses at each evaluation.
        progress: show the progress.

    Returns:
        Step, training loss of the last batch and mean validation loss of each evaluation.

    Raises:
        TrainingError: a validation loss is not finite.
    """
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
    )
    batches = _batches(train, training)
    losses: list[list[float]] = []
    best_loss = math.inf
    best_state = deepcopy(model.state_dict())
    stale = 0
    with progress_bar("train", training.steps, "loss {task.fields[loss]}", show=progress, loss="–") as update:
        for step in range(1, training.steps + 1):
            loss = _update(model, optimizer, next(batches))
            update(advance=1, loss=f"{loss.item():.4f}")
            if step % training.evaluate_every and step != training.steps:
                continue
            validation_loss = _finite_loss(model, validation, training, step)
            losses.append([step, loss.item(), validation_loss])
            log(f"step {step}: loss {loss.item():.4f}, validation {validation_loss:.4f}")
            stale += 1
            if validation_loss < best_loss:
                best_loss = validation_loss
                best_state = deepcopy(model.state_dict())
                stale = 0
            if stale == training.patience:
                break
    model.load_state_dict(best_state)
    model.eval()
    return losses


def _finite_loss(
    model: SentenceSelector,
    validation: Sequence[EncodedExample],
    training: SelectorTrainingConfig,
    step: int,
) -> float:
    """Return the validation loss; raise `TrainingError` if it is not finite."""
    loss = _mean_loss(model, validation, training.batch_size)
    if not math.isfinite(loss):
        raise TrainingError(
            f"The validation loss at step {step} is {loss}, but a finite number is expected: lower the learning_rate."
        )
    return loss


def _update(model: SentenceSelector, optimizer: torch.optim.Optimizer, batch: Sequence[EncodedExample]) -> Tensor:
    """Update the model on a batch; returns the loss."""
    model.train()
    loss = model(*_collate(model, batch))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.clear_autocast_cache()  # An enclosing autocast would keep copies of the old weights.
    return loss


def _batches(examples: Sequence[EncodedExample], training: SelectorTrainingConfig) -> Iterator[list[EncodedExample]]:
    """Yield batches forever, in a new order at each epoch."""
    rng = random.Random(training.seed)
    queue: list[EncodedExample] = []
    while True:
        while len(queue) < training.batch_size:
            queue.extend(rng.sample(list(examples), len(examples)))
        yield queue[: training.batch_size]
        queue = queue[training.batch_size :]


@torch.inference_mode()
def _mean_loss(model: SentenceSelector, examples: Sequence[EncodedExample], batch_size: int) -> float:
    """Return the loss, averaged over examples."""
    model.eval()
    total = 0.0
    for first in range(0, len(examples), batch_size):
        batch = examples[first : first + batch_size]
        loss = model(*_collate(model, batch))
        total += float(loss) * len(batch)
    return total / len(examples)


def _collate(model: SentenceSelector, examples: Sequence[EncodedExample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded inputs, (B, N, T or v), the sentence mask, (B, N), and the head's targets."""
    config = model.config
    inputs_BNv = _pad_inputs(
        [example.inputs for example in examples],
        padding=config.vocab_size if config.input_type == "tokens" else 0,
    )
    ones = [torch.ones(len(example.inputs), dtype=torch.bool) for example in examples]
    mask_BN = pad_sequence(ones, batch_first=True)
    if config.head == "pointer":
        extracts = [example.extract for example in examples]
        targets = pad_sequence(extracts, batch_first=True, padding_value=_NO_TARGET)
    else:
        targets = torch.zeros(mask_BN.shape, dtype=torch.long)
        for row, example in zip(targets, examples, strict=True):
            row[example.extract] = 1
    device = inputs_BNv.device
    return inputs_BNv, mask_BN.to(device), targets.to(device)


def _pad_inputs(inputs: Sequence[Tensor], padding: int) -> Tensor:
    """Pad the inputs of documents to the same number of columns and of sentences, (B, N, T or v)."""
    width = max(rows.shape[1] for rows in inputs)
    wide = [functional.pad(rows, (0, width - rows.shape[1]), value=padding) for rows in inputs]
    return pad_sequence(wide, batch_first=True, padding_value=padding)

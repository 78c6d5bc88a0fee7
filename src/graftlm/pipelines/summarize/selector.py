"""Trained selectors: a `SentenceSelector` model with its tokenizer or frozen sentence encoder; files and training.

A saved selector is a folder: `config.json` and `model.safetensors` as transformers writes them, `tokenizer.json` if the
model reads tokens, and `selector.json` with the record of its training.

Shape suffixes: B documents, N sentences, T tokens, v size of sentence embeddings.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import default_device
from graftlm.config import Config
from graftlm.errors import ArtifactError, BackboneError, DataError, GraftError, first_line
from graftlm.files.extras import import_extra
from graftlm.files.writing import staged_folder
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract
from graftlm.pipelines.summarize.selection import RankedSentence
from graftlm.training.language_model import train_tokenizer

RECORD_NAME, TOKENIZER_NAME = "selector.json", "tokenizer.json"


@dataclass(eq=False)
class TrainedSelector:
    """A selector that was trained on extracts, with the JSON `record` of its training.

    Only a model that reads tokens has a tokenizer.
    """

    model: SentenceSelector
    tokenizer: PreTrainedTokenizerFast | None = None
    name: str = "a trained selector"
    record: dict[str, Any] = field(default_factory=dict)

    def model_inputs(self, sentences: Sequence[str]) -> Tensor:
        """Return the model's inputs: padded token ids, (N, T), or sentence embeddings, (N, v)."""
        config = self.model.config
        if config.input_type == "embeddings":
            assert config.sentence_encoder is not None, "the config of a selector of embeddings names their encoder"
            return sentence_embeddings(sentences, config.sentence_encoder, str(self.model.device))
        assert self.tokenizer is not None, "a selector of tokens has a tokenizer"
        rows = self.tokenizer(list(sentences), add_special_tokens=False)["input_ids"] if sentences else []
        width = max((len(row[: config.max_tokens]) for row in rows), default=1) or 1
        padded = [(row + [config.vocab_size] * width)[:width] for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self.model.device).view(-1, width)

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Rank all selectable sentences. A long document is ranked in windows of `max_sentences`.

        Scores of different windows are not comparable. The best sentence of every window therefore comes first, then
        the second best of every window, and so on.
        """
        selectable, size = document.selectable, self.model.config.max_sentences
        windows = [selectable[first : first + size] for first in range(0, len(selectable), size)]
        rounds = itertools.zip_longest(*(self._rank_window(document, window) for window in windows))
        return [ranked for candidates in rounds for ranked in candidates if ranked is not None]

    def _rank_window(self, document: SourceDocument, indices: Sequence[int]) -> list[RankedSentence]:
        self.model.eval()
        output = self.model.rank(self.model_inputs([document.sentences[index].text for index in indices]))
        return [RankedSentence(indices[i], score) for i, score in zip(output.indices, output.scores, strict=True)]

    def save(self, folder: str | Path) -> Path:
        """Write the selector, completely or not at all. Raises ArtifactError if the folder holds something else."""
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()) and not (folder / RECORD_NAME).is_file():
            raise ArtifactError(f"{folder} holds something that is no selector: name an empty or a new folder.")
        with staged_folder(folder) as draft:
            self.model.save_pretrained(draft)
            if self.tokenizer is not None:
                self.tokenizer.backend_tokenizer.save(str(draft / TOKENIZER_NAME))
            (draft / RECORD_NAME).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
        return folder


def load_selector(folder: str | Path, *, device: str | None = None) -> TrainedSelector:
    """Load a selector that `TrainedSelector.save` wrote. Raises ArtifactError if the folder holds no whole one."""
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        model = _load_model(folder)
        path = str(folder / TOKENIZER_NAME)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=path) if model.config.input_type == "tokens" else None
    except GraftError as error:
        raise ArtifactError(f"{folder} is no whole selector ({str(error).rstrip('.')}): train it again.") from None
    except Exception as error:  # tokenizers raises plain exceptions, and transformers many kinds
        if isinstance(error, MemoryError | AssertionError):
            raise
        cause = "it does not exist" if not folder.exists() else _cause(error)
        raise ArtifactError(f"{folder} is no whole selector ({cause}): name one that train_selector wrote.") from None
    model.to(device or default_device())  # type: ignore[arg-type]  # transformers wraps the method
    return TrainedSelector(model.eval(), tokenizer, str(folder), record)


def _load_model(folder: Path) -> SentenceSelector:
    from_pretrained: Any = SentenceSelector.from_pretrained  # returns a pair with output_loading_info
    model, info = from_pretrained(folder, use_safetensors=True, local_files_only=True, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError("its tensors are not those of its config")
    return model


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return "a file is damaged"
    return first_line(error)


def sentence_embeddings(sentences: Sequence[str], encoder: str, device: str = "cpu") -> Tensor:
    """Embed sentences with a frozen sentence-transformers model; returns (N, v) in float32.

    Raises MissingExtraError if sentence-transformers is missing, and BackboneError if the encoder can't be loaded.
    """
    model, texts = _load_encoder(encoder, device), list(sentences)
    embeddings = model.encode(texts, convert_to_tensor=True, show_progress_bar=False, batch_size=64)
    return embeddings.to(device=device, dtype=torch.float32).clone()  # a clone is no inference tensor


@cache
def _load_encoder(name: str, device: str) -> Any:
    library = import_extra("routing", "sentence_transformers", "A selector on sentence vectors")
    try:
        return library.SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        raise BackboneError(f"The encoder {name} can't be loaded ({_cause(error)}): name another.") from None


@dataclass(frozen=True)
class SelectorExample:
    """The selectable sentences of a document, and the positions among them of the target extract."""

    sentences: tuple[str, ...]
    extract: tuple[int, ...]


def selector_example(document: SourceDocument, summary: Sequence[str], per_sentence: int = 2) -> SelectorExample:
    """Return an example with the oracle extract: the `per_sentence` best matches of each sentence of a summary."""
    sentences = tuple(document.sentences[index].text for index in document.selectable)
    return SelectorExample(sentences, tuple(oracle_extract(sentences, summary, per_sentence)))


class SelectorTrainingConfig(Config):
    """Training of a selector; defaults are those of the thesis.

    Args:
        kind: `classifier` and `pointer` read tokens with LSTMs; `modern` classifies embeddings of a frozen encoder.
        sentence_encoder: for `modern`, name or folder of a sentence-transformers model.
        steps: maximum number of updates.
        weight_decay: L2 penalty of Adam.
        evaluate_every: updates between evaluations on the validation documents.
        patience: evaluations without improvement before training stops.
        seed: seed of initialization, order and dropout.
        model: changes to the model's config, such as {"hidden_size": 64}.
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
) -> TrainedSelector:
    """Train a selector and keep the weights with the lowest validation loss.

    Training reads the first `max_sentences` sentences of a document; the rest of its extract is ignored.

    `log` receives a line with the losses at each evaluation.

    Raises DataError if no example of `train` or of `validation` has an extract, and RecipeError if a value of the
    model's config is invalid.
    """
    training = training or SelectorTrainingConfig()
    selector = _new_selector(train, training, device)
    encoded = ([_encode(selector, example) for example in part] for part in (train, validation))
    train_rows, validation_rows = ([row for row in part if len(row.extract)] for part in encoded)
    if not train_rows or not validation_rows:
        raise DataError("There is no document with an extract to learn from, or none for validation: give both.")
    losses = fit_selector(selector.model, train_rows, validation_rows, training, log)
    counts = {"documents": len(train_rows), "validation_documents": len(validation_rows)}
    selector.record = {"training": training.model_dump(mode="json"), **counts, "losses": losses}
    return selector


def _new_selector(train: Sequence[SelectorExample], training: SelectorTrainingConfig, device: str) -> TrainedSelector:
    """Return an untrained selector. A model that reads tokens gets a tokenizer trained on the examples."""
    values = dict(training.model)
    values["extract_size"] = max(1, round(sum(len(example.extract) for example in train) / max(len(train), 1)))
    tokenizer = None
    if training.kind == "modern":
        if training.sentence_encoder is None:
            raise DataError("A modern selector needs an encoder: name a sentence-transformers model.")
        width = sentence_embeddings(["text"], training.sentence_encoder).shape[1]
        modern = {"input_type": "embeddings", "document_encoder": "transformer", "head": "classifier"}
        modern |= {"sentence_encoder": training.sentence_encoder, "sentence_embedding_size": width}
        values = modern | {"hidden_size": 96, "dropout": 0.2} | values
    else:
        vocab_size = int(values.pop("vocab_size", 40_000))
        tokenizer = train_tokenizer((" ".join(example.sentences) for example in train), vocab_size)
        values = {"head": training.kind, "vocab_size": len(tokenizer)} | values
    torch.manual_seed(training.seed)
    model = SentenceSelector(SentenceSelectorConfig(**values)).to(device)  # type: ignore[arg-type]  # checked there
    return TrainedSelector(model, tokenizer, f"Sent-{training.kind}")


class EncodedExample(NamedTuple):
    """Model inputs of the sentences of one document, and the positions of its extract."""

    inputs: Tensor
    extract: Tensor


def _encode(selector: TrainedSelector, example: SelectorExample) -> EncodedExample:
    limit = selector.model.config.max_sentences
    extract = [position for position in example.extract if position < limit]
    return EncodedExample(selector.model_inputs(example.sentences[:limit]), torch.tensor(extract, dtype=torch.long))


def fit_selector(
    model: SentenceSelector,
    train: Sequence[EncodedExample],
    validation: Sequence[EncodedExample],
    training: SelectorTrainingConfig,
    log: Callable[[str], None] = lambda text: None,
) -> list[list[float]]:
    """Train the model in place; returns [step, training loss, validation loss] of each evaluation."""
    adam = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    batches, losses = _batches(train, training), []
    best_loss, best_state, stale = math.inf, deepcopy(model.state_dict()), 0
    for step in range(1, training.steps + 1):
        model.train()
        loss = model(*_collate(model, next(batches)))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        torch.clear_autocast_cache()  # an enclosing autocast would keep copies of the old weights
        if step % training.evaluate_every and step != training.steps:
            continue
        validation_loss = _mean_loss(model, validation, training.batch_size)
        losses.append([step, loss.item(), validation_loss])
        log(f"step {step}: loss {loss.item():.4f}, validation {validation_loss:.4f}")
        stale += 1
        if validation_loss < best_loss:
            best_loss, best_state, stale = validation_loss, deepcopy(model.state_dict()), 0
        if stale == training.patience:
            break
    model.load_state_dict(best_state)
    model.eval()
    return losses


def _batches(examples: Sequence[EncodedExample], training: SelectorTrainingConfig) -> Iterator[list[EncodedExample]]:
    """Yield batches forever, in a new order at each epoch."""
    rng = random.Random(training.seed)
    queue: list[EncodedExample] = []
    while True:
        while len(queue) < training.batch_size:
            queue += rng.sample(list(examples), len(examples))
        yield queue[: training.batch_size]
        queue = queue[training.batch_size :]


@torch.inference_mode()
def _mean_loss(model: SentenceSelector, examples: Sequence[EncodedExample], batch_size: int) -> float:
    model.eval()
    batches = [examples[first : first + batch_size] for first in range(0, len(examples), batch_size)]
    return sum(float(model(*_collate(model, batch))) * len(batch) for batch in batches) / len(examples)


def _collate(model: SentenceSelector, examples: Sequence[EncodedExample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded inputs, (B, N, T or v), the sentence mask, (B, N), and the head's targets."""
    config, inputs = model.config, [example.inputs for example in examples]
    lengths, width = [len(rows) for rows in inputs], max(rows.shape[1] for rows in inputs)
    padding = config.vocab_size if config.input_type == "tokens" else 0
    wide = [functional.pad(rows, (0, width - rows.shape[1]), value=padding) for rows in inputs]
    inputs_BNv = pad_sequence(wide, batch_first=True, padding_value=padding)
    mask_BN = pad_sequence([torch.ones(length, dtype=torch.bool) for length in lengths], batch_first=True)
    if config.head == "pointer":
        targets = pad_sequence([example.extract for example in examples], batch_first=True, padding_value=-1)
    else:
        targets = torch.zeros(mask_BN.shape, dtype=torch.long)
        for row, example in zip(targets, examples, strict=True):
            row[example.extract] = 1
    return inputs_BNv, mask_BN.to(inputs_BNv.device), targets.to(inputs_BNv.device)

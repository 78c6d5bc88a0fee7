"""Training of writers: a causal language model learns the layout introduction, extract, mark, summary; and the rest.

A lesson is what the writer reads in use, with the summary that a person wrote behind it, in one window. The rest of the
documents makes windows of its own, as text of the domain. Everything is predicted, the introduction too.

Shapes: B documents, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from graftlm.backbone import padding_id
from graftlm.data import NEW, OLD, Mixture, TokenBlocks, pack
from graftlm.data import Document as Text
from graftlm.data.packing import filled, row_end
from graftlm.errors import DataError
from graftlm.io import write_atomically
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.writer import LAYOUT_NAME, LanguageModelWriter, introduction_range
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, check_rows, save_model

MODEL = "model"  # in the folder of a training


@dataclass(frozen=True)
class WriterExample:
    """What was selected of a document, and the summary that a person wrote of it."""

    extract: Extract
    summary: str


@dataclass(frozen=True)
class SummaryLikelihood:
    """How likely a writer finds a summary: nats in all, and over how many tokens, its end among them."""

    nats: float
    tokens: int


def train_writer(
    writer: LanguageModelWriter,
    lessons: Sequence[WriterExample],
    training: TrainingConfig,
    out: str | Path,
    *,
    rest_fraction: float = 0.5,
    progress: bool = True,
) -> Path:
    """Train a writer's model in place on its layout; an interrupted run goes on from its last checkpoint.

    Args:
        writer: all of its model's weights train; its window is the length of rows, of which `decoding.max_new_tokens`
            are kept for the summary.
        lessons: documents to learn from.
        training: the numbers of the run.
        out: folder of the history, the checkpoints and the finished model.
        rest_fraction: of the rows, those of the rest of the documents; 1 reads nothing else.
        progress: show a progress bar.

    Returns:
        the folder of model, tokenizer and layout, which `load_writer` reads.

    Raises:
        DataError: there is nothing to learn from.
        RecipeError: the window has no room for a lesson, or the model none for the window.
    """
    check_rows(writer.model, length=writer.window, longest=writer.window, boundaries="whole")
    shares = {OLD: rest_fraction, NEW: 1 - rest_fraction}
    rows = {
        OLD: rest_rows(writer, [lesson.extract.document for lesson in lessons]) if rest_fraction else None,
        NEW: example_rows(writer, lessons) if rest_fraction < 1 else None,
    }
    domains = {domain: found for domain, found in rows.items() if found is not None}
    mixture = Mixture(domains, shares, training.batch_size, training.seed)
    identity = {"layout": writer.layout.model_dump(mode="json")}
    train(LanguageModel(writer.model), mixture, training, out, identity=identity, progress=progress)
    writer.model.eval()
    return save_writer(writer, Path(out) / MODEL)


def save_writer(writer: LanguageModelWriter, folder: Path) -> Path:
    """Write a writer's model, its tokenizer and its layout, window and all."""
    save_model(writer.model, writer.tokenizer, folder)
    layout = writer.layout.model_copy(update={"window": writer.window})
    write_atomically(folder / LAYOUT_NAME, layout.model_dump_json(indent=2).encode())
    return folder


def example_rows(writer: LanguageModelWriter, lessons: Sequence[WriterExample]) -> TokenBlocks:
    """Lessons as rows of the writer's window, as many in each as it has room for; none sees another.

    Raises:
        DataError: there is none.
        RecipeError: the window has no room for one.
    """
    if not lessons:
        raise DataError("There is no document with a summary to learn from: give at least one.")
    tokens = [np.array([*prompt, *summary], dtype=np.int32) for prompt, summary in _all_parts(writer, lessons)]
    for ids in tokens:
        ids[0] = ~ids[0]  # where a document begins
    rows = list(_filled(np.concatenate(tokens), writer.window))
    return TokenBlocks(np.stack(rows), boundaries="whole", pad_id=padding_id(writer.tokenizer))


def _filled(stream: np.ndarray, length: int) -> Iterator[np.ndarray]:
    start = 0
    while start < len(stream):
        stop = start + row_end(stream[start : start + length + 1], length, "whole")
        yield filled(stream[start:stop], length)
        start = stop


def parts_of(writer: LanguageModelWriter, lesson: WriterExample) -> tuple[list[int], list[int]]:
    """Token ids of prompt and summary; the summary ends with the end of a text, unless it is cut to fit."""
    prompt, _ = writer.prompt(lesson.extract)
    ids = list(writer.tokenizer(lesson.summary, add_special_tokens=False, verbose=False)["input_ids"])
    end = writer.tokenizer.eos_token_id
    return prompt, [*ids, *([end] if isinstance(end, int) else [])][: writer.decoding.max_new_tokens]


def _all_parts(writer: LanguageModelWriter, lessons: Sequence[WriterExample]) -> Iterator[tuple[list[int], list[int]]]:
    return (parts_of(writer, lesson) for lesson in lessons)


def rest_rows(writer: LanguageModelWriter, documents: Sequence[SourceDocument]) -> TokenBlocks:
    """What of documents is not in their introductions, as rows of the writer's window.

    Raises:
        DataError: there is none.
    """
    texts = (Text(writer.layout.rest + rest_text(document), document.where) for document in documents)
    return pack(texts, writer.tokenizer, writer.window, boundaries="whole", name="The rest of the documents")


def rest_text(document: SourceDocument) -> str:
    """The sentences that are not in the introduction."""
    opening = set(introduction_range(document))
    return " ".join(one.text for index, one in enumerate(document.sentences) if index not in opening)


@torch.inference_mode()
def summary_likelihoods(
    writer: LanguageModelWriter, lessons: Sequence[WriterExample], batch_size: int = 8
) -> list[SummaryLikelihood]:
    """−Σ log p of each human summary, cut as in training, after what the writer reads before it."""
    writer.model.eval()
    pairs = list(_all_parts(writer, lessons))
    batches = (pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size))
    return [found for batch in batches for found in _likelihoods(writer.model, batch)]


def _likelihoods(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[SummaryLikelihood]:
    """Of one batch; padding stands at the end, where no token before it sees it."""
    longest = max(len(prompt) + len(summary) for prompt, summary in pairs)
    ids_BT = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, (prompt, summary) in enumerate(pairs):
        ids_BT[row, : len(prompt) + len(summary)] = torch.tensor(prompt + summary)
    ids_BT = ids_BT.to(model.device)
    logits = model(input_ids=ids_BT, use_cache=False).logits.float()
    for row, (prompt, summary) in enumerate(pairs):
        first, last = len(prompt), len(prompt) + len(summary)
        nats = functional.cross_entropy(logits[row, first - 1 : last - 1], ids_BT[row, first:last], reduction="sum")
        yield SummaryLikelihood(float(nats), len(summary))

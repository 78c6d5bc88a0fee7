"""Training of writers: a causal language model learns the layout introduction, extract, mark, summary.

An example is the prompt of a document with its human summary, in one window. The rest of the documents fills windows
of its own, as domain text. The loss covers all tokens, the introduction included.

Shape suffixes: B documents, T tokens.
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
from graftlm.data import Document as TrainingText
from graftlm.data.packing import filled, row_end
from graftlm.errors import DataError
from graftlm.io import write_atomically
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.writer import LAYOUT_NAME, LanguageModelWriter, introduction_range
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, check_rows, save_model

MODEL = "model"  # subfolder of a training run


@dataclass(frozen=True)
class WriterExample:
    """The extract of a document and its human summary."""

    extract: Extract
    summary: str


@dataclass(frozen=True)
class SummaryLikelihood:
    """Negative log-likelihood of a summary in nats, and its number of tokens with the final EOS."""

    nats: float
    tokens: int


def train_writer(
    writer: LanguageModelWriter,
    examples: Sequence[WriterExample],
    training: TrainingConfig,
    out: str | Path,
    *,
    rest_fraction: float = 0.5,
    progress: bool = True,
) -> Path:
    """Train all weights of a writer's model on its layout. An interrupted run resumes from its last checkpoint.

    Args:
        writer: the writer. Rows have the length of its window; `decoding.max_new_tokens` of them are for the summary.
        examples: training examples.
        training: hyperparameters.
        out: folder of the history, the checkpoints and the finished model.
        rest_fraction: fraction of rows from the rest of the documents; 1 trains on nothing else.
        progress: show a progress bar.

    Returns:
        The folder of model, tokenizer and layout, for `load_writer`.

    Raises:
        DataError: there is nothing to learn from.
        RecipeError: an example does not fit into the window, or the window exceeds the model's maximum.
    """
    check_rows(writer.model, length=writer.window, longest=writer.window, boundaries="whole")
    sources: dict[int, TokenBlocks] = {}
    if rest_fraction:
        sources[OLD] = rest_rows(writer, [example.extract.document for example in examples])
    if rest_fraction < 1:
        sources[NEW] = example_rows(writer, examples)
    mixture = Mixture(sources, {OLD: rest_fraction, NEW: 1 - rest_fraction}, training.batch_size, training.seed)
    identity = {"layout": writer.layout.model_dump(mode="json")}
    train(LanguageModel(writer.model), mixture, training, out, identity=identity, progress=progress)
    writer.model.eval()
    return _save_writer(writer, Path(out) / MODEL)


def _save_writer(writer: LanguageModelWriter, folder: Path) -> Path:
    """Write the model, its tokenizer and its layout with the window."""
    save_model(writer.model, writer.tokenizer, folder)
    layout = writer.layout.model_copy(update={"window": writer.window})
    write_atomically(folder / LAYOUT_NAME, layout.model_dump_json(indent=2).encode())
    return folder


def example_rows(writer: LanguageModelWriter, examples: Sequence[WriterExample]) -> TokenBlocks:
    """Pack whole examples into rows of the writer's window. Attention does not cross examples.

    Raises:
        DataError: there is no example.
        RecipeError: an example does not fit into the window.
    """
    if not examples:
        raise DataError("There is no document with a summary to learn from: give at least one.")
    pairs = (_prompt_and_summary(writer, example) for example in examples)
    streams = [np.array([*prompt, *summary], dtype=np.int32) for prompt, summary in pairs]
    for ids in streams:
        ids[0] = ~ids[0]  # marks the start of a document
    rows = list(_split_rows(np.concatenate(streams), writer.window))
    return TokenBlocks(np.stack(rows), boundaries="whole", pad_id=padding_id(writer.tokenizer))


def _split_rows(stream: np.ndarray, length: int) -> Iterator[np.ndarray]:
    start = 0
    while start < len(stream):
        stop = start + row_end(stream[start : start + length + 1], length, "whole")
        yield filled(stream[start:stop], length)
        start = stop


def _prompt_and_summary(writer: LanguageModelWriter, example: WriterExample) -> tuple[list[int], list[int]]:
    """Return token ids of prompt and summary. The summary ends with EOS, or is cut to `max_new_tokens`."""
    prompt, _ = writer.build_prompt(example.extract)
    ids = list(writer.tokenizer(example.summary, add_special_tokens=False, verbose=False)["input_ids"])
    eos = writer.tokenizer.eos_token_id
    return prompt, [*ids, *([eos] if isinstance(eos, int) else [])][: writer.decoding.max_new_tokens]


def rest_rows(writer: LanguageModelWriter, documents: Sequence[SourceDocument]) -> TokenBlocks:
    """Pack the documents without their introductions into rows of the writer's window.

    Raises:
        DataError: there is no text.
    """
    texts = (TrainingText(writer.layout.rest + rest_text(document), document.name) for document in documents)
    return pack(texts, writer.tokenizer, writer.window, boundaries="whole", name="The rest of the documents")


def rest_text(document: SourceDocument) -> str:
    """Return the sentences outside the introduction."""
    introduction = introduction_range(document)
    return " ".join(sentence.text for index, sentence in enumerate(document.sentences) if index not in introduction)


@torch.inference_mode()
def summary_likelihoods(
    writer: LanguageModelWriter, examples: Sequence[WriterExample], batch_size: int = 8
) -> list[SummaryLikelihood]:
    """Return −Σ log p of each human summary, cut as in training, given its prompt."""
    writer.model.eval()
    pairs = [_prompt_and_summary(writer, example) for example in examples]
    batches = (pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size))
    return [likelihood for batch in batches for likelihood in _batch_likelihoods(writer.model, batch)]


def _batch_likelihoods(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[SummaryLikelihood]:
    """Score one batch. Padding is at the end, where causal attention ignores it."""
    longest = max(len(prompt) + len(summary) for prompt, summary in pairs)
    ids_BT = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, (prompt, summary) in enumerate(pairs):
        ids_BT[row, : len(prompt) + len(summary)] = torch.tensor(prompt + summary)
    ids_BT = ids_BT.to(model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    for row, (prompt, summary) in enumerate(pairs):
        first, last = len(prompt), len(prompt) + len(summary)
        logits = logits_BTV[row, first - 1 : last - 1]
        nats = functional.cross_entropy(logits, ids_BT[row, first:last], reduction="sum")
        yield SummaryLikelihood(float(nats), len(summary))

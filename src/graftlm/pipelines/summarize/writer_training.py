"""Training of writers on documents with human summaries.

An example is a prompt with its human summary, in one window. The rest of the documents fills separate windows, as text
of the domain. The loss covers all tokens, including those of the introduction.

All weights of a model train, or those of the grafts of a `GraftedModel`, whose backbone stays frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftlm.backbone import padding_id
from graftlm.data import NEW, OLD, Mixture, TokenBlocks, pack
from graftlm.data import Document as TrainingText
from graftlm.data.boundaries import split_rows
from graftlm.errors import DataError, RecipeError
from graftlm.files.writing import write_atomically
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.prompt_layout import LAYOUT_NAME, Context
from graftlm.pipelines.summarize.prompts import opening_range
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.writer import LanguageModelWriter
from graftlm.store.artifact import save_graft
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, check_rows, save_model

_log = logging.getLogger(__name__)

MODEL = "model"
"""Name of the folder of the trained model, in the folder of a training run."""

GRAFT = "graft"
"""Name of the folder of the trained graft, in the folder of a training run."""


@dataclass(frozen=True)
class WriterExample:
    """A document with a human summary, for the training of a writer.

    Attributes:
        extract: the selected sentences of the document.
        summary: the text of the human summary.
    """

    extract: Extract
    summary: str


def train_writer(
    writer: LanguageModelWriter,
    examples: Sequence[WriterExample],
    training: TrainingConfig,
    out: str | Path,
    *,
    rest_fraction: float = 0.5,
    identity: Mapping[str, object] | None = None,
    progress: bool = True,
    log: Callable[[str], None] = _log.warning,
) -> Path:
    """Train a writer's model on its layout. An interrupted run resumes from its last checkpoint.

    Rows have the length of the writer's window; `decoding.max_new_tokens` of it are for the summary. What does not fit
    is cut.

    Args:
        writer: the writer; its model is trained in place: all of its weights, or the graft of a `GraftedModel`.
        examples: documents with summaries.
        training: configuration of the training loop.
        out: folder of the history, the checkpoints and the trained model.
        rest_fraction: fraction of the rows that come from the rest of the documents, from 0 to 1; 0 for a graft, to
            which the rest would be old text.
        identity: further JSON values that a resumed run must share.
        progress: whether to display a progress bar.
        log: called with a line of text if prompts or summaries are cut.

    Returns:
        The folder of model, tokenizer and layout, or of graft and layout, for `load_writer`.

    Raises:
        DataError: there is no example, the documents have no text outside their introductions although `rest_fraction`
            is above 0, `rest_fraction` is not from 0 to 1, or the chat template can't be filled.
        RecipeError: the window has no room for an introduction, an extracted sentence and a summary, or is larger than
            the model's; or the model has several grafts, or a graft and a `rest_fraction` above 0.
        TrainingError: `out` has a checkpoint of another run, or the loss or a gradient is not finite.
        EvaluationError: a file in `out` can't be written.
        ArtifactError: the graft can't be written.
    """
    model = writer.model
    is_grafted = isinstance(model, GraftedModel)
    if is_grafted:
        _check_graft(model, rest_fraction)
    check_rows(
        model.backbone.model if is_grafted else model,
        length=writer.window,
        longest=writer.window,
        boundaries="whole",
    )
    mixture = _mixture(writer, examples, training, rest_fraction, log)
    train(
        model if is_grafted else LanguageModel(model),
        mixture,
        training,
        out,
        identity={
            "layout": writer.layout.model_dump(mode="json"),
            "rows": mixture.fingerprint(),
            **(identity or {}),
        },
        progress=progress,
    )
    model.eval()
    return save_writer(writer, out)


def _check_graft(model: GraftedModel, rest_fraction: float) -> None:
    """Raise `RecipeError` if a grafted model can't be trained as a writer."""
    if len(model.grafts) != 1:
        raise RecipeError(f"The writer has {len(model.grafts)} grafts, but one is expected: attach the one to train.")
    if rest_fraction:
        raise RecipeError(
            f"rest_fraction is {rest_fraction:g}, but a graft takes the rest of the documents for old text: set it to "
            "0."
        )


def save_writer(writer: LanguageModelWriter, out: str | Path) -> Path:
    """Write the model of a writer with its layout to a subfolder, which is returned.

    Args:
        writer: the writer. Of a `GraftedModel` only the graft is written.
        out: folder of the run.

    Raises:
        ArtifactError: the graft can't be written.
        EvaluationError: the layout can't be written.
    """
    model = writer.model
    if isinstance(model, GraftedModel):
        (graft,) = model.grafts.values()
        assert isinstance(graft, Graft), "a GraftedModel checks its grafts"
        folder = save_graft(graft, model.backbone, Path(out) / GRAFT)
    else:
        folder = Path(out) / MODEL
        save_model(model, writer.tokenizer, folder)
    layout = writer.layout.model_copy(update={"window": writer.window})
    write_atomically(folder / LAYOUT_NAME, layout.model_dump_json(indent=2).encode())
    return folder


def _mixture(
    writer: LanguageModelWriter,
    examples: Sequence[WriterExample],
    training: TrainingConfig,
    rest_fraction: float,
    log: Callable[[str], None],
) -> Mixture:
    """Return the training data: examples as new text, the rest of their documents as old text."""
    sources: dict[int, TokenBlocks] = {}
    if rest_fraction:
        documents = [example.extract.document for example in examples]
        sources[OLD] = rest_rows(writer, documents)
    if rest_fraction < 1:
        sources[NEW] = example_rows(writer, examples, log)
    fractions = {OLD: rest_fraction, NEW: 1 - rest_fraction}
    return Mixture(sources, fractions, training.batch_size, training.seed)


def example_rows(
    writer: LanguageModelWriter,
    examples: Sequence[WriterExample],
    log: Callable[[str], None] = _log.warning,
) -> TokenBlocks:
    """Pack whole examples into rows of the writer's window. Attention does not cross examples.

    Args:
        writer: the writer.
        examples: documents with summaries.
        log: called with a line of text if prompts or summaries are cut.

    Raises:
        DataError: there is no example, or the chat template can't be filled.
        RecipeError: the window has no room for an introduction, an extracted sentence and a summary.
    """
    if not examples:
        raise DataError("There is no document with a summary to learn from: give at least one.")
    encoded = [encode_example(writer, example) for example in examples]
    _report_cuts(encoded, writer, log)
    marked = []
    for example in encoded:
        ids = np.array([*example.prompt, *example.summary], dtype=np.int32)
        ids[0] = ~ids[0]  # marks the start of a document
        marked.append(ids)
    rows = split_rows(np.concatenate(marked), writer.window, "whole")
    return TokenBlocks(rows, boundaries="whole", pad_id=padding_id(writer.tokenizer))


class EncodedExample(NamedTuple):
    """An example as token ids.

    Attributes:
        prompt: ids of the prompt.
        summary: ids of the human summary and of its end, at most `decoding.max_new_tokens`.
        is_prompt_cut: whether sentences of the introduction, the document or the extract do not fit.
        is_summary_cut: whether the summary lacks its last tokens.
    """

    prompt: list[int]
    summary: list[int]
    is_prompt_cut: bool
    is_summary_cut: bool


def encode_example(writer: LanguageModelWriter, example: WriterExample) -> EncodedExample:
    """Return the token ids of the prompt and of the human summary.

    The summary ends as an answer does in the chat template, or else with the tokenizer's EOS, if there is one. It is
    truncated to `decoding.max_new_tokens`. Errors are those of `LanguageModelWriter.build_prompt`.
    """
    prompt = writer.build_prompt(example.extract)
    _, frame_end = writer.frame_texts
    ids = writer.tokenize(example.summary, behind=frame_end)
    ends = [*writer.turn_ends, writer.tokenizer.eos_token_id]
    ids += [token for token in ends if isinstance(token, int)][:1]
    limit = writer.decoding.max_new_tokens
    return EncodedExample(
        prompt=prompt.ids,
        summary=ids[:limit],
        is_prompt_cut=bool(prompt.notes),
        is_summary_cut=len(ids) > limit,
    )


def _report_cuts(encoded: Sequence[EncodedExample], writer: LanguageModelWriter, log: Callable[[str], None]) -> None:
    """Log how many prompts and summaries are cut."""
    count = len(encoded)
    limit = writer.decoding.max_new_tokens
    summaries = sum(example.is_summary_cut for example in encoded)
    if summaries:
        log(
            f"Of {count:,} human summaries, {summaries:,} are longer than {limit} tokens and are learned without their "
            "end: raise decoding.max_new_tokens to keep it."
        )
    prompts = sum(example.is_prompt_cut for example in encoded)
    if prompts:
        log(
            f"Of {count:,} prompts, {prompts:,} leave out sentences that do not fit in {writer.window:,} tokens: widen "
            "the window to keep them."
        )


def rest_rows(writer: LanguageModelWriter, documents: Sequence[SourceDocument]) -> TokenBlocks:
    """Pack the documents without their introductions into rows of the window.

    Raises:
        DataError: the documents have no text outside their introductions.
    """
    texts = (
        TrainingText(writer.layout.rest + rest_text(document, writer.layout.context), document.name)
        for document in documents
    )
    return pack(
        texts,
        writer.tokenizer,
        writer.window,
        boundaries="whole",
        name="The rest of the documents",
    )


def rest_text(document: SourceDocument, context: Context = "introduction") -> str:
    """Return the sentences that the writer does not read before the extract (see `opening_range`), joined by spaces."""
    opening = opening_range(document, context)
    sentences = enumerate(document.sentences)
    return " ".join(sentence.text for index, sentence in sentences if index not in opening)

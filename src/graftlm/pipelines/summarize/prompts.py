"""Prompts of writers, and what they have before the extract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.prompt_layout import Context

_LEAD_SENTENCES = 30  # sentences that replace the introduction of a document without such a heading


class Opening(NamedTuple):
    """The texts before the extract, of which a prompt takes the first that fit.

    Attributes:
        texts: the texts in order.
        indices: index of the sentence of the document that each text is; empty if the texts were written.
        name: what the texts are, for notes.
        fills: whether the texts take the room that the extract leaves, instead of at most two thirds of the window.
    """

    texts: Sequence[str]
    indices: Sequence[int]
    name: str
    fills: bool = False


class WriterPrompt(NamedTuple):
    """A prompt of a writer.

    Attributes:
        ids: token ids.
        notes: remarks for the user, as sentences.
        read: indices of the sentences in the prompt.
        kept: number of texts of the opening that are in the prompt as a whole.
    """

    ids: list[int]
    notes: list[str]
    read: tuple[int, ...]
    kept: int


def opening_range(document: SourceDocument, context: Context) -> range:
    """Return the indices of the sentences that a writer reads besides the extract.

    Args:
        document: the document.
        context: a value of `PromptLayout.context`.
    """
    return introduction_range(document) if context == "introduction" else range(len(document.sentences))


def introduction_range(document: SourceDocument) -> range:
    """Return the indices of the sentences of the introduction, or the first 30 of a document without one."""
    lead = range(min(_LEAD_SENTENCES, len(document.sentences)))
    return document.introduction or lead


def sentences_opening(document: SourceDocument, indices: range, name: str, *, fills: bool) -> Opening:
    """Return sentences of a document as an opening.

    Args:
        document: the document.
        indices: indices of the sentences.
        name: see `Opening`.
        fills: see `Opening`.
    """
    texts = [document.sentences[index].text for index in indices]
    return Opening(texts, indices, name, fills)

"""Hierarchical prompts: a writer reads a document of any length section by section, then summaries and extract.

Each section is read in windows, and the writer writes a summary of each. If the summaries do not fit into one window
with the extract, they are read in windows in turn, until they do. Only a few windows are in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from graftlm.errors import RecipeError
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.prompts import Opening, WriterPrompt, sentences_opening
from graftlm.pipelines.summarize.selection import Extract

LIVE_WINDOWS = 4
"""Maximum number of windows in memory, which the writer completes in one batch."""

_SUMMARIES = "summaries of its sections"


class WindowWriter(Protocol):
    """What the hierarchy needs of a writer."""

    name: str

    @property
    def window(self) -> int:
        """Maximum number of tokens of prompt and summary together."""
        ...

    def build_prompt(self, extract: Extract, opening: Opening | None = None) -> WriterPrompt:
        """Return the prompt of an opening and an extract."""
        ...

    def write_texts(self, prompts: Sequence[WriterPrompt], language: str) -> list[str]:
        """Return the text that the writer writes after each prompt."""
        ...


def hierarchical_prompt(writer: WindowWriter, extract: Extract) -> WriterPrompt:
    """Return the prompt of section summaries, which the writer writes here, and extract.

    Args:
        writer: the writer.
        extract: the selected sentences of a document.

    Returns:
        The prompt. `read` has the sentences of all windows, and `notes` tell their number.

    Raises:
        DataError: the chat template can't be filled.
        RecipeError: the window has no room for two summaries of sections.
    """
    document = extract.document
    bare = replace(extract, indices=(), scores=(), used=0)
    windows = _section_windows(writer, bare)
    texts, read, cut = _write_windows(writer, windows, document.language)
    count = len(texts)
    texts = [text for text in texts if text]
    prompt = writer.build_prompt(extract, Opening(texts, (), _SUMMARIES, fills=True))
    while prompt.kept < len(texts):
        shorter, _, _ = _write_windows(writer, _summary_windows(writer, bare, texts), document.language)
        if len(shorter) >= len(texts):
            raise RecipeError(
                f"{writer.name} reads at most {writer.window} tokens, which leaves no room for two {_SUMMARIES}: "
                "request a shorter summary, set a larger window, or leave the context hierarchical out."
            )
        count += len(shorter)
        texts = [text for text in shorter if text]
        prompt = writer.build_prompt(extract, Opening(texts, (), _SUMMARIES, fills=True))
    notes = [*prompt.notes, f"{writer.name} read {document.name} section by section, in {count:,} windows."]
    if cut:
        notes.append(f"Sentences longer than a window, of which {writer.name} read the beginning: {cut:,}.")
    everything = sorted({*read, *prompt.read})
    return prompt._replace(notes=notes, read=tuple(everything))


def _section_windows(writer: WindowWriter, bare: Extract) -> Iterator[WriterPrompt]:
    """Yield the windows of each section."""
    document = bare.document
    for section in document.sections:
        first = section.first
        while first < section.end:
            prompt = _sentence_window(writer, bare, document, first, section.end)
            yield prompt
            first += max(prompt.kept, 1)


def _sentence_window(
    writer: WindowWriter, bare: Extract, document: SourceDocument, first: int, end: int
) -> WriterPrompt:
    """Return the window that begins at a sentence. A sentence has at least one token."""
    indices = range(first, min(end, first + writer.window))
    opening = sentences_opening(document, indices, "sentences of the section", fills=True)
    return writer.build_prompt(bare, opening)


def _summary_windows(writer: WindowWriter, bare: Extract, texts: Sequence[str]) -> Iterator[WriterPrompt]:
    """Yield windows of written texts."""
    first = 0
    while first < len(texts):
        window = texts[first : first + writer.window]
        prompt = writer.build_prompt(bare, Opening(window, (), _SUMMARIES, fills=True))
        yield prompt
        first += max(prompt.kept, 1)


def _write_windows(
    writer: WindowWriter, windows: Iterator[WriterPrompt], language: str
) -> tuple[list[str], set[int], int]:
    """Write a text for each window.

    Returns:
        The texts, the indices of the sentences in the windows, and the number of windows with only the beginning of a
        sentence.
    """
    texts: list[str] = []
    read: set[int] = set()
    cut = 0
    while batch := list(islice(windows, LIVE_WINDOWS)):
        texts.extend(writer.write_texts(batch, language))
        for prompt in batch:
            read.update(prompt.read)
            cut += prompt.kept == 0
    return texts, read, cut

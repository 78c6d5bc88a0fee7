"""A summary as lines for people: the text, the passages it rests on, and what of it the source has."""

from __future__ import annotations

from collections.abc import Iterator

from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.summary import Summary

_NEAR = 0.3  # of two sentences' words; below it, the nearest passage is not said to support a sentence


def format_summary(summary: Summary) -> Iterator[str]:
    """The summary with references in brackets, then each passage with its place."""
    numbers = {index: number for number, index in enumerate(summary.extract.indices, start=1)}
    if summary.writer is None:
        for number, sentence in enumerate(summary.extract.sentences, start=1):
            yield f"{sentence.text} [{number}]"
    elif summary.links:
        for link in summary.links:
            near = link.index is not None and link.overlap >= _NEAR
            yield f"{link.text} [{numbers[link.index]}]" if near and link.index is not None else f"{link.text} [?]"
    yield ""
    for number, sentence in enumerate(summary.extract.sentences, start=1):
        yield f"[{number}] {place_of(summary.document, sentence)}"
        if summary.writer is not None:
            yield f"    {sentence.text}"
    if summary.writer is not None:
        yield ""
        yield from _figures(summary)


def place_of(document: SourceDocument, sentence: Sentence) -> str:
    """Page, characters and section of a sentence."""
    page = "" if sentence.page is None else f"page {sentence.page}, "
    title = document.sections[sentence.section].title
    return f"{page}characters {sentence.start}–{sentence.end}" + (f", {title}" if title else "")


def _figures(summary: Summary) -> Iterator[str]:
    found = summary.faithfulness
    shares = {"words": found.words, "pairs of words": found.bigrams, "numbers": found.numbers, "names": found.names}
    told = ", ".join(f"{share:.0%} of its {what}" for what, share in shares.items() if share is not None)
    yield f"The source has {told}." if told else "The summary has no words to look for in the source."
    if found.missing:
        yield f"Not in the source: {', '.join(found.missing)}."
    if any(link.index is None or link.overlap < _NEAR for link in summary.links):
        yield "[?]: no extracted sentence is near."

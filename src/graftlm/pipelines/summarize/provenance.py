"""Provenance: link each sentence of a written summary to the nearest sentence of its source, and mark its support.

Shape suffix: R sentences that the writer read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.metrics import cosine_similarities, faithfulness
from graftlm.pipelines.summarize.text import split_sentences, split_words

_MIN_VERBATIM = 4  # words of a sentence that can be verbatim
_MIN_OVERLAP = 0.35  # F1 of words from which a sentence supports another
_MIN_SIMILARITY = 0.55  # cosine of embeddings from which a sentence supports another


@dataclass(frozen=True, slots=True)
class SentenceLink:
    """A sentence of a written summary and the nearest of the sentences that the writer read.

    Attributes:
        text: the written sentence.
        nearest: index of the nearest sentence in the document; None if none shares a word or has a
            similar embedding.
        overlap: F1 of the two sets of words, 0 to 1.
        mark: `verbatim` if a source sentence contains all words in sequence; `supported` if the sentences that were
            read contain its numbers and names, and the nearest one has similar words or a similar embedding.
        similarity: the largest cosine of embeddings; computed only where words do not decide.
    """

    text: str
    nearest: int | None
    overlap: float
    mark: Literal["verbatim", "supported", "unsupported"]
    similarity: float | None = None


def link_sentences(
    text: str,
    document: SourceDocument,
    read: Sequence[int],
    encoder: str | None = None,
) -> list[SentenceLink]:
    """Link each sentence of a summary to the nearest of the sentences that were read, and mark its support.

    Args:
        text: the summary.
        document: the document.
        read: indices of the sentences that the writer read, at least one.
        encoder: name or folder of a sentence-transformers model. Its embeddings decide on sentences without sufficient
            overlap of words; None marks these as unsupported.

    Raises:
        BackboneError: the encoder can't be loaded.
        MissingExtraError: sentencex is not installed, or an encoder is named and sentence-transformers is not.
    """
    linker = _Linker(document, read)
    links = []
    for start, end in split_sentences(text, document.language):
        sentence = " ".join(text[start:end].split())
        links.append(linker.link(sentence))
    undecided = [link.text for link in links if link.mark == "unsupported"]
    if encoder is None or not undecided:
        return links
    rows = cosine_similarities(undecided, linker.texts, encoder)
    cosines = dict(zip(undecided, rows, strict=True))
    return [linker.link(link.text, cosines.get(link.text)) for link in links]


class _Linker:
    """Compares written sentences with those that a writer read.

    Attributes:
        texts: the sentences that were read.
    """

    def __init__(self, document: SourceDocument, read: Sequence[int]) -> None:
        self.texts = [document.sentences[index].text for index in read]
        self._read = read
        self._words = [split_words(text) for text in self.texts]

    def link(self, sentence: str, cosines_R: NDArray[np.float64] | None = None) -> SentenceLink:
        """Link a sentence to the nearest by words, or by the cosines of embeddings where words do not decide."""
        words = split_words(sentence)
        overlaps = [_overlap(words, other) for other in self._words]
        verbatim = self._sentences_with(words)
        if verbatim:
            best = _argmax(overlaps, verbatim)
            return SentenceLink(sentence, self._read[best], overlaps[best], "verbatim")
        best = _argmax(overlaps, range(len(overlaps)))
        is_near = overlaps[best] >= _MIN_OVERLAP
        similarity = None
        if cosines_R is not None:
            similarity = float(cosines_R.max())
            if not is_near and similarity >= _MIN_SIMILARITY:
                best = int(cosines_R.argmax())
                is_near = True
        is_supported = is_near and not faithfulness(sentence, " ".join(self.texts)).missing
        has_nearest = is_near or overlaps[best] > 0  # near by an embedding, perhaps without a common word
        return SentenceLink(
            text=sentence,
            nearest=self._read[best] if has_nearest else None,
            overlap=overlaps[best],
            mark="supported" if is_supported else "unsupported",
            similarity=similarity,
        )

    def _sentences_with(self, words: Sequence[str]) -> list[int]:
        """Return the positions of the sentences that contain the words in sequence; none for fewer than four words."""
        if len(words) < _MIN_VERBATIM:
            return []
        phrase = f" {' '.join(words)} "
        return [position for position, other in enumerate(self._words) if phrase in f" {' '.join(other)} "]


def _overlap(words: Sequence[str], other: Sequence[str]) -> float:
    """Return the F1 of two sets of words, 0 to 1."""
    distinct = set(words)
    other_distinct = set(other)
    common = len(distinct & other_distinct)
    return 2 * common / max(len(distinct) + len(other_distinct), 1)


def _argmax(values: Sequence[float], positions: Sequence[int]) -> int:
    """Return the position of the largest value; the first of equal ones."""
    return max(positions, key=values.__getitem__)

"""Upper bounds: the sentences, and the runs of words, of a document that are most similar to its abstract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.summarize.corpora import Sample
from graftlm.pipelines.summarize.oracle import rouge_tokens
from graftlm.pipelines.summarize.text import ngrams, split_words


class GramCounts(NamedTuple):
    """Counts of the words of a text, and of its pairs of words."""

    words: Counter[Any]
    pairs: Counter[Any]


def gram_counts(texts: Sequence[str]) -> GramCounts:
    """Count the words of texts, as ROUGE tokenizes them, and their pairs."""
    tokens = [token for text in texts for token in rouge_tokens(text)]
    return GramCounts(Counter(tokens), Counter(ngrams(tokens, 2)))


class _Candidate(NamedTuple):
    """Counts of a sentence, and its number of words."""

    counts: GramCounts
    length: int


def best_sentences(sample: Sample, words: int) -> list[int]:
    """Return the greedy oracle: repeatedly the sentence that adds most to the sum of ROUGE-1 and 2 (F1).

    Args:
        sample: document and abstract.
        words: maximum number of words. The search ends when no sentence fits, or none improves the sum.

    Returns:
        Indices of the sentences in the order of their addition; the first sentence if none improves the sum.
    """
    reference = gram_counts(sample.abstract)
    candidates: dict[int, _Candidate] = {}
    for index in sample.document.selectable:
        text = sample.document.sentences[index].text
        candidates[index] = _Candidate(gram_counts([text]), len(split_words(text)))
    extract = GramCounts(Counter(), Counter())
    chosen: list[int] = []
    best = 0.0
    while True:
        candidates = {index: candidate for index, candidate in candidates.items() if candidate.length <= words}
        scores = {index: _f1_sum(extract, candidate.counts, reference) for index, candidate in candidates.items()}
        if not scores or max(scores.values()) <= best:
            break
        index = max(scores, key=scores.__getitem__)
        added = candidates.pop(index)
        best = scores[index]
        words -= added.length
        chosen.append(index)
        extract.words.update(added.counts.words)
        extract.pairs.update(added.counts.pairs)
    return chosen or sample.document.selectable[:1]


def _f1_sum(extract: GramCounts, added: GramCounts, reference: GramCounts) -> float:
    """Return the sum of ROUGE-1 and 2 (F1) of an extract with one more sentence."""
    total = 0.0
    for first, second, wanted in zip(extract, added, reference, strict=True):
        common = sum(min(first[item] + second[item], count) for item, count in wanted.items())
        items = first.total() + second.total() + wanted.total()
        total += 2 * common / max(items, 1)
    return total


def longest_runs(sample: Sample) -> list[str]:
    """Return the extractive fragments of an abstract: from its first word on, the longest runs of common words."""
    words = split_words(sample.summary)
    source = split_words(sample.document.text)
    positions: dict[str, list[int]] = {}
    for position, word in enumerate(source):
        positions.setdefault(word, []).append(position)
    fragments: list[str] = []
    first = 0
    while first < len(words):
        starts = positions.get(words[first], ())
        length = max((_common_length(words, first, source, start) for start in starts), default=0)
        if length:
            fragments.append(" ".join(words[first : first + length]))
        first += max(length, 1)
    return fragments


def _common_length(words: Sequence[str], first: int, source: Sequence[str], start: int) -> int:
    """Return the number of equal words of two texts from a position of each on."""
    limit = min(len(words) - first, len(source) - start)
    length = 0
    while length < limit and words[first + length] == source[start + length]:
        length += 1
    return length

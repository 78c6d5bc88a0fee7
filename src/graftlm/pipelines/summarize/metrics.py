"""Measures of a summary: ROUGE beside a reference, what it copies and from where, and what its source does not say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from graftlm.evaluation import Interval
from graftlm.pipelines.summarize.text import import_extra, ngrams, split_words

LONGEST = 25  # n-grams of copy curves
ORIGINS = ("extract", "introduction", "rest")
ROUGE = ("rouge1", "rouge2", "rouge3", "rougeL")
_THEIRS = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge3": "rouge3", "rougeL": "rougeLsum"}

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_OPENING = " \t\r\n\"'“‘(["
_STOPS = ".!?:。！？"


@cache
def _scorer() -> Any:
    theirs: Any = import_extra("rouge_score.rouge_scorer", "ROUGE")
    return theirs.RougeScorer(list(_THEIRS.values()), use_stemmer=True)


def rouge(summary: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1, 2, 3 and L, in percent, with Porter's stemmer, by rouge-score.

    Args:
        summary: its sentences.
        reference: likewise. ROUGE-L is that of whole summaries, the union over sentences (`rougeLsum`).
    """
    found = _scorer().score("\n".join(reference), "\n".join(summary))
    return {ours: 100 * float(found[theirs].fmeasure) for ours, theirs in _THEIRS.items()}


def bootstrap(values: Sequence[float], seed: int = 0, samples: int = 1000) -> Interval:
    """The mean, and the ends of its 95% interval over documents drawn again with replacement (percentiles).

    The intervals of rouge-score's aggregator, with a seed of their own instead of numpy's global state.
    """
    found = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(found), size=(samples, len(found)))
    low, high = np.percentile(found[drawn].mean(axis=1), [2.5, 97.5])
    mean = float(found.mean())
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean))


@dataclass(frozen=True, slots=True)
class CopyShare:
    """Of a summary's n-grams of one length, the share that stands in the source, by where it stands there.

    An n-gram counts for the first of extract, introduction and the rest that has it, so the three add up to `copied`.
    """

    n: int
    copied: float
    extract: float
    introduction: float
    rest: float


def copy_shares(
    summary: str, document: str, extract: str = "", introduction: str = "", longest: int = LONGEST
) -> list[CopyShare]:
    """Shares for n = 1 to `longest`, or to the summary's length where that is smaller."""
    words = split_words(summary)
    runs = [_runs(words, split_words(text)) for text in (extract, introduction, document)]
    return [_share(runs, n, len(words) - n + 1) for n in range(1, min(longest, len(words)) + 1)]


def _runs(words: Sequence[str], source: Sequence[str]) -> list[int]:
    """For each place among the words, how many words from there on stand in the source in a row.

    From the last to the first: words i and s are equal, so their run is one longer than that of i + 1 and s + 1.
    """
    places: dict[str, list[int]] = {}
    for place, word in enumerate(source):
        places.setdefault(word, []).append(place)
    found, after = [], dict[int, int]()
    for word in reversed(words):
        after = {place: 1 + after.get(place + 1, 0) for place in places.get(word, ())}
        found.append(max(after.values(), default=0))
    return found[::-1]


def _share(runs: Sequence[Sequence[int]], n: int, count: int) -> CopyShare:
    """Of the `count` n-grams, each of which stands in the sources whose run is as long."""
    found = Counter(next((place for place, own in enumerate(runs) if own[i] >= n), -1) for i in range(count))
    shares = [found[place] / count for place in range(len(runs))]
    return CopyShare(n, (count - found[-1]) / count, *shares)


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """How much of a summary stands in its source: shares from 0 to 1, None where there is nothing to look for.

    Attributes:
        words: of its words.
        bigrams: of its pairs of words; what is missing is new decoding, or made up.
        numbers: of its numbers, as written.
        names: of its names: words with a capital letter that do not begin a sentence.
        missing: numbers and names that the source does not have.
    """

    words: float | None
    bigrams: float | None
    numbers: float | None
    names: float | None
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self) | {"missing": list(self.missing)}


def faithfulness(summary: str, source: str) -> Faithfulness:
    """What of a summary stands in its source."""
    words, known = split_words(summary), split_words(source)
    numbers, names = _NUMBER.findall(summary), names_of(summary)
    there = {*_NUMBER.findall(source), *known}
    missing = [item for item in (*numbers, *names) if item not in there and item.casefold() not in there]
    return Faithfulness(
        words=_known_share(words, set(known)),
        bigrams=_known_share(ngrams(words, 2), set(ngrams(known, 2))),
        numbers=_known_share(numbers, there),
        names=_known_share([name.casefold() for name in names], there),
        missing=tuple(dict.fromkeys(missing)),
    )


def names_of(text: str) -> list[str]:
    """Words with a capital letter that do not begin a sentence; a heuristic, for scripts that have capitals."""
    found = (match for match in _WORD.finditer(text) if match.group()[0].isupper() and match.group() != "I")
    return [match.group() for match in found if not _begins(text, match.start())]


def _begins(text: str, place: int) -> bool:
    """Whether nothing but a full stop, quotes and white space stands before a place."""
    before = text[max(place - 8, 0) : place].rstrip(_OPENING)
    return before[-1:] in _STOPS  # nothing at all counts too


def _known_share(wanted: Sequence[Any], known: Iterable[Any]) -> float | None:
    have = set(known)
    return sum(item in have for item in wanted) / len(wanted) if wanted else None


def mean_copy_shares(documents: Iterable[Sequence[CopyShare]]) -> dict[int, Mapping[str, float]]:
    """The mean of copy shares over documents, by n; documents with fewer words do not count for large n."""
    rows: dict[int, list[CopyShare]] = {}
    for shares in documents:
        for share in shares:
            rows.setdefault(share.n, []).append(share)
    columns = ("copied", *ORIGINS)
    return {
        n: {column: float(np.mean([getattr(share, column) for share in found])) for column in columns}
        for n, found in rows.items()
    }

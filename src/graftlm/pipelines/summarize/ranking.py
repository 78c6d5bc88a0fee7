"""The default selector: a small network on position, section, centrality and wording, and maximal marginal relevance.

The weights are in `weights.json`, which `python -m experiments summarize` learns from proposals with human
abstracts. It reads no pretrained model. Shape suffixes: N sentences, F features, V words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from graftlm.config import Config, read_yaml
from graftlm.pipelines.summarize.document import Sentence, SourceDocument, normalize_title
from graftlm.pipelines.summarize.selection import RankedSentence
from graftlm.pipelines.summarize.text import split_words

Floats = NDArray[np.float64]
_MAX_CANDIDATES = 300  # the best sentences, which are compared with each other
_KNOWN = read_yaml(Path(__file__).with_suffix(".yaml"))
WORDING = {name: re.compile(pattern).search for name, pattern in _KNOWN["wording"].items()}


class RankingModel(Config):
    """The model of the default selector: score = linear · x + output · ReLU(hidden · [x; 1]).

    Args:
        features: names of the entries of x.
        linear: a weight for each feature, or none.
        hidden: weights and bias of each hidden unit.
        output: a weight for each hidden unit.
        redundancy: how much the similarity to a sentence that is ranked before counts, in standard deviations of the
            scores.
        source: the command that learned the weights.
    """

    features: tuple[str, ...]
    linear: tuple[float, ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    output: tuple[float, ...] = ()
    redundancy: float = 0.0
    source: str = ""

    def score(self, features: Mapping[str, Floats]) -> Floats:
        """Return the scores of sentences, (N,), given the features of `sentence_features`."""
        x_NF = np.stack([features[name] for name in self.features], axis=1)
        scores_N = x_NF @ np.array(self.linear) if self.linear else np.zeros(len(x_NF))
        if self.hidden:
            hidden = np.array(self.hidden)
            scores_N = scores_N + np.maximum(x_NF @ hidden[:, :-1].T + hidden[:, -1], 0) @ np.array(self.output)
        return scores_N


@dataclass(frozen=True)
class DefaultSelector:
    """Ranks by the learned weights; sentences that repeat a better one come later."""

    model: RankingModel | None = None
    name: str = "the default selector"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences; those behind the best 300 are not compared with others."""
        model, indices = self.model or packaged_model(), document.selectable
        if not indices:
            return []
        features, words_NV = sentence_features(document)
        scores_N = model.score(features)
        order = diverse_order(scores_N, words_NV, model.redundancy)
        return [RankedSentence(indices[position], float(scores_N[position])) for position in order]


@cache
def packaged_model() -> RankingModel:
    """The model that comes with the package."""
    return RankingModel.model_validate_json(Path(__file__).with_name("weights.json").read_bytes())


def diverse_order(scores_N: Floats, words_NV: Any, redundancy: float) -> list[int]:
    """Return positions by maximal marginal relevance: score less `redundancy` times the similarity to those before."""
    order = np.argsort(-scores_N, kind="stable")
    best = order[:_MAX_CANDIDATES]
    similar = (words_NV[best] @ words_NV[best].T).toarray()
    values = scores_N[best] / (scores_N.std() or 1.0)
    nearest, chosen = np.zeros(len(best)), list[int]()
    for _ in best:
        position = int(np.argmax(values - redundancy * nearest))
        chosen.append(position)
        nearest = np.maximum(nearest, similar[position])
        values[position] = -np.inf
    return [int(index) for index in (*best[chosen], *order[_MAX_CANDIDATES:])]


def sentence_features(document: SourceDocument) -> tuple[dict[str, Floats], Any]:
    """Return the features of the selectable sentences by name, and their TF-IDF vectors of length 1, (N, V), sparse."""
    sentences = [document.sentences[index] for index in document.selectable]
    words = [split_words(sentence.text) or [sentence.text] for sentence in sentences]
    new_vectorizer: Any = TfidfVectorizer  # takes a function as analyzer, which its annotation lacks
    vectorizer = new_vectorizer(analyzer=lambda row: row, sublinear_tf=True)
    words_NV: Any = vectorizer.fit_transform(words)
    features = _positions(sentences) | _sections(document, sentences)
    for name, rows in (("centrality", slice(None)), ("lead_similarity", slice(10))):
        values = words_NV @ np.asarray(words_NV[rows].mean(axis=0)).ravel()
        features[name] = values / values.max()
    features["title_similarity"] = (words_NV @ vectorizer.transform([split_words(document.title)]).T).toarray()[:, 0]
    counts = Counter(word for row in words for word in {*row} if len(word) > 3)
    common = {word: count / counts.most_common(1)[0][1] for word, count in counts.items()}
    features["frequency"] = np.array([sum(common.get(word, 0) for word in row) / len(row) for row in words])
    lengths = np.log([len(row) for row in words])
    titles = {word for section in document.sections for word in split_words(section.title) if len(word) > 3}
    features |= {
        "length": lengths,
        "length_squared": (lengths - 3) ** 2,
        "title_words": np.array([len({*row} & titles) / len({*row}) for row in words]),
        "digits": np.array([_share(sentence.text, str.isdigit) for sentence in sentences]),
        "symbols": np.array([_share(sentence.text, "`_(){}[]<>=/".__contains__) for sentence in sentences]),
    }
    for name, matches in WORDING.items():
        features[name] = np.array([float(matches(sentence.text) is not None) for sentence in sentences])
    return features, words_NV


def _share(text: str, is_counted: Callable[[str], bool]) -> float:
    return sum(map(is_counted, text)) / len(text)


def _positions(sentences: Sequence[Sentence]) -> dict[str, Floats]:
    order = np.arange(len(sentences), dtype=float)
    near = {f"near_{width}": np.exp(-order / width) for width in (2, 6, 15, 50)}
    return {"first": (order == 0).astype(float), "relative": order / len(sentences), **near}


def _sections(document: SourceDocument, sentences: Sequence[Sentence]) -> dict[str, Floats]:
    """Return where a sentence stands in its section, and which section that is."""
    seen: dict[int, int] = {}
    rows: list[list[float]] = []
    for sentence in sentences:
        rank = seen[sentence.section] = seen.get(sentence.section, -1) + 1
        section = document.sections[sentence.section]
        title = normalize_title(section.title)
        named = [float(title.startswith(tuple(known))) for known in _KNOWN["titles"].values()]
        rows.append([1 / (1 + rank), float(rank == 0), 1 / len(seen), section.level / 4, *named])
    names = ("near_heading", "below_heading", "early_section", "level", *_KNOWN["titles"])
    return dict(zip(names, np.array(rows).T, strict=True))

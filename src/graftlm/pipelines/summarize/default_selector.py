"""The default selector: a small network on position, section, centrality and wording, and maximal marginal relevance.

The weights are in `weights.json`, which `python -m experiments summarize` learns from proposals with human abstracts.
The selector uses no pretrained model. Shape suffixes: N sentences, F features, V words.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.config import Config, read_yaml
from graftlm.pipelines.summarize.document import Sentence, SourceDocument, normalize_title
from graftlm.pipelines.summarize.selection import RankedSentence
from graftlm.pipelines.summarize.text import split_words

Floats = NDArray[np.float64]

_MAX_CANDIDATES = 300  # best sentences that are compared with each other
_LEAD = 10  # first sentences, to which the feature `lead_similarity` compares
_MIN_LETTERS = 4  # minimum length of the words that the features `frequency` and `title_words` count
_SYMBOLS = "`_(){}[]<>=/"
_KNOWN = read_yaml(Path(__file__).with_suffix(".yaml"))

WORDING = {name: re.compile(pattern).search for name, pattern in _KNOWN["wording"].items()}
"""Expressions in a sentence: the search function of each by the name of its feature."""


class RankingModel(Config):
    """The model of the default selector: score = linear · x + output · ReLU(hidden · [x; 1]).

    Args:
        features: names of the entries of x, from those of `sentence_features`.
        linear: weight of each feature; empty without a linear part.
        hidden: weights of the F features and the bias of each hidden unit; empty without a hidden layer.
        output: weight of each hidden unit.
        redundancy: weight of the similarity to a sentence with a higher rank, in standard deviations of the scores.
        source: the command that learned the weights.
    """

    features: tuple[str, ...]
    linear: tuple[float, ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    output: tuple[float, ...] = ()
    redundancy: float = 0.0
    source: str = ""

    def score(self, features: Mapping[str, Floats]) -> Floats:
        """Compute the scores of N sentences, float64, (N,).

        Args:
            features: each feature by its name, (N,), as `sentence_features` returns them.
        """
        x_NF = np.stack([features[name] for name in self.features], axis=1)
        scores_N = np.zeros(len(x_NF))
        if self.linear:
            scores_N = x_NF @ np.array(self.linear)
        if self.hidden:
            hidden = np.array(self.hidden)
            weights = hidden[:, :-1]
            bias = hidden[:, -1]
            activations = np.maximum(x_NF @ weights.T + bias, 0)
            scores_N = scores_N + activations @ np.array(self.output)
        return scores_N


@dataclass(frozen=True)
class DefaultSelector:
    """Ranks sentences by learned weights, and moves those that repeat a better sentence to a later rank.

    Args:
        model: the weights; None uses those of the package.
        name: human-readable name.
    """

    model: RankingModel | None = None
    name: str = "the default selector"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences, best first; an empty list if there are none.

        Only the 300 sentences with the highest scores are compared with each other.
        """
        model = self.model or packaged_model()
        indices = document.selectable
        if not indices:
            return []
        features, words_NV = sentence_features(document)
        scores_N = model.score(features)
        order = diverse_order(scores_N, words_NV, model.redundancy)
        return [RankedSentence(indices[position], float(scores_N[position])) for position in order]


@cache
def packaged_model() -> RankingModel:
    """Return the model that comes with the package."""
    path = Path(__file__).with_name("weights.json")
    return RankingModel.model_validate_json(path.read_bytes())


def diverse_order(scores_N: Floats, words_NV: Any, redundancy: float) -> list[int]:
    """Return the positions of N sentences in the order of maximal marginal relevance.

    The next sentence has the largest score, less `redundancy` times its largest similarity to the sentences before it.
    Sentences after the 300 with the highest scores follow in the order of their scores.

    Args:
        scores_N: scores, (N,).
        words_NV: sparse TF-IDF vectors of length 1, (N, V).
        redundancy: weight of the similarity, in standard deviations of the scores.
    """
    order = np.argsort(-scores_N, kind="stable")
    best = order[:_MAX_CANDIDATES]
    rest = order[_MAX_CANDIDATES:]
    similarities = (words_NV[best] @ words_NV[best].T).toarray()
    values = scores_N[best] / (scores_N.std() or 1.0)
    nearest = np.zeros(len(best))
    chosen: list[int] = []
    for _ in best:
        position = int(np.argmax(values - redundancy * nearest))
        chosen.append(position)
        nearest = np.maximum(nearest, similarities[position])
        values[position] = -np.inf
    return [int(index) for index in (*best[chosen], *rest)]


def sentence_features(document: SourceDocument) -> tuple[dict[str, Floats], Any]:
    """Compute the features of a document's selectable sentences. The document must have at least one.

    Returns:
        The features by name, each (N,), and the sparse TF-IDF vectors of the sentences, of length 1, (N, V).
    """
    sentences = [document.sentences[index] for index in document.selectable]
    texts = [sentence.text for sentence in sentences]
    words = [split_words(text) or [text] for text in texts]
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second to import

    # The annotation of the vectorizer does not allow a function as analyzer.
    new_vectorizer: Any = TfidfVectorizer
    vectorizer = new_vectorizer(analyzer=list, sublinear_tf=True)
    words_NV = vectorizer.fit_transform(words)
    title_1V = vectorizer.transform([split_words(document.title)])
    features = {
        **_position_features(len(sentences)),
        **_section_features(document, sentences),
        "centrality": _similarity_to_mean(words_NV, words_NV),
        "lead_similarity": _similarity_to_mean(words_NV, words_NV[:_LEAD]),
        "title_similarity": (words_NV @ title_1V.T).toarray()[:, 0],
        **_word_features(document, words),
        **_text_features(texts),
    }
    return features, words_NV


def _position_features(count: int) -> dict[str, Floats]:
    """Return features of the position in a document of `count` sentences."""
    order = np.arange(count, dtype=float)
    return {
        "first": (order == 0).astype(float),
        "relative": order / count,
        "near_2": np.exp(-order / 2),
        "near_6": np.exp(-order / 6),
        "near_15": np.exp(-order / 15),
        "near_50": np.exp(-order / 50),
    }


def _section_features(document: SourceDocument, sentences: Sequence[Sentence]) -> dict[str, Floats]:
    """Return features of the section and of the position in it."""
    ranks: dict[int, int] = {}  # position of the latest sentence in each section
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for sentence in sentences:
        rank = ranks.get(sentence.section, -1) + 1
        ranks[sentence.section] = rank
        section = document.sections[sentence.section]
        title = normalize_title(section.title)
        columns["near_heading"].append(1 / (1 + rank))
        columns["below_heading"].append(float(rank == 0))
        columns["early_section"].append(1 / len(ranks))
        columns["level"].append(section.level / 4)
        for name, openings in _KNOWN["titles"].items():
            columns[name].append(float(title.startswith(tuple(openings))))
    return {name: np.array(column) for name, column in columns.items()}


def _similarity_to_mean(words_NV: Any, others: Any) -> Floats:
    """Return the similarity of sentences to the mean of others, divided by the largest one."""
    mean_V = np.asarray(others.mean(axis=0)).ravel()
    similarity_N = words_NV @ mean_V
    return similarity_N / similarity_N.max()


def _word_features(document: SourceDocument, words: Sequence[Sequence[str]]) -> dict[str, Floats]:
    """Return features of the words of each sentence."""
    frequencies = _document_frequencies(words)
    frequency = []
    for row in words:
        total = sum(frequencies.get(word, 0) for word in row)
        frequency.append(total / len(row))
    titles = _title_words(document)
    title_words = []
    for row in words:
        distinct = set(row)
        title_words.append(len(distinct & titles) / len(distinct))
    lengths = np.log([len(row) for row in words])
    return {
        "frequency": np.array(frequency),
        "length": lengths,
        "length_squared": (lengths - 3) ** 2,
        "title_words": np.array(title_words),
    }


def _document_frequencies(words: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the number of sentences with each long word, divided by the largest one."""
    counts = Counter[str]()
    for row in words:
        counts.update({word for word in row if len(word) >= _MIN_LETTERS})
    largest = max(counts.values(), default=1)
    return {word: count / largest for word, count in counts.items()}


def _title_words(document: SourceDocument) -> set[str]:
    """Return the long words of all section titles."""
    words: set[str] = set()
    for section in document.sections:
        words.update(word for word in split_words(section.title) if len(word) >= _MIN_LETTERS)
    return words


def _text_features(texts: Sequence[str]) -> dict[str, Floats]:
    """Return features of the characters and expressions of each sentence."""
    features = {
        "digits": np.array([_share(text, str.isdigit) for text in texts]),
        "symbols": np.array([_share(text, _SYMBOLS.__contains__) for text in texts]),
    }
    for name, search in WORDING.items():
        features[name] = np.array([float(search(text) is not None) for text in texts])
    return features


def _share(text: str, is_counted: Callable[[str], bool]) -> float:
    return sum(is_counted(character) for character in text) / len(text)

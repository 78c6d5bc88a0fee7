"""What finds a prompt's domain without a model: a classifier of its words, and one of its form alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from scipy.stats import binomtest
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from experiments.token_routing.texts import read_questions
from graftlm.evaluation import Interval, Row


def words(prompt: str) -> list[str]:
    """A prompt's words in lower case."""
    return re.findall(r"\w+", prompt.lower())


def form(prompt: str) -> list[str]:
    """Sequences of one to three words and marks with every word but function words masked, and the length."""
    tokens = [_masked(token) for token in re.findall(r"\n|\w+|[^\w\s]", prompt)]
    grams = [" ".join(tokens[i : i + n]) for n in (1, 2, 3) for i in range(len(tokens) - n + 1)]
    return [*grams, f"length {len(tokens).bit_length()}"]


def _masked(token: str) -> str:
    if not re.match(r"\w", token) or token.lower() in ENGLISH_STOP_WORDS:
        return token
    return "0" if token[0].isdigit() else "a_b" if "_" in token else "A" if token[0].isupper() else "a"


CLASSIFIERS = {
    "bag_of_words": ("logistic regression of words", words),
    "form_classifier": ("logistic regression of the form", form),
}


def classifier_rows(texts: Path, domains: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """The share of test prompts whose domain each classifier finds; it learns from the experts' training prompts."""
    trained = [(each.prompt, domain) for domain in domains for each in read_questions(texts, domain, "train")]
    tested = {name: [e.prompt for s in seeds for e in read_questions(texts, name, f"test{s}")] for name in domains}
    rows = []
    for row, (label, analyser) in CLASSIFIERS.items():
        model = make_pipeline(CountVectorizer(analyzer=cast("Any", analyser)), LogisticRegression(max_iter=2000))
        model.fit(*zip(*trained, strict=True))
        right = {domain: (model.predict(prompts) == domain).tolist() for domain, prompts in tested.items()}
        metrics = {f"routing_accuracy_{domain}": 100 * sum(of) / len(of) for domain, of in right.items()}
        share = wilson([hit for of in right.values() for hit in of])
        rows.append(Row(id=row, label=label, metrics={**metrics, "routing_accuracy": share}))
    return rows


def wilson(hits: Sequence[int]) -> Interval:
    """The percentage of hits with Wilson's interval."""
    interval = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    return Interval(mean=100 * sum(hits) / len(hits), low=100 * interval.low, high=100 * interval.high)

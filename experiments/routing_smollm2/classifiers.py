"""Classifiers of the domain of a prompt, by its words or by its form alone, as baselines without a model."""

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
from graftlm.evaluation import Interval, Metric, Row


def words(prompt: str) -> list[str]:
    """Return the words of a prompt in lower case."""
    return re.findall(r"\w+", prompt.lower())


def form(prompt: str) -> list[str]:
    """Return the form of a prompt: sequences of one to three tokens, and the length.

    Tokens are words and punctuation marks. All words but function words are masked.
    """
    tokens = [_masked(token) for token in re.findall(r"\n|\w+|[^\w\s]", prompt)]
    features = []
    for n in (1, 2, 3):
        starts = range(len(tokens) - n + 1)
        features += [" ".join(tokens[start : start + n]) for start in starts]
    features.append(f"length {len(tokens).bit_length()}")
    return features


def _masked(token: str) -> str:
    """Replace a word that is not a function word by a mask of its form."""
    if not re.match(r"\w", token) or token.lower() in ENGLISH_STOP_WORDS:
        return token
    if token[0].isdigit():
        return "0"
    if "_" in token:
        return "a_b"
    return "A" if token[0].isupper() else "a"


CLASSIFIERS = {
    "bag_of_words": ("logistic regression of words", words),
    "form_classifier": ("logistic regression of the form", form),
}


def classifier_rows(texts: Path, domains: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """Measure the share of test prompts whose domain is found by classifiers of the experts' training prompts."""
    train_prompts: list[str] = []
    train_domains: list[str] = []
    test_prompts: dict[str, list[str]] = {}
    for domain in domains:
        prompts = _prompts(texts, domain, "train")
        train_prompts += prompts
        train_domains += [domain] * len(prompts)
        test_prompts[domain] = []
        for seed in seeds:
            test_prompts[domain] += _prompts(texts, domain, f"test{seed}")
    rows = []
    for row, (label, analyser) in CLASSIFIERS.items():
        vectorizer = CountVectorizer(analyzer=cast("Any", analyser))
        model = make_pipeline(vectorizer, LogisticRegression(max_iter=2000))
        model.fit(train_prompts, train_domains)
        metrics: dict[str, Metric] = {}
        all_hits: list[bool] = []
        for domain, prompts in test_prompts.items():
            hits = (model.predict(prompts) == domain).tolist()
            metrics[f"routing_accuracy_{domain}"] = 100 * sum(hits) / len(hits)
            all_hits += hits
        metrics["routing_accuracy"] = wilson(all_hits)
        rows.append(Row(id=row, label=label, metrics=metrics))
    return rows


def _prompts(texts: Path, domain: str, part: str) -> list[str]:
    return [question.prompt for question in read_questions(texts, domain, part)]


def wilson(hits: Sequence[int]) -> Interval:
    """Return the percentage of hits with the interval of Wilson."""
    test = binomtest(sum(hits), len(hits))
    interval = test.proportion_ci(method="wilson")
    return Interval(
        mean=100 * sum(hits) / len(hits),
        low=100 * interval.low,
        high=100 * interval.high,
    )

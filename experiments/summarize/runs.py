"""The runs: the weights of the default selector are learned and searched for, and selectors are measured."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

from experiments.summarize.corpora import CORPORA, DocumentRun, Sample
from experiments.summarize.learned import OUTPUT, copy_curve
from experiments.summarize.rivals import RandomSelector, SumySelector, TextRankSelector
from graftlm.evaluation import Interval, Row, bootstrap
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.pipelines.summarize import Budget, DefaultSelector, LeadSelector, Selector, select
from graftlm.pipelines.summarize.metrics import rouge
from graftlm.pipelines.summarize.oracle import rouge_tokens
from graftlm.pipelines.summarize.ranking import WORDING, RankingModel, diverse_order, sentence_features
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.summary import SELECTION
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.runs.run import RunContext

COMMAND = "python -m experiments summarize"
MEMBERS = 2  # networks of a model
EPOCHS = 12
LEADS = (3, 10)  # an extract has as many words as this many first sentences
METRICS = ("rouge1", "rouge2", "rougeL")
Floats = NDArray[np.float64]
Kind = Literal[
    "random", "lead", "centroid", "lexrank", "textrank", "lsa", "sumbasic", "default", "plain", "single", "linear",
    "unfiltered", "transfer", "classifier", "pointer", "modern", "seq2seq", "pointer_generator", "oracle", "fragments",
]  # fmt: skip
TRAINED: tuple[Kind, ...] = ("classifier", "pointer", "modern")
WRITTEN: tuple[Kind, ...] = ("seq2seq", "pointer_generator")
LEARNED = ("default", "plain", "single", "linear", "transfer", "unfiltered")


def word_budgets(sample: Sample) -> list[int]:
    """The number of words of the first 3 and of the first 10 sentences."""
    sentences = [sample.document.sentences[index].text for index in sample.document.selectable]
    return [sum(len(split_words(text)) for text in sentences[:count]) for count in LEADS]


class LearningRow(NamedTuple):
    """A document to learn from: features and vectors of its sentences, counts of words and pairs, and its abstract."""

    sample: Sample
    features: dict[str, Floats]
    vectors: Any
    counts: list[tuple[Counter[Any], Counter[Any]]]
    reference: tuple[Counter[Any], Counter[Any]]


def _counts(texts: Sequence[str]) -> tuple[Counter[Any], Counter[Any]]:
    tokens = [token for text in texts for token in rouge_tokens(text)]
    return Counter(tokens), Counter(ngrams(tokens, 2))


def _learning_row(sample: Sample) -> LearningRow:
    features, vectors = sentence_features(sample.document)
    texts = [sample.document.sentences[index].text for index in sample.document.selectable]
    return LearningRow(sample, features, vectors, [_counts([text]) for text in texts], _counts(sample.abstract))


def _overlap(first: Counter[Any], second: Counter[Any]) -> tuple[int, int]:
    """The common items, and all items of both."""
    return (first & second).total(), first.total() + second.total()


class LearningSetting(NamedTuple):
    """What the search chooses.

    Attributes:
        model: `linear` is a ridge regression, `network` the mean of two networks of one hidden layer.
        exponent: the target is the share of the abstract that a sentence has, over its length to this power.
        has_wording: the features of wording are used.
        redundancy: of the selector.
    """

    model: Literal["linear", "network"]
    exponent: float
    has_wording: bool
    redundancy: float


SETTINGS = [
    LearningSetting(*values)
    for values in product(("linear", "network"), (0.5, 0.7, 1.0), (True, False), (0.0, 1.0, 2.0, 3.0))
]


def target(row: LearningRow, exponent: float) -> list[float]:
    """What the model predicts of each sentence: its common words, and twice its common pairs of words, per length."""
    total = max(row.reference[0].total(), 1)
    common = [[_overlap(*pair)[0] for pair in zip(counts, row.reference, strict=True)] for counts in row.counts]
    lengths = [max(counts[0].total(), 8) for counts in row.counts]
    return [
        (words + 2 * pairs) / total / length**exponent for (words, pairs), length in zip(common, lengths, strict=True)
    ]


def learn(rows: Sequence[LearningRow], setting: LearningSetting, seed: int, draws: int) -> RankingModel:
    """Learn from sentences that are drawn so that each document counts the same."""
    names = tuple(name for name in rows[0].features if setting.has_wording or name not in WORDING)
    features = np.concatenate([np.stack([row.features[name] for name in names], axis=1) for row in rows])
    share = np.concatenate([np.full(len(row.counts), 1 / len(row.counts)) for row in rows])
    drawn = np.random.default_rng(seed).choice(len(share), draws, p=share / share.sum())
    scaler = StandardScaler().fit(features)
    targets = np.concatenate([target(row, setting.exponent) for row in rows])[drawn]
    inputs, targets = scaler.transform(features[drawn]), (targets - targets.mean()) / targets.std()
    scale, mean = np.asarray(scaler.scale_), np.asarray(scaler.mean_)
    fields: dict[str, Any] = {"features": names, "redundancy": setting.redundancy, "source": COMMAND}
    if setting.model == "linear":
        linear = np.asarray(Ridge(1.0).fit(inputs, targets).coef_) / scale
        return RankingModel(linear=_rounded(linear), **fields)
    hidden: list[tuple[float, ...]] = []
    output: list[float] = []
    for member in range(MEMBERS):
        new_network: Any = MLPRegressor  # its annotation takes no number as batch size
        network = new_network(
            hidden_layer_sizes=(24,), alpha=1e-3, batch_size=256, learning_rate_init=2e-3, max_iter=EPOCHS,
            random_state=MEMBERS * seed + member,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed
            network.fit(inputs, targets)
        weights = network.coefs_[0].T / scale
        hidden += [
            _rounded([*row, bias - row @ mean]) for row, bias in zip(weights, network.intercepts_[0], strict=True)
        ]
        output += _rounded(network.coefs_[1][:, 0] / MEMBERS)
    return RankingModel(hidden=tuple(hidden), output=tuple(output), **fields)


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def quick_rouge(row: LearningRow, scores: Floats, redundancy: float) -> float:
    """The mean over both budgets of ROUGE-1 and 2, in percent, without pairs of words across sentences."""
    order = diverse_order(scores, row.vectors, redundancy)
    lengths = [len(split_words(row.sample.document.sentences[index].text)) for index in row.sample.document.selectable]
    total = 0.0
    for budget in word_budgets(row.sample):
        chosen: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())
        used = 0
        for position in order:
            if used + lengths[position] <= budget:
                used += lengths[position]
                for own, counts in zip(chosen, row.counts[position], strict=True):
                    own.update(counts)
        for own, reference in zip(chosen, row.reference, strict=True):
            common, everything = _overlap(own, reference)
            total += 200 * common / max(everything, 1)
    return total / (2 * len(LEADS))


class WeightsRun(DocumentRun):
    """Learns with each setting, and keeps what is best on the validation documents. The search uses the first seed.

    Args:
        seeds: of the kept models.
        draws: sentences to learn from.
    """

    seeds: tuple[int, ...]
    draws: int = Field(100_000, ge=1)

    def artefacts(self) -> tuple[str, ...]:
        return tuple(
            f"{name}_s{seed}.json" for name in ("default", "plain", "single", "linear", *CORPORA) for seed in self.seeds
        )

    def measure(self, context: RunContext) -> Measurement:
        train, validation = ([_learning_row(sample) for sample in self.parts[part]] for part in ("train", "validation"))
        scores: dict[LearningSetting, float] = {}
        predicted: list[Floats] = []
        for setting in SETTINGS:
            if setting.redundancy == 0:
                model = learn(train, setting, self.seeds[0], self.draws)
                predicted = [model.score(row.features) for row in validation]
            pairs = zip(validation, predicted, strict=True)
            scores[setting] = float(np.mean([quick_rouge(row, values, setting.redundancy) for row, values in pairs]))
        best = max(scores, key=scores.__getitem__)
        kept = {
            "default": best,
            "plain": max((setting for setting in scores if not setting.has_wording), key=scores.__getitem__),
            "single": best._replace(redundancy=0.0),
            "linear": max((setting for setting in scores if setting.model == "linear"), key=scores.__getitem__),
        }
        for seed in self.seeds:
            models = {name: learn(train, setting, seed, self.draws) for name, setting in kept.items()}
            for corpus in CORPORA:
                models[corpus] = learn([row for row in train if row.sample.corpus != corpus], best, seed, self.draws)
            for name, model in models.items():
                path = context.folder / f"{name}_s{seed}.json"
                write_atomically(path, (model.model_dump_json() + "\n").encode())
        search = [setting._asdict() | {"validation": round(score, 3)} for setting, score in scores.items()]
        row = Row(id=self.id, label=self.id, metrics={"settings": len(scores), "validation": scores[best]})
        return Measurement(row, {"search": search, "kept": {name: setting._asdict() for name, setting in kept.items()}})


def mean_metrics(scores: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Interval]:
    """Means over documents of each metric and budget, with bootstrap intervals."""
    return {
        f"{name}_lead{count}": bootstrap([rows[position][name] for rows in scores.values()])
        for position, count in enumerate(LEADS)
        for name in (*METRICS, "words")
    }


class ExtractRun(DocumentRun):
    """Selects sentences of the test documents at both budgets, and compares them with the abstracts.

    Args:
        kind: of the selector. `plain` has no features of wording, `single` no redundancy, `linear` no hidden layer,
            `unfiltered` none of `summarize`'s rules for short sentences and sections, and `transfer` did not learn from
            the collection that it is measured on. `oracle` adds the sentence that helps
            ROUGE-1 and 2 most; `fragments` joins the longest runs of the abstract's words that the document has. What
            is written has its own length at both budgets, as fragments have.
        seed: of `random`, and of what is learned.
    """

    kind: Kind
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        samples, output = self.parts["test"], dict[str, Any]()
        if self.kind in (*TRAINED, *WRITTEN):
            (folder,) = context.dependencies.values()
            output = json.loads((folder / OUTPUT).read_text(encoding="utf-8"))
        scores = {
            sample.id: [
                rouge(texts, sample.abstract) | {"words": float(sum(len(split_words(text)) for text in texts))}
                for texts in self._extracts(sample, context, output.get(sample.id))
            ]
            for sample in samples
        }
        copied = {"copy": copy_curve(samples, output)} if self.kind in WRITTEN else {}
        row = Row(id=self.id, label=self.id, metrics={**mean_metrics(scores)})
        return Measurement(row, {"scores": scores, **copied})

    def _extracts(self, sample: Sample, context: RunContext, output: Any) -> Iterator[list[str]]:
        """The sentences of an extract, for each budget."""
        if self.kind == "fragments" or self.kind in WRITTEN:
            texts = longest_runs(sample) if self.kind == "fragments" else re.split(r"(?<=[.!?]) ", output)
            yield from (texts for _ in LEADS)
            return
        if self.kind != "oracle" and output is None:
            output = [ranked.index for ranked in self._selector(sample, context).rank(sample.document)]
        for words in word_budgets(sample):
            chosen = output or best_sentences(sample, words)
            ranks = FixedSelector(chosen)
            ours = self.kind in LEARNED and self.kind != "unfiltered"
            budget, rules = Budget(amount=max(words, 1), unit="words"), dict[str, Any](SELECTION if ours else {})
            extract = select(sample.document, ranks, budget, **rules)
            yield [sentence.text for sentence in extract.sentences]

    def _selector(self, sample: Sample, context: RunContext) -> Selector:
        if self.kind in LEARNED:
            (folder,) = context.dependencies.values()
            name = {"transfer": sample.corpus, "unfiltered": "default"}.get(self.kind, self.kind)
            text = (folder / f"{name}_s{self.seed}.json").read_text(encoding="utf-8")
            return DefaultSelector(RankingModel.model_validate_json(text))
        if self.kind == "centroid":
            return DefaultSelector(RankingModel(features=("centrality",), linear=(1.0,)))
        rivals: Mapping[str, Selector] = {
            "random": RandomSelector(self.seed),
            "lead": LeadSelector(),
            "lexrank": SumySelector("lexrank"),
            "lsa": SumySelector("lsa"),
            "sumbasic": SumySelector("sumbasic"),
            "textrank": TextRankSelector(),
        }
        return rivals[self.kind]


def best_sentences(sample: Sample, words: int) -> list[int]:
    """The oracle: while one fits and helps, the sentence that adds most to the sum of ROUGE-1 and 2 (F1)."""
    reference = _counts(sample.abstract)
    left = {
        index: (_counts([text]), len(split_words(text)))
        for index in sample.document.selectable
        for text in [sample.document.sentences[index].text]
    }
    chosen, own, best = list[int](), (Counter[Any](), Counter[Any]()), 0.0
    while left := {index: (counts, length) for index, (counts, length) in left.items() if length <= words}:
        scores = {index: _f1_sum(own, counts, reference) for index, (counts, _) in left.items()}
        index = max(scores, key=scores.__getitem__)
        if scores[index] <= best:
            break
        counts, length = left.pop(index)
        best, words = scores[index], words - length
        chosen.append(index)
        for total, added in zip(own, counts, strict=True):
            total.update(added)
    return chosen or sample.document.selectable[:1]


def _f1_sum(own: Sequence[Counter[Any]], added: Sequence[Counter[Any]], reference: Sequence[Counter[Any]]) -> float:
    total = 0.0
    for first, second, wanted in zip(own, added, reference, strict=True):
        common = sum(min(first[item] + second[item], count) for item, count in wanted.items())
        total += 2 * common / max(first.total() + second.total() + wanted.total(), 1)
    return total


def longest_runs(sample: Sample) -> list[str]:
    """The extractive fragments of an abstract: from its first word on, the longest runs of words of the document."""
    words, source = split_words(sample.summary), split_words(sample.document.text)
    starts: dict[str, list[int]] = {}
    for position, word in enumerate(source):
        starts.setdefault(word, []).append(position)
    fragments, first = list[str](), 0
    while first < len(words):
        length = 0
        for start in starts.get(words[first], ()):
            size = next(
                (
                    size
                    for size in range(len(words) - first)
                    if source[start + size : start + size + 1] != [words[first + size]]
                ),
                len(words) - first,
            )
            length = max(length, size)
        if length:
            fragments.append(" ".join(words[first : first + length]))
        first += max(length, 1)
    return fragments

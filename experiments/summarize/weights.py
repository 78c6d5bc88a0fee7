"""The weights of the default selector are learned, and its settings are searched for on the validation documents.

Shape suffixes: N sentences of all documents, F features.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from experiments.summarize.oracles import GramCounts, gram_counts
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.pipelines.summarize.default_selector import WORDING, RankingModel, diverse_order, sentence_features
from graftlm.pipelines.summarize.text import split_words
from graftlm.runs.run import RunContext

COMMAND = "python -m experiments summarize"
MEMBERS = 2  # networks of a model
EPOCHS = 12
LEADS = (3, 10)  # an extract has as many words as this number of first sentences
_MIN_LENGTH = 8  # words of a sentence in the target; shorter ones count as this long
Floats = NDArray[np.float64]


def word_budgets(sample: Sample) -> list[int]:
    """Return the number of words of the first 3 and of the first 10 sentences."""
    lengths = [len(split_words(text)) for text in sample.sentence_texts()]
    return [sum(lengths[:count]) for count in LEADS]


class LearningRow(NamedTuple):
    """A document to learn from.

    Attributes:
        sample: document and abstract.
        features: features of the sentences by name.
        vectors: TF-IDF vectors of the sentences.
        counts: counts of words and pairs of words of each sentence.
        reference: counts of the abstract.
    """

    sample: Sample
    features: dict[str, Floats]
    vectors: Any
    counts: list[GramCounts]
    reference: GramCounts


def _learning_rows(samples: Iterable[Sample]) -> list[LearningRow]:
    rows = []
    for sample in samples:
        features, vectors = sentence_features(sample.document)
        row = LearningRow(
            sample=sample,
            features=features,
            vectors=vectors,
            counts=[gram_counts([text]) for text in sample.sentence_texts()],
            reference=gram_counts(sample.abstract),
        )
        rows.append(row)
    return rows


class LearningSetting(NamedTuple):
    """The choices of the search.

    Attributes:
        model: `linear` is a ridge regression, `network` the mean of two networks with one hidden layer.
        exponent: the target is the share of the abstract that a sentence has, divided by its length to this power.
        has_wording: whether the model has the features of wording.
        redundancy: redundancy of the selector.
    """

    model: Literal["linear", "network"]
    exponent: float
    has_wording: bool
    redundancy: float


SETTINGS = [
    LearningSetting(*values)
    for values in product(
        ("linear", "network"),
        (0.5, 0.7, 1.0),
        (True, False),
        (0.0, 1.0, 2.0, 3.0),
    )
]


def target(row: LearningRow, exponent: float) -> list[float]:
    """Return the target of each sentence: its common words, plus twice its common pairs of words, per length."""
    total = max(row.reference.words.total(), 1)
    targets = []
    for counts in row.counts:
        words = (counts.words & row.reference.words).total()
        pairs = (counts.pairs & row.reference.pairs).total()
        length = max(counts.words.total(), _MIN_LENGTH)
        targets.append((words + 2 * pairs) / total / length**exponent)
    return targets


class _TrainingSet(NamedTuple):
    """Standardized inputs and targets of drawn sentences, and means and deviations of the features, (F,)."""

    inputs: Floats
    targets: Floats
    mean: Floats
    scale: Floats


def learn(rows: Sequence[LearningRow], setting: LearningSetting, seed: int, draws: int) -> RankingModel:
    """Learn the weights of the default selector.

    Args:
        rows: documents to learn from.
        setting: choices of the search.
        seed: seed of the sampling and of the networks.
        draws: number of sentences, which are sampled so that all documents have the same weight.
    """
    names = tuple(name for name in rows[0].features if setting.has_wording or name not in WORDING)
    drawn = _draw(rows, names, setting.exponent, seed, draws)
    linear: tuple[float, ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    output: tuple[float, ...] = ()
    if setting.model == "linear":
        linear = _fit_linear(drawn)
    else:
        hidden, output = _fit_networks(drawn, seed)
    return RankingModel(
        features=names,
        linear=linear,
        hidden=hidden,
        output=output,
        redundancy=setting.redundancy,
        source=COMMAND,
    )


def _draw(rows: Sequence[LearningRow], names: Sequence[str], exponent: float, seed: int, draws: int) -> _TrainingSet:
    """Sample sentences with replacement."""
    features = []
    shares = []
    targets_of_rows = []
    for row in rows:
        columns = [row.features[name] for name in names]
        features.append(np.stack(columns, axis=1))
        sentences = len(row.counts)
        shares.append(np.full(sentences, 1 / sentences))
        targets_of_rows.append(target(row, exponent))
    features_NF = np.concatenate(features)
    share_N = np.concatenate(shares)
    targets_N = np.concatenate(targets_of_rows)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(len(share_N), draws, p=share_N / share_N.sum())
    scaler = StandardScaler().fit(features_NF)
    targets = targets_N[drawn]
    return _TrainingSet(
        inputs=np.asarray(scaler.transform(features_NF[drawn])),
        targets=(targets - targets.mean()) / targets.std(),
        mean=np.asarray(scaler.mean_),
        scale=np.asarray(scaler.scale_),
    )


def _fit_linear(drawn: _TrainingSet) -> tuple[float, ...]:
    """Return the weights of a ridge regression of the features that are not standardized."""
    regression = Ridge(1.0).fit(drawn.inputs, drawn.targets)
    return _rounded(np.asarray(regression.coef_) / drawn.scale)


def _fit_networks(drawn: _TrainingSet, seed: int) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Return hidden and output weights of the mean of networks, for features that are not standardized."""
    hidden: list[tuple[float, ...]] = []
    output: list[float] = []
    for member in range(MEMBERS):
        network = _fit_network(drawn, MEMBERS * seed + member)
        weights = network.coefs_[0].T / drawn.scale
        for row, bias in zip(weights, network.intercepts_[0], strict=True):
            hidden.append(_rounded([*row, bias - row @ drawn.mean]))
        output.extend(_rounded(network.coefs_[1][:, 0] / MEMBERS))
    return tuple(hidden), tuple(output)


def _fit_network(drawn: _TrainingSet, seed: int) -> Any:
    # The annotation of the regressor does not allow a number as batch size.
    new_network: Any = MLPRegressor
    network = new_network(
        hidden_layer_sizes=(24,),
        alpha=1e-3,
        batch_size=256,
        learning_rate_init=2e-3,
        max_iter=EPOCHS,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed
        network.fit(drawn.inputs, drawn.targets)
    return network


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def quick_rouge(row: LearningRow, scores: Floats, redundancy: float) -> float:
    """Return the mean over both budgets of ROUGE-1 and 2, in percent, without pairs of words across sentences.

    Args:
        row: the document.
        scores: scores of the sentences.
        redundancy: redundancy of the selector.
    """
    order = diverse_order(scores, row.vectors, redundancy)
    lengths = [len(split_words(text)) for text in row.sample.sentence_texts()]
    total = 0.0
    for budget in word_budgets(row.sample):
        extract = _extract_counts(row, order, lengths, budget)
        for counts, reference in zip(extract, row.reference, strict=True):
            common = (counts & reference).total()
            items = counts.total() + reference.total()
            total += 200 * common / max(items, 1)
    return total / (2 * len(LEADS))


def _extract_counts(row: LearningRow, order: Sequence[int], lengths: Sequence[int], budget: int) -> GramCounts:
    """Return the counts of the sentences that fit into a budget of words, in ranked order."""
    extract = GramCounts(Counter(), Counter())
    used = 0
    for position in order:
        if used + lengths[position] <= budget:
            used += lengths[position]
            extract.words.update(row.counts[position].words)
            extract.pairs.update(row.counts[position].pairs)
    return extract


class WeightsRun(DocumentRun):
    """Learns with each setting, and keeps the best on the validation documents. The search uses the first seed.

    Args:
        seeds: seeds of the kept models.
        draws: number of sentences from which a model learns.
    """

    seeds: tuple[int, ...]
    draws: int = Field(100_000, ge=1)

    def artefacts(self) -> tuple[str, ...]:
        models = ("default", "plain", "single", "linear", *CORPORA)
        return tuple(f"{name}_s{seed}.json" for name in models for seed in self.seeds)

    def measure(self, context: RunContext) -> Measurement:
        train = _learning_rows(self.parts["train"])
        validation = _learning_rows(self.parts["validation"])
        scores = self._search(train, validation)
        kept = _kept_settings(scores)
        for seed in self.seeds:
            for name, model in self._models(train, kept, seed).items():
                path = context.folder / f"{name}_s{seed}.json"
                write_atomically(path, (model.model_dump_json() + "\n").encode())
        row = Row(
            id=self.id,
            label=self.id,
            metrics={"settings": len(scores), "validation": scores[kept["default"]]},
        )
        details = {
            "search": [{**setting._asdict(), "validation": round(score, 3)} for setting, score in scores.items()],
            "kept": {name: setting._asdict() for name, setting in kept.items()},
        }
        return Measurement(row, details)

    def _search(
        self,
        train: Sequence[LearningRow],
        validation: Sequence[LearningRow],
    ) -> dict[LearningSetting, float]:
        """Return the mean score of each setting on the validation documents."""
        scores: dict[LearningSetting, float] = {}
        predicted: list[Floats] = []
        for setting in SETTINGS:
            # Settings that differ only in their redundancy follow each other, and share a model.
            if setting.redundancy == 0:
                model = learn(train, setting, self.seeds[0], self.draws)
                predicted = [model.score(row.features) for row in validation]
            values = []
            for row, row_scores in zip(validation, predicted, strict=True):
                values.append(quick_rouge(row, row_scores, setting.redundancy))
            scores[setting] = float(np.mean(values))
        return scores

    def _models(
        self,
        train: Sequence[LearningRow],
        kept: Mapping[str, LearningSetting],
        seed: int,
    ) -> dict[str, RankingModel]:
        """Return a model for each kept setting, and a model for each collection that learned from the others."""
        models = {name: learn(train, setting, seed, self.draws) for name, setting in kept.items()}
        for corpus in CORPORA:
            others = [row for row in train if row.sample.corpus != corpus]
            models[corpus] = learn(others, kept["default"], seed, self.draws)
        return models


def _kept_settings(scores: Mapping[LearningSetting, float]) -> dict[str, LearningSetting]:
    """Return the best setting, and the best without wording, without redundancy and without a hidden layer."""
    best = max(scores, key=scores.__getitem__)
    without_wording = (setting for setting in scores if not setting.has_wording)
    linear = (setting for setting in scores if setting.model == "linear")
    return {
        "default": best,
        "plain": max(without_wording, key=scores.__getitem__),
        "single": best._replace(redundancy=0.0),
        "linear": max(linear, key=scores.__getitem__),
    }

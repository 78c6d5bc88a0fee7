"""Runs that select sentences of the test documents and compare them with the abstracts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments.summarize.corpora import DocumentRun, Sample
from experiments.summarize.learned import OUTPUT, copy_curve
from experiments.summarize.oracles import best_sentences, longest_runs
from experiments.summarize.rivals import RandomSelector, SumySelector, TextRankSelector
from experiments.summarize.weights import LEADS, word_budgets
from graftlm.evaluation import Interval, Row, bootstrap
from graftlm.evaluation.measurement import Measurement
from graftlm.pipelines.summarize import Budget, DefaultSelector, LeadSelector, Selector, select
from graftlm.pipelines.summarize.default_selector import RankingModel
from graftlm.pipelines.summarize.metrics import rouge
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.summary import SELECTION
from graftlm.pipelines.summarize.text import split_words
from graftlm.runs.run import RunContext

METRICS = ("rouge1", "rouge2", "rougeL")
Kind = Literal[
    "random",
    "lead",
    "centroid",
    "lexrank",
    "textrank",
    "lsa",
    "sumbasic",
    "default",
    "plain",
    "single",
    "linear",
    "unfiltered",
    "transfer",
    "classifier",
    "pointer",
    "modern",
    "seq2seq",
    "pointer_generator",
    "oracle",
    "fragments",
]
TRAINED: tuple[Kind, ...] = ("classifier", "pointer", "modern")
WRITTEN: tuple[Kind, ...] = ("seq2seq", "pointer_generator")
LEARNED: tuple[Kind, ...] = ("default", "plain", "single", "linear", "transfer", "unfiltered")
_SENTENCE_GAP = re.compile(r"(?<=[.!?]) ")

DocumentScores = list[dict[str, float]]  # metrics at each budget


def mean_metrics(scores: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Interval]:
    """Return means over documents of each metric and budget, with bootstrap intervals."""
    metrics = {}
    for position, count in enumerate(LEADS):
        for name in (*METRICS, "words"):
            values = [rows[position][name] for rows in scores.values()]
            metrics[f"{name}_lead{count}"] = bootstrap(values)
    return metrics


class ExtractRun(DocumentRun):
    """Selects sentences of the test documents at both budgets, and compares them with the abstracts.

    Written texts and fragments have the same length at both budgets.

    Args:
        kind: the selector. `plain` has no features of wording, `single` no redundancy, `linear` no hidden layer,
            `unfiltered` none of the rules of `summarize` for short sentences and sections, and `transfer` did not learn
            from the collection on which it is measured. `oracle` adds the sentence that improves ROUGE-1 and 2 most;
            `fragments` joins the longest runs of words that abstract and document have in common.
        seed: seed of `random`, and of the learned selectors and writers.
    """

    kind: Kind
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        samples = self.parts["test"]
        output = self._learned_output(context)
        scores: dict[str, DocumentScores] = {}
        for sample in samples:
            extracts = self._extracts(sample, context, output.get(sample.id))
            scores[sample.id] = [_text_scores(texts, sample) for texts in extracts]
        details: dict[str, Any] = {"scores": scores}
        if self.kind in WRITTEN:
            details["copy"] = copy_curve(samples, output)
        row = Row(id=self.id, label=self.id, metrics={**mean_metrics(scores)})
        return Measurement(row, details)

    def _learned_output(self, context: RunContext) -> dict[str, Any]:
        """Return the ranking of a trained selector, or the text of a writer, by document; empty for other kinds."""
        if self.kind not in (*TRAINED, *WRITTEN):
            return {}
        (folder,) = context.dependencies.values()
        return json.loads((folder / OUTPUT).read_text(encoding="utf-8"))

    def _extracts(self, sample: Sample, context: RunContext, output: Any) -> Iterator[list[str]]:
        """Yield the sentences of an extract, for each budget."""
        if self.kind == "fragments":
            yield from [longest_runs(sample)] * len(LEADS)
        elif self.kind in WRITTEN:
            yield from [_SENTENCE_GAP.split(output)] * len(LEADS)
        elif self.kind == "oracle":
            for words in word_budgets(sample):
                yield self._selected(sample, best_sentences(sample, words), words)
        else:
            ranking = self._ranking(sample, context) if output is None else output
            for words in word_budgets(sample):
                yield self._selected(sample, ranking, words)

    def _ranking(self, sample: Sample, context: RunContext) -> list[int]:
        selector = self._selector(sample, context)
        return [ranked.index for ranked in selector.rank(sample.document)]

    def _selected(self, sample: Sample, ranking: Sequence[int], words: int) -> list[str]:
        """Return the sentences of a ranking that fit into a number of words."""
        rules: dict[str, Any] = {}
        if self.kind in LEARNED and self.kind != "unfiltered":
            rules = SELECTION
        budget = Budget(amount=max(words, 1), unit="words")
        extract = select(sample.document, FixedSelector(ranking), budget, **rules)
        return [sentence.text for sentence in extract.sentences]

    def _selector(self, sample: Sample, context: RunContext) -> Selector:
        if self.kind in LEARNED:
            return DefaultSelector(self._learned_model(sample, context))
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

    def _learned_model(self, sample: Sample, context: RunContext) -> RankingModel:
        """Return the weights that the run of the weights learned for a document."""
        names = {"transfer": sample.corpus, "unfiltered": "default"}
        name = names.get(self.kind, self.kind)
        (folder,) = context.dependencies.values()
        text = (folder / f"{name}_s{self.seed}.json").read_text(encoding="utf-8")
        return RankingModel.model_validate_json(text)


def _text_scores(texts: Sequence[str], sample: Sample) -> dict[str, float]:
    """Return ROUGE against the abstract, and the number of words."""
    words = sum(len(split_words(text)) for text in texts)
    return {**rouge(texts, sample.abstract), "words": float(words)}

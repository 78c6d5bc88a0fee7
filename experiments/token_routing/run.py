"""Four LoRA experts on a small backbone that is pretrained here, mixed in every way of the table, for every seed.

The settings of every row are chosen on validation questions with the first seed, by the search of `routing_smollm2`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import Options
from experiments.corpus import train_corpus_tokenizer
from experiments.parents import PretrainRun, read_texts
from experiments.routing_smollm2.run import MORE, ROWS, SkillStudy, answered
from experiments.routing_smollm2.runs import AnswerRun
from experiments.routing_smollm2.texts import FILES as QUESTION_FILES
from experiments.routing_smollm2.texts import read_skills, write_skills
from experiments.study import aim, bars, check_files, combined_row, numbers_of, published
from experiments.token_routing import runs
from experiments.token_routing.documents import SECOND, Documents, SwitchRun, half_nats
from experiments.token_routing.texts import DOMAINS, FILES, RoutingTextSizes, shingles, write_changing, write_corpus
from graftlm.data import SourceConfig
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.evaluation.plots import PALETTE
from graftlm.files.writing import fill_once
from graftlm.runs.run import Run

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
INTERVALS = (1, 2, 3, 4)  # k: routes are renewed every k tokens
FIRST = "code"  # the domain of a changing document's first half
WINDOW = 16
SHOWN_TOKENS = 48
BOOSTS = (1, 2, 8)  # in addition to the published 4
SKILL_ROWS = ROWS | MORE
QUESTIONS = {
    "base": "backbone",
    **{f"expert_{domain}": f"{domain} expert everywhere" for domain in DOMAINS},
    **{row: label for row, label in SKILL_ROWS.items() if row not in ("backbone", "published")},
    **{f"paper_k{k}": f"the paper's weighting, k = {k}" for k in INTERVALS},
    "linear_k2": "routed, k = 2, factors summed as published",
    "published": "as published: MiniLM, factor 4, factors summed",
    **{f"published_boost{boost}": f"as published, with factor {boost}" for boost in BOOSTS},
}
DOCUMENTS = {
    "switch_routed": "documents: routed by the last tokens",
    "switch_routed_all": "documents: routed by all text so far",
    "switch_by_hand": "documents: the right expert for each half",
    "switch_base": "documents: backbone",
    **{f"switch_expert_{domain}": f"documents: {domain} expert" for domain in DOMAINS},
}
CACHES = {f"cache_k{k}": f"keys and values kept or made again, k = {k}" for k in INTERVALS}
LABELS = QUESTIONS | DOCUMENTS | CACHES
# The paper's weighting, without centring, by the backbone's token embeddings, with the exact sum.
PAPERS: dict[str, Any] = {"policy": "nearest", "embedder": {"centre": False, "whiten": False}}
LIMITS = {  # upper bound of the ratio of log-perplexities to this row
    "oracle": 1.02,
    "lora_all": 1.02,
    "uniform": 1,
    "base": 1,
    "paper_k2": 1,
    "arrow": 1,
    "xlora": 1,
    "ties": 1,
}


class TokenRoutingStudy(SkillStudy):
    """The small backbone, its texts, and the runs on them."""

    expert_rates = (3e-3, 1e-2, 3e-2)
    router_rates = (1e-2, 3e-2, 1e-1)
    routings: Mapping[str, dict[str, Any]] = {
        "states": {"embedder": {"layers": 2}},
        "discriminant": {"policy": "discriminant", "embedder": {"layers": 2}},
        "tokens": {},
    }
    targets = runs.TARGETS
    examples = "both"
    answers_only = False
    generated = 0

    def set_up(self, quick: bool) -> None:
        """Pretrain the backbone, and write the texts."""
        self.dtype = "auto"
        if quick:
            self.sizes = runs.QUICK_SIZES
            longest = {"prompt": 100, "answer": 48, "program": 90}
        else:
            self.sizes = runs.RoutingSizes(
                steps=40,
                batch_size=4,
                centroids=100,
                amounts=RoutingTextSizes(trained=700, tested=84, chosen=12),
            )
            longest = {"prompt": 200, "answer": 24, "program": 110}
        amounts = self.sizes.amounts
        self.counts = {"train": amounts.trained, "validation": amounts.validated, "test": amounts.tested}
        corpus = self.options.out / "backbone" / "corpus.jsonl"
        known: set[int] = set()
        if self.options.backbone:
            self.backbone = self.options.backbone
        else:
            self.backbone = self._pretrain(corpus, amounts)
            known = shingles(read_texts(corpus))
        tokenizer = runs.load_once(self.backbone, self.options.device, self.dtype).need_tokenizer()
        write_skills(
            read_skills(self.options.data),
            self.texts,
            tokenizer,
            counts=self.counts,
            seeds=self.seeds,
            longest=longest,
            known=known,
        )
        write_changing(self.texts, f"test{self.seeds[0]}", tokenizer, amounts)

    def _pretrain(self, corpus: Path, amounts: RoutingTextSizes) -> str:
        """Pretrain the backbone on English novels, Wikipedia and Python, and return its folder."""
        tokenizer = corpus.parent / "tokenizer"

        def fill(_: Path) -> None:
            write_corpus(self.options.data, corpus, amounts)
            train_corpus_tokenizer([corpus], self.sizes.vocabulary).save_pretrained(tokenizer)

        settings = self.sizes.model_dump(mode="json", include={"amounts", "vocabulary"})
        settings["sources"] = [str(self.options.data / name) for name in FILES]
        fill_once(corpus.parent, settings, fill)
        run = PretrainRun(
            id="pretraining",
            tokenizer=str(tokenizer),
            sources=[SourceConfig(path=str(corpus))],
            batch_size=self.sizes.backbone_batch,
            width=self.sizes.width,
            layers=self.sizes.layers,
            heads=self.sizes.heads,
            length=self.sizes.length,
        )
        self.execute([run], "backbone")
        return str(self.runs / run.id)

    def routed(self, row: str) -> dict[str, Any]:
        kind, _, last = row.rpartition("_k")
        if row.startswith("expert_"):
            return {"routing": {"fixed": {row.removeprefix("expert_"): 1.0}}}
        if kind == "paper":
            return {"routing": {**PAPERS, "every": int(last)}, "examples": "whole"}
        fields = super().routed(row)
        if kind == "linear":
            fields["routing"] = {**fields["routing"], "combination": "linear"}
        if row.startswith("published"):
            fields["questions"] = self.sizes.amounts.chosen
        return fields

    def few(self, row: str, seed: int, cache: str) -> AnswerRun:
        """Return the run of a routed row on few questions, with a setting of `cache`."""
        run = self.row_run(row, seed)
        changes = {
            "id": f"few-{row}-{cache}_s{seed}",
            "questions": self.sizes.amounts.chosen,
            "routing": run.routing | {"cache": cache},
        }
        return run.model_copy(update=changes)

    def documents(self, row: str, seed: int) -> SwitchRun:
        """Return the run of a row on the documents that change domain."""
        needs: tuple[str, ...] = self.trained(seed)
        domains: tuple[str, ...] = DOMAINS
        fields: dict[str, Any] = {"part": f"test{self.seeds[0]}", "examples": self.examples}
        if row == "switch_base":
            needs = ()
            domains = ()
            fields["mixture_kind"] = "none"
        elif row.startswith("switch_expert_"):
            domain = row.removeprefix("switch_expert_")
            fields["routing"] = {"fixed": {domain: 1.0}}
        else:
            window = WINDOW if row == "switch_routed" else None
            fields["routing"] = self.routing | {"every": 2, "prompt": "causal", "window": window}
        return SwitchRun(
            id=f"{row}_s{seed}",
            depends_on=needs,
            **self.shared(seed, domains),
            **fields,
        )


def run(options: Options) -> Results:
    """Choose settings, then run the chosen tables."""
    tables = options.chosen(TABLES)
    check_files(options, (*FILES, *QUESTION_FILES))
    study = TokenRoutingStudy(options)
    rows, details = study.table(QUESTIONS)
    columns = {f"nll_{domain}": domain for domain in DOMAINS}
    plots = {"log-perplexity": bars(rows, columns, "nats per answer token")}
    if "switch" in tables:
        document_rows, plots["switch"] = table_switch(study, study.seeds)
        rows += document_rows
    if "cache" in tables:
        rows += table_cache(study, study.seeds[0])
    return study.write(
        NAME,
        rows,
        details=details,
        plots=plots,
        paper=published(__file__, {row.id for row in rows}),
        aims=aims(rows, details),
    )


def table_switch(study: TokenRoutingStudy, seeds: Sequence[int]) -> tuple[list[Row], Figure]:
    """Measure documents of code and then prose, with every single expert and with routes."""
    runs_by_row: dict[str, list[SwitchRun]] = {}
    for row in DOCUMENTS:
        if row != "switch_by_hand":
            runs_by_row[row] = [study.documents(row, seed) for seed in seeds]
    needed: list[Run] = [study.expert(domain, seed) for seed in seeds for domain in DOMAINS]
    for row_runs in runs_by_row.values():
        needed += row_runs
    study.execute(needed, "documents")
    metrics: dict[str, list[Any]] = {}
    details: dict[str, list[dict[str, Any]]] = {}
    for row, row_runs in runs_by_row.items():
        measured = [study.measured[run.id] for run in row_runs]
        metrics[row] = [measurement.row.metrics for measurement in measured]
        details[row] = [measurement.details for measurement in measured]
    first_halves = details[f"switch_expert_{FIRST}"]
    second_halves = details[f"switch_expert_{SECOND}"]
    metrics["switch_by_hand"] = [
        half_nats(first["documents"], second["documents"])
        for first, second in zip(first_halves, second_halves, strict=True)
    ]
    figure = switch_plot({LABELS[row]: details[row][0] for row in ("switch_routed", "switch_routed_all")})
    return [combined_row(row, label, metrics[row]) for row, label in DOCUMENTS.items()], figure


def table_cache(study: TokenRoutingStudy, seed: int) -> list[Row]:
    """Measure the nats of right answers under `cache: keep` and `recompute`, on the same questions."""
    pairs: dict[int, tuple[AnswerRun, AnswerRun]] = {}
    needed: list[Run] = [study.expert(domain, seed) for domain in DOMAINS]
    for k in INTERVALS:
        pairs[k] = (study.few(f"routed_k{k}", seed, "keep"), study.few(f"routed_k{k}", seed, "recompute"))
        needed += pairs[k]
    study.execute(needed, "keys and values")
    rows = []
    for k, (keep_run, recompute_run) in pairs.items():
        keep = _answer_nats(study, keep_run)
        recompute = _answer_nats(study, recompute_run)
        row = Row(
            id=f"cache_k{k}",
            label=LABELS[f"cache_k{k}"],
            metrics={
                "nats_keep": float(keep.mean()),
                "nats_recompute": float(recompute.mean()),
                "nats_apart": float(np.abs(keep - recompute).mean()),
            },
        )
        rows.append(row)
    return rows


def _answer_nats(study: TokenRoutingStudy, run: AnswerRun) -> np.ndarray:
    """Return the nats per token of the right answers to all questions of a run."""
    return np.concatenate([values["nll"] for values in answered(study, run).values()])


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """Return the aims of the measured tables."""
    metrics = numbers_of(rows)
    measured: list[Aim] = []
    for row, limit in LIMITS.items():
        text = f"log-perplexity at k = 2 over that of: {LABELS[row]}"
        ratio = metrics["routed_k2"]["nll_average"] / metrics[row]["nll_average"]
        relation = operator.lt if limit == 1 else operator.le
        measured.append(aim(text, "nll_average", limit, ratio, relation))
    text = "log-perplexity at k = 2 minus the published system's, high end of the paired interval"
    high = details["routed_k2_minus"]["published"]["nll_average"]["questions"]["high"]
    measured.append(aim(text, "nll_average", 0.0, high))
    led = next(row for row in rows if row.id == "routed_k2").metrics["routing_accuracy"]
    assert isinstance(led, Interval)
    measured.append(aim("prompts with the right expert, percent", "routing_accuracy", 95.0, led.mean, operator.ge))
    if "switch_routed" in metrics:
        measured += _document_aims(metrics)
    return measured


def _document_aims(metrics: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    """Return the aims of the documents that change domain."""
    routed = metrics["switch_routed"]
    best_expert = min(metrics[f"switch_expert_{domain}"]["nll_document"] for domain in DOMAINS)
    ratio = routed["nll_document"] / best_expert
    switch_tokens = routed["switch_tokens"]
    perplexity_text = "changing documents: log-perplexity over the best single expert's"
    tokens_text = "changing documents: tokens until the route has switched, median"
    return [
        aim(perplexity_text, "nll_document", 1.0, ratio),
        aim(tokens_text, "switch_tokens", 32, switch_tokens, operator.le),
    ]


def switch_plot(details: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the mean weight of every expert around the boundary, with a panel for each row.

    Args:
        details: `documents` and `names` of each row, by label.
    """
    figure = Figure(figsize=(9.2, 1.2 + 2.4 * len(details)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(details), 1, sharex=True, sharey=True))
    for axes, (label, row_details) in zip(panels, details.items(), strict=True):
        means = _weights_around_boundary(row_details["documents"])
        positions = np.arange(len(means)) - len(means) // 2
        for index, name in enumerate(row_details["names"]):
            axes.plot(positions, means[:, index], color=PALETTE[index], linewidth=1.8, label=f"{name} expert")
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_ylabel("weight")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens from the boundary: code before it, prose after it")
    panels[0].legend(loc="center left", frameon=False, fontsize=9)
    return figure


def _weights_around_boundary(documents: Documents) -> np.ndarray:
    """Return the mean weights at as many tokens before the boundary as after it, which every document has."""
    cut = SHOWN_TOKENS
    for document in documents:
        before = document["first"]
        after = len(document["weights"]) - before
        cut = min(cut, before, after)
    around = []
    for document in documents:
        weights = np.array(document["weights"])
        around.append(weights[document["first"] - cut : document["first"] + cut])
    return np.mean(around, axis=0)

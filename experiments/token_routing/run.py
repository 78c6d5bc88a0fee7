"""Four LoRA experts on one small backbone that is pretrained here, mixed in every way of the table, for every seed.

Every row's settings are chosen on validation questions with the first seed, by the search of `routing_smollm2`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import Options
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
from graftlm.demo.run import train_corpus_tokenizer
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.evaluation.plots import PALETTE
from graftlm.files.writing import fill_once

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
INTERVALS = (1, 2, 3, 4)  # k: routes are renewed every k tokens
FIRST = "code"  # the domain of a changing document's first half
WINDOW, SHOWN_TOKENS = 16, 48
BOOSTS = (1, 2, 8)  # beside the published 4
QUESTIONS = {
    "base": "backbone",
    **{f"expert_{domain}": f"{domain} expert everywhere" for domain in DOMAINS},
    **{row: label for row, label in (ROWS | MORE).items() if row not in ("backbone", "published")},
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
LIMITS = {"oracle": 1.02, "lora_all": 1.02, "uniform": 1, "base": 1, "paper_k2": 1, "arrow": 1, "xlora": 1, "ties": 1}


class TokenRoutingStudy(SkillStudy):
    """The small backbone, its texts, and the runs on them."""

    expert_rates, router_rates = (3e-3, 1e-2, 3e-2), (1e-2, 3e-2, 1e-1)
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
        self.sizes = runs.QUICK_SIZES if quick else runs.RoutingSizes(steps=40, batch_size=4, centroids=100)
        amounts = self.sizes.amounts if quick else RoutingTextSizes(trained=700, tested=84, chosen=12)
        self.sizes = self.sizes.model_copy(update={"amounts": amounts})
        self.counts = {"train": amounts.trained, "validation": amounts.validated, "test": amounts.tested}
        corpus = self.options.out / "backbone" / "corpus.jsonl"
        self.backbone = self.options.backbone or self._pretrain(corpus, amounts)
        tokenizer = runs.load_once(self.backbone, self.options.device, self.dtype).need_tokenizer()
        longest = {"prompt": 100 if quick else 200, "answer": 48 if quick else 24, "program": 90 if quick else 110}
        known = set() if self.options.backbone else shingles(read_texts(corpus))
        write_skills(read_skills(self.options.data), self.texts, tokenizer, self.counts, self.seeds, longest, known)
        write_changing(self.texts, f"test{self.seeds[0]}", tokenizer, amounts)

    def _pretrain(self, corpus: Path, amounts: RoutingTextSizes) -> str:
        """Pretrain the backbone on English novels, Wikipedia and Python; gives its folder."""
        tokenizer = corpus.parent / "tokenizer"

        def fill(_: Path) -> None:
            write_corpus(self.options.data, corpus, amounts)
            train_corpus_tokenizer([corpus], self.sizes.vocabulary).save_pretrained(tokenizer)

        settings = self.sizes.model_dump(mode="json", include={"amounts", "vocabulary"})
        fill_once(corpus.parent, settings | {"sources": [str(self.options.data / name) for name in FILES]}, fill)
        run = PretrainRun(
            id="pretraining",
            tokenizer=str(tokenizer),
            sources=[SourceConfig(path=str(corpus))],
            batch_size=self.sizes.backbone_batch,
            **self.sizes.model_dump(include={"width", "layers", "heads", "length"}),
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
        return fields | ({"questions": self.sizes.amounts.chosen} if row.startswith("published") else {})

    def few(self, row: str, seed: int, cache: str) -> AnswerRun:
        """A routed row on few questions, with a treatment of keys and values."""
        run = self.row_run(row, seed)
        changes = {"id": f"few-{row}-{cache}_s{seed}", "questions": self.sizes.amounts.chosen}
        return run.model_copy(update={**changes, "routing": run.routing | {"cache": cache}})

    def documents(self, row: str, seed: int) -> SwitchRun:
        """One row on the documents that change domain."""
        needs: tuple[str, ...] = self.trained(seed)
        fields: dict[str, Any] = {"part": f"test{self.seeds[0]}", "examples": self.examples}
        if row == "switch_base":
            needs, fields["mixture_kind"] = (), "none"
        elif domain := row.partition("switch_expert_")[2]:
            fields["routing"] = {"fixed": {domain: 1.0}}
        else:
            window = WINDOW if row == "switch_routed" else None
            fields["routing"] = self.routing | {"every": 2, "prompt": "causal", "window": window}
        shared = self.shared(seed, DOMAINS if needs else ())
        return SwitchRun(id=f"{row}_s{seed}", depends_on=needs, **shared, **fields)


def run(options: Options) -> Results:
    """Choose settings, then run the chosen tables."""
    tables = options.chosen(TABLES)
    check_files(options, (*FILES, *QUESTION_FILES))
    study = TokenRoutingStudy(options)
    rows, details = study.table(QUESTIONS)
    plots = {"log-perplexity": bars(rows, {f"nll_{d}": d for d in DOMAINS}, "nats per answer token")}
    if "switch" in tables:
        of_documents, plots["switch"] = table_switch(study, study.seeds)
        rows += of_documents
    if "cache" in tables:
        rows += table_cache(study, study.seeds[0])
    more: dict[str, Any] = {"paper": published(__file__, {row.id for row in rows}), "aims": aims(rows, details)}
    return study.write(NAME, rows, details=details, plots=plots, **more)


def table_switch(study: TokenRoutingStudy, seeds: Sequence[int]) -> tuple[list[Row], Figure]:
    """Documents of code and then prose: every single expert, and routes by the last tokens and by all tokens."""
    of_row = {row: [study.documents(row, seed) for seed in seeds] for row in DOCUMENTS if row != "switch_by_hand"}
    experts = [study.expert(domain, seed) for seed in seeds for domain in DOMAINS]
    study.execute([*experts, *(run for of_seeds in of_row.values() for run in of_seeds)], "documents")
    metrics = {row: [study.measured[run.id].row.metrics for run in of_seeds] for row, of_seeds in of_row.items()}
    details = {row: [study.measured[run.id].details for run in of_seeds] for row, of_seeds in of_row.items()}
    halves = zip(*(details[f"switch_expert_{half}"] for half in (FIRST, SECOND)), strict=True)
    metrics["switch_by_hand"] = [{**half_nats(*(half["documents"] for half in pair))} for pair in halves]
    figure = switch_plot({LABELS[row]: details[row][0] for row in ("switch_routed", "switch_routed_all")})
    return [combined_row(row, label, metrics[row]) for row, label in DOCUMENTS.items()], figure


def table_cache(study: TokenRoutingStudy, seed: int) -> list[Row]:
    """Nats of right answers under `cache: keep` and `recompute`, on the same questions."""
    pairs = {k: [study.few(f"routed_k{k}", seed, cache) for cache in ("keep", "recompute")] for k in INTERVALS}
    experts = [study.expert(domain, seed) for domain in DOMAINS]
    study.execute([*experts, *(run for pair in pairs.values() for run in pair)], "keys and values")
    rows = []
    for k, pair in pairs.items():
        keep, again = (np.concatenate([of["nll"] for of in answered(study, run).values()]) for run in pair)
        nats = {"nats_keep": keep, "nats_recompute": again, "nats_apart": np.abs(keep - again)}
        metrics = {name: float(of_answers.mean()) for name, of_answers in nats.items()}
        rows.append(Row(id=f"cache_k{k}", label=LABELS[f"cache_k{k}"], metrics={**metrics}))
    return rows


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """The aims of the measured tables."""
    metrics = numbers_of(rows)
    measured: list[Aim] = []
    for row, limit in LIMITS.items():
        text = f"log-perplexity at k = 2 over that of: {LABELS[row]}"
        ratio = metrics["routed_k2"]["nll_average"] / metrics[row]["nll_average"]
        measured.append(aim(text, "nll_average", limit, ratio, operator.lt if limit == 1 else operator.le))
    text = "log-perplexity at k = 2 minus the published system's, high end of the paired interval"
    high = details["routed_k2_minus"]["published"]["nll_average"]["questions"]["high"]
    measured.append(aim(text, "nll_average", 0.0, high))
    led = next(row for row in rows if row.id == "routed_k2").metrics["routing_accuracy"]
    assert isinstance(led, Interval)
    measured.append(aim("prompts with the right expert, percent", "routing_accuracy", 95.0, led.mean, operator.ge))
    if routed := metrics.get("switch_routed"):
        ratio = routed["nll_document"] / min(metrics[f"switch_expert_{d}"]["nll_document"] for d in DOMAINS)
        text = "changing documents: log-perplexity over the best single expert's"
        measured.append(aim(text, "nll_document", 1.0, ratio))
        text = "changing documents: tokens until the route has switched, median"
        measured.append(aim(text, "switch_tokens", 32, routed["switch_tokens"], operator.le))
    return measured


def switch_plot(details: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The mean weight of every expert around the boundary: a panel for each row.

    Args:
        details: `documents` and `names` of each row, by label.
    """
    figure = Figure(figsize=(9.2, 1.2 + 2.4 * len(details)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(details), 1, sharex=True, sharey=True))
    for axes, (label, of_row) in zip(panels, details.items(), strict=True):
        means = _weights_around_boundary(of_row["documents"])
        positions = np.arange(len(means)) - len(means) // 2
        for index, name in enumerate(of_row["names"]):
            axes.plot(positions, means[:, index], color=PALETTE[index], linewidth=1.8, label=f"{name} expert")
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_ylabel("weight")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens from the boundary: code before it, prose behind it")
    panels[0].legend(loc="center left", frameon=False, fontsize=9)
    return figure


def _weights_around_boundary(documents: Documents) -> np.ndarray:
    """The mean weights at as many tokens before the boundary as after it; every document reaches so far."""
    reach = [min(document["first"], len(document["weights"]) - document["first"]) for document in documents]
    cut = min(SHOWN_TOKENS, *reach)
    return np.mean([np.array(d["weights"])[d["first"] - cut : d["first"] + cut] for d in documents], axis=0)

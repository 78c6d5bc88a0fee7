"""Four LoRA experts on one backbone, mixed in every way of the table, for every seed.

All choices are made on validation text with the first seed. Every run chooses the routing's policy and the window for
documents. `--table choices` compares targets and learning rates.
"""

from __future__ import annotations

import importlib.util
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from transformers import AutoTokenizer

from experiments import Options
from experiments.parents import PretrainRun
from experiments.study import Study, aim, bars, check_files, combined_row, mini_lm, numbers_of, published
from experiments.token_routing import runs
from experiments.token_routing.runs import FIRST, SECOND, CentroidRun, Documents, ExpertRun, MixtureRun, half_nats
from experiments.token_routing.texts import DOMAINS, FILES, write_corpus, write_texts
from graftlm.data import SourceConfig
from graftlm.demo.run import train_corpus_tokenizer
from graftlm.errors import MissingExtraError
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.plots import PALETTE
from graftlm.io import digest, fill_once
from graftlm.runs.run import Measurement

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
OPTIONAL_TABLES = ("minilm", "choices")
INTERVALS = (1, 2, 3, 4)  # k: routes are renewed every k tokens
LABELS = {
    "base": "backbone",
    **{f"expert_{domain}": f"{domain} expert everywhere" for domain in DOMAINS},
    "uniform": "uniform mixture",
    "oracle": "each domain's own expert",
    **{f"routed_k{k}": f"routed, k = {k}" for k in INTERVALS},
    **{f"paper_k{k}": f"the paper's weighting, k = {k}" for k in INTERVALS},
    "linear_k2": "routed, k = 2, factors summed as published",
    "prompt_only": "routed by the prompt alone",
    "xlora": "X-LoRA (PEFT)",
    "arrow": "Arrow (PEFT)",
    "switch_routed": "documents: routed by the last tokens",
    "switch_routed_all": "documents: routed by all text so far",
    "switch_by_hand": "documents: the right expert for each half",
    "switch_base": "documents: backbone",
    **{f"switch_expert_{domain}": f"documents: {domain} expert" for domain in DOMAINS},
    **{f"cache_k{k}": f"keys and values kept or made again, k = {k}" for k in INTERVALS},
    "cache_documents": "documents: keys and values kept or made again",
}
CACHE_WINDOW = 16
SHOWN_TOKENS = 48
UNIFORM = {"temperature": 1e6}
# The paper's weighting, without centring, by the backbone's token embeddings. `minilm_k2` has the paper's embedder.
PUBLISHED: dict[str, Any] = {
    "policy": "nearest",
    "boost": 4.0,
    "embedder": {"name": "backbone", "centre": False, "whiten": False},
}
EXPERT_RATE, XLORA_RATE = 1e-2, 3e-2  # chosen by `--table choices`
TRIED_TARGETS = {"all": ("attention", "ffn"), "qv": ("q_proj", "v_proj")}
TRIED_RATES = {"expert": (3e-3, 1e-2, 3e-2), "xlora": (1e-3, 1e-2, 3e-2, 1e-1)}
SHARPNESS: tuple[dict[str, Any], ...] = (
    {"top": 1},
    {"temperature": 0.03},
    {"temperature": 0.1},
    {"temperature": 0.3},
    {"temperature": 0.1, "top": 2},
)
EXAMPLES = ("whole", "prompt", "both")
WINDOWS = (8, 16, 32, 64)

Metrics = dict[str, float]
Policy = Mapping[str, Any]
Policies = list[dict[str, Any]]


class TokenRoutingStudy(Study):
    """The backbone, the texts, and the runs on them.

    Attributes:
        sizes: of the reproduction.
        backbone: folder or hub name of the backbone.
        texts: folder of the texts.
        left_out: number of questions left out because training text shares words with them, by domain.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.sizes = runs.QUICK_SIZES if options.quick else runs.RoutingSizes()
        self.pretraining: Measurement | None = None
        self._created: dict[str, runs.RoutingRun] = {}
        corpus = options.out / "backbone" / "corpus.jsonl"
        self.backbone = options.backbone or self._pretrain(corpus)
        self.texts = options.out / "texts"
        corpora, tokenizer = [] if options.backbone else [corpus], AutoTokenizer.from_pretrained(self.backbone)
        self.left_out = write_texts(options.data, corpora, self.texts, self.sizes.amounts, tokenizer, self.sizes.length)

    def _pretrain(self, corpus: Path) -> str:
        """Pretrain the backbone on English novels, Wikipedia and Python; gives its folder."""
        tokenizer = corpus.parent / "tokenizer"

        def fill(_: Path) -> None:
            write_corpus(self.options.data, corpus, self.sizes.amounts)
            train_corpus_tokenizer([corpus], self.sizes.vocabulary).save_pretrained(tokenizer)

        settings = self.sizes.model_dump(mode="json", include={"amounts", "vocabulary"})
        fill_once(corpus.parent, settings | {"sources": [str(self.options.data / name) for name in FILES]}, fill)
        run = PretrainRun(
            id="backbone",
            tokenizer=str(tokenizer),
            sources=[SourceConfig(path=str(corpus))],
            batch_size=self.sizes.backbone_batch,
            **self.sizes.model_dump(include={"width", "layers", "heads", "length"}),
        )
        self.pretraining = self.execute([run], "backbone")[run.id]
        return str(self.runs / run.id)

    def expert(self, domain: str, seed: int, prefix: str = "expert", **changes: Any) -> ExpertRun:
        """The training of one domain's expert; `changes` are fields of the run."""
        fields: dict[str, Any] = self._shared(seed, domain) | {"learning_rate": EXPERT_RATE} | changes
        return ExpertRun(id=f"{prefix}-{domain}_s{seed}", **fields)

    def experts(self, seed: int) -> list[ExpertRun]:
        """The training of every domain's expert."""
        return [self.expert(domain, seed) for domain in DOMAINS]

    def mixture(
        self, name: str, seed: int | None = None, experts: Iterable[ExpertRun] | None = None, **fields: Any
    ) -> MixtureRun:
        """The measurement of one mixture of experts.

        Args:
            name: start of the run's id; the seed follows.
            seed: by default the first one.
            experts: the runs that it depends on; by default all experts of the seed.
            fields: of `MixtureRun`; `routing` may hold `examples`, the text of its centroids.
        """
        seed = self.seeds[0] if seed is None else seed
        needed: list[runs.RoutingRun] = list(self.experts(seed) if experts is None else experts)
        shared = self._shared(seed, *(domain for run in needed for domain in run.domains))
        routing = dict(fields.pop("routing", {}))
        settings = {"embedder": routing.get("embedder", {}), "examples": routing.pop("examples", "whole")}
        if len(needed) > 1 and fields.get("mixture_kind", "routing") == "routing":
            run_id, depends_on = f"centroids-{digest(settings)[:12]}_s{seed}", tuple(run.id for run in needed)
            needed.append(CentroidRun(id=run_id, depends_on=depends_on, **settings, **shared))
        self._created |= {run.id: run for run in needed}
        depends_on = tuple(run.id for run in needed)
        return MixtureRun(id=f"{name}_s{seed}", depends_on=depends_on, routing=routing, **fields, **shared)

    def measure(self, mixtures: Sequence[MixtureRun], title: str) -> dict[str, list[Measurement]]:
        """Execute mixtures, after the runs that they depend on; measurements of all seeds by name."""
        needed = [self._created[name] for mixture in mixtures for name in mixture.depends_on]
        measured = self.execute([*needed, *mixtures], title)
        by_name: defaultdict[str, list[Measurement]] = defaultdict(list)
        for mixture in mixtures:
            by_name[mixture.id.rpartition("_s")[0]].append(measured[mixture.id])
        return by_name

    def numbers(self, mixtures: Sequence[MixtureRun], title: str) -> dict[str, list[Metrics]]:
        """The plain numbers of mixtures, of all seeds by name."""
        return {name: list(map(numbers, of_seeds)) for name, of_seeds in self.measure(mixtures, title).items()}

    def _shared(self, seed: int, *domains: str) -> dict[str, Any]:
        shared = {"backbone": self.backbone, "texts": str(self.texts), "sizes": self.sizes, "domains": domains}
        return shared | {"seed": seed, "device": self.options.device}

    def details(self) -> dict[str, Any]:
        """What a reader needs to know beside the rows."""
        return {
            "setting": self.sizes.model_dump(mode="json"),
            "rates": {"expert": EXPERT_RATE, "xlora": XLORA_RATE},
            "targets": list(runs.TARGETS),
            "left_out_as_overlapping": self.left_out,
            "backbone": numbers(self.pretraining) if self.pretraining else Path(self.backbone).name,
        }

    def expert_details(self) -> dict[str, Any]:
        """The cost and the losses of the first seed's experts."""
        experts = self.experts(self.seeds[0])
        measured = self.execute(experts, "experts")
        return {
            "experts": {run.domains[0]: numbers(measured[run.id]) for run in experts},
            "losses": {f"{run.domains[0]} expert": measured[run.id].details["losses"] for run in experts},
        }


def numbers(measurement: Measurement) -> Metrics:
    """All metrics as plain numbers."""
    return {name: value_of(value) for name, value in measurement.row.metrics.items()}


def choose_policy(study: TokenRoutingStudy) -> tuple[dict[str, Any], dict[str, Policies]]:
    """The routing with the lowest log-perplexity on validation questions at k = 2, and all candidates.

    The embedder (a layer's hidden states, whitened or not) is chosen first, at temperature 0.1 with centroids of whole
    examples and of their prompts. Then temperatures, centring and the texts of the centroids are chosen with it.
    """
    embedders: Policies = [
        {"temperature": 0.1, "embedder": {"layers": layers, "whiten": whiten, "centre": True}, "examples": "both"}
        for layers in range(study.sizes.layers + 1)
        for whiten in (False, True)
    ]
    embedders = _measure_policies(study, "embedder", embedders, every=3)
    embedder = _best(embedders)["embedder"]
    policies = [{**sharpness, "embedder": embedder, "examples": text} for text in EXAMPLES for sharpness in SHARPNESS]
    plain = {"embedder": {**embedder, "centre": False}, "examples": "both"}
    policies += [{**sharpness, **plain} for sharpness in SHARPNESS]
    measured = _measure_policies(study, "policy", policies, every=8)
    return _best(measured), {"embedders_on_validation": embedders, "policies_on_validation": measured}


def _measure_policies(study: TokenRoutingStudy, name: str, policies: Policies, *, every: int) -> Policies:
    """Policies with their metrics on validation questions. A quick run measures one in `every` of them."""
    policies = policies[::every] if study.options.quick else policies
    mixtures = [
        study.mixture(f"{name}-{number}", routing={**policy, "every": 2}, part="validation", trace=True)
        for number, policy in enumerate(policies)
    ]
    measured = study.numbers(mixtures, f"{name} candidates").values()
    return [{**policy, **metrics} for policy, (metrics,) in zip(policies, measured, strict=True)]


def _best(measured: Sequence[Policy]) -> dict[str, Any]:
    """The policy of the lowest log-perplexity, without its metrics."""
    best = min(measured, key=lambda policy: policy["nll_average"])
    return {key: value for key, value in best.items() if not key.startswith(("nll_", "routing_"))}


def choose_window(study: TokenRoutingStudy, policy: Policy) -> tuple[int, dict[str, Metrics]]:
    """The number of last tokens in a route with the lowest log-perplexity of validation documents, and all tried."""
    fields: dict[str, Any] = {"part": "validation", "reads": "documents"}
    routings = {f"window-{window}": document_routing(policy, window) for window in WINDOWS}
    mixtures = [study.mixture(name, routing=routing, **fields) for name, routing in routings.items()]
    measured = study.numbers(mixtures, "windows").items()
    metrics = {name.removeprefix("window-"): of_window for name, (of_window,) in measured}
    return int(min(metrics, key=lambda window: metrics[window]["nll_document"])), metrics


def document_routing(policy: Policy, window: int | None) -> dict[str, Any]:
    """A routing for documents without a prompt."""
    return {**policy, "every": 2, "prompt": "causal", "window": window}


def choice_rows(study: TokenRoutingStudy) -> list[Row]:
    """Targets and learning rates on validation text: of experts at a quarter of the steps, and of X-LoRA's router."""
    short = study.sizes.model_copy(update={"steps": max(1, study.sizes.steps // 4)})
    tried = [(name, rate) for name in TRIED_TARGETS for rate in TRIED_RATES["expert"]]
    mixtures: list[MixtureRun] = []
    for name, rate in tried:
        changes = {"learning_rate": rate, "targets": TRIED_TARGETS[name], "sizes": short}
        for domain in DOMAINS:
            expert = study.expert(domain, study.seeds[0], f"short-{name}-{rate:g}", **changes)
            mixtures.append(study.mixture(f"try-{name}-{rate:g}-{domain}", experts=[expert], part="validation"))
    for rate in TRIED_RATES["xlora"]:
        fields: dict[str, Any] = {"mixture_kind": "xlora", "router_learning_rate": rate, "part": "validation"}
        mixtures.append(study.mixture(f"try-xlora-{rate:g}", **fields))
    measured = study.numbers(mixtures, "choices")
    rows: list[Row] = []
    for name, rate in tried:
        nlls = {f"nll_{d}": measured[f"try-{name}-{rate:g}-{d}"][0][f"nll_{d}"] for d in DOMAINS}
        metrics = {**nlls, "nll_average": mean(nlls.values())}
        rows.append(Row(id=f"try_{name}_{rate:g}", label=f"experts on {name}, rate {rate:g}", metrics={**metrics}))
    return rows + [
        Row(id=f"try_xlora_{rate:g}", label=f"X-LoRA, rate {rate:g}", metrics={**measured[f"try-xlora-{rate:g}"][0]})
        for rate in TRIED_RATES["xlora"]
    ]


def embedder_folder(options: Options) -> str:
    """The folder of the paper's sentence embedder: in the data folder, or in a package that carries it."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError("sentence-transformers", "routing", "The paper's embedder")
    return mini_lm(options.data, "The paper's embedder")


def run(options: Options) -> Results:
    """Run tables, by default all but `minilm` and `choices`."""
    tables = options.chosen((*TABLES, *OPTIONAL_TABLES), TABLES)
    check_files(options, FILES)
    embedder = embedder_folder(options) if "minilm" in tables else ""
    study = TokenRoutingStudy(options)
    if tables == ("choices",):
        return study.write(NAME, choice_rows(study), seeds=study.seeds[:1], details=study.details())
    policy, candidates = choose_policy(study)
    details = study.details() | {"policy": policy} | candidates | study.expert_details()
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    if "1" in tables:
        rows += table_1(study, policy)
        plots["log-perplexity"] = bars(rows, {f"nll_{d}": d for d in DOMAINS}, "nats per answer token")
        plots["log-perplexity"].axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)  # bars fill them
    if "switch" in tables:
        switch_rows, plots["switch"], windows = table_switch(study, policy)
        rows += switch_rows
        details |= windows
    if "cache" in tables:
        rows += table_cache(study, policy)
    if "minilm" in tables:
        rows.append(minilm_row(study, embedder))
    if "choices" in tables:
        rows += choice_rows(study)
    paper = published(__file__, {row.id for row in rows})
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def table_1(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Every row for every seed; the backbone's row has no seed."""
    mixtures = [study.mixture("base", 0, (), mixture_kind="none")]
    mixtures += [mixture for seed in study.seeds for mixture in _table_1_mixtures(study, policy, seed)]
    rows = study.numbers(mixtures, "rows")
    rows["oracle"] = [_oracle({d: rows[f"expert_{d}"][n] for d in DOMAINS}) for n in range(len(study.seeds))]
    for seed, metrics in zip(study.seeds, rows["linear_k2"], strict=True):
        metrics["update_error"] = update_error([study.runs / expert.id for expert in study.experts(seed)])
    _copy_routing_accuracy(rows)
    return _rows(rows)


def _table_1_mixtures(study: TokenRoutingStudy, policy: Policy, seed: int) -> Iterator[MixtureRun]:
    """The mixtures of one seed. Where only k differs, routing accuracy is measured once, at k = 2."""
    for expert in study.experts(seed):
        yield study.mixture(f"expert_{expert.domains[0]}", seed, [expert])
    routings: dict[str, dict[str, Any]] = {"uniform": UNIFORM}
    routings |= {f"routed_k{k}": {**policy, "every": k} for k in INTERVALS}
    routings |= {f"paper_k{k}": {**PUBLISHED, "every": k} for k in INTERVALS}
    routings["linear_k2"] = {**policy, "every": 2, "combination": "linear"}
    routings["prompt_only"] = {**policy, "every": 2, "reads": "prompt"}
    for row, routing in routings.items():
        yield study.mixture(row, seed, routing=routing, trace=row.endswith("_k2"))
    yield study.mixture("xlora", seed, mixture_kind="xlora", router_learning_rate=XLORA_RATE)
    yield study.mixture("arrow", seed, mixture_kind="arrow")


def _oracle(experts: Mapping[str, Metrics]) -> Metrics:
    """Metrics of the domain's own expert for each domain."""
    metrics = {f"nll_{domain}": of_expert[f"nll_{domain}"] for domain, of_expert in experts.items()}
    return metrics | {"nll_average": mean(metrics.values()), "arc_accuracy": experts["science"]["arc_accuracy"]}


def _copy_routing_accuracy(rows: Mapping[str, Sequence[Metrics]]) -> None:
    """Copy the accuracy at k = 2 to all rows of the same routing: a prompt's route does not depend on k."""
    for row, measured in rows.items():
        source = "routed_k2" if row == "prompt_only" else f"{row.partition('_k')[0]}_k2"
        for metrics, other in zip(measured, rows.get(source, ()), strict=False):
            metrics["routing_accuracy"] = other["routing_accuracy"]


def update_error(adapters: Sequence[Path]) -> float:
    """Distance of the published combination, which sums factors before their product, from the sum of the updates.

    The mean over modules of |(sum of B_e) (sum of A_e) - sum of B_e A_e| / |sum of B_e A_e|, in Frobenius norms.
    Experts of one rank and scale with equal weights give it in both combinations.
    """
    experts = [load_file(folder / "adapter_model.safetensors") for folder in adapters]
    errors = []
    for key in experts[0]:
        if key.endswith(".lora_A.weight"):
            names = key, key.replace("lora_A", "lora_B")
            a, b = (torch.stack([expert[name] for expert in experts]) for name in names)
            exact = (b @ a).sum(0)
            errors.append(float((b.sum(0) @ a.sum(0) - exact).norm() / exact.norm()))
    return mean(errors)


def table_switch(study: TokenRoutingStudy, policy: Policy) -> tuple[list[Row], Figure, dict[str, Any]]:
    """Documents of code and then prose: every single expert, and routes by the last tokens and by all tokens."""
    window, windows = choose_window(study, policy)
    routed = {"switch_routed": window, "switch_routed_all": None}
    mixture = partial(study.mixture, reads="documents")
    mixtures = [mixture("switch_base", 0, (), mixture_kind="none")]
    for seed in study.seeds:
        mixtures += [mixture(f"switch_expert_{d}", seed, [study.expert(d, seed)]) for d in DOMAINS]
        mixtures += [mixture(row, seed, routing=document_routing(policy, size)) for row, size in routed.items()]
    measured = study.measure(mixtures, "documents")
    rows = {row: list(map(numbers, of_seeds)) for row, of_seeds in measured.items()}
    halves = zip(*(measured[f"switch_expert_{half}"] for half in (FIRST, SECOND)), strict=True)
    rows["switch_by_hand"] = [half_nats(*(half.details["documents"] for half in pair)) for pair in halves]
    figure = switch_plot({LABELS[row]: measured[row][0].details for row in routed})
    return _rows(rows), figure, {"window": window, "windows_on_validation": windows}


def table_cache(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Distance of `cache: keep` from `recompute` with the first seed: on right answers, and on documents."""
    routings = {k: {**policy, "every": k} for k in INTERVALS}
    mixtures = [study.mixture(f"cache_k{k}", routing=routings[k], reads="cache-questions") for k in INTERVALS]
    routing = document_routing(policy, CACHE_WINDOW)
    mixtures.append(study.mixture("cache_documents", routing=routing, reads="cache-documents"))
    return _rows(study.numbers(mixtures, "keys and values"))


def minilm_row(study: TokenRoutingStudy, embedder: str) -> Row:
    """The paper's weighting by the paper's embedder with the first seed alone: each renewal reads all text again."""
    routing = {**PUBLISHED, "embedder": {"name": embedder, "centre": False}, "every": 2}
    ((metrics,),) = study.numbers([study.mixture("minilm_k2", routing=routing, trace=True)], "MiniLM").values()
    return Row(id="minilm_k2", label="the paper's weighting and embedder, k = 2", metrics={**metrics})


def _rows(rows: Mapping[str, Sequence[Metrics]]) -> list[Row]:
    """Rows over seeds, in the order of the labels."""
    return [combined_row(row, label, rows[row]) for row, label in LABELS.items() if row in rows]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The aims of the measured tables."""
    metrics = numbers_of(rows)
    measured: list[Aim] = []
    if routed := metrics.get("routed_k2"):
        limits = {"oracle": 1.02, "uniform": 1.0, "base": 1.0, "paper_k2": 1.0, "arrow": 1.0, "xlora": 1.0}
        for other, limit in limits.items():
            text = f"log-perplexity at k = 2 over that of: {LABELS[other]}"
            ratio = routed["nll_average"] / metrics[other]["nll_average"]
            measured.append(aim(text, "nll_average", limit, ratio, operator.lt if limit == 1 else operator.le))
        share, metric = routed["routing_accuracy"], "routing_accuracy"
        measured.append(aim("prompts with the right expert", metric, 0.95, share, operator.ge))
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

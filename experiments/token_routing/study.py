"""The study of token routing: its backbone, texts and runs, and the choices made on validation text, first seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoTokenizer

from experiments import Options
from experiments.parents import PretrainRun
from experiments.study import Study, mini_lm
from experiments.token_routing.runs import QUICK_SIZES, TARGETS, CentroidRun, ExpertRun, MixtureRun, RoutingSizes
from experiments.token_routing.texts import DOMAINS, FILES, write_corpus, write_texts
from graftlm.data import SourceConfig
from graftlm.demo.run import train_corpus_tokenizer
from graftlm.errors import MissingExtraError
from graftlm.evaluation import Row, value_of
from graftlm.io import digest, fill_once
from graftlm.runs.run import Measurement, Run

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
        self.sizes = QUICK_SIZES if options.quick else RoutingSizes()
        self.pretraining: Measurement | None = None
        self._dependencies: dict[str, list[Run]] = {}
        corpus = options.out / "backbone" / "corpus.jsonl"
        self.backbone = options.backbone or self._pretrain(corpus)
        self.texts = options.out / "texts"
        self.left_out = write_texts(
            options.data,
            [] if options.backbone else [corpus],
            self.texts,
            self.sizes.amounts,
            AutoTokenizer.from_pretrained(self.backbone),
            self.sizes.length,
        )

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
        fields: dict[str, Any] = self._shared(seed) | {"learning_rate": EXPERT_RATE} | changes
        return ExpertRun(id=f"{prefix}-{domain}_s{seed}", domains=(domain,), **fields)

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
        experts = self.experts(seed) if experts is None else list(experts)
        dependencies: list[Run] = [*experts]
        domains = tuple(domain for run in experts for domain in run.domains)
        routing = dict(fields.pop("routing", {}))
        examples = routing.pop("examples", "whole")
        if len(dependencies) > 1 and fields.get("mixture_kind", "routing") == "routing":
            settings = {"embedder": routing.get("embedder", {}), "examples": examples}
            centroids = CentroidRun(
                id=f"centroids-{digest(settings)[:12]}_s{seed}",
                domains=domains,
                depends_on=tuple(run.id for run in dependencies),
                **settings,
                **self._shared(seed),
            )
            dependencies.append(centroids)
        run_id, depends_on = f"{name}_s{seed}", tuple(run.id for run in dependencies)
        self._dependencies[run_id] = dependencies
        fields |= self._shared(seed)
        return MixtureRun(id=run_id, domains=domains, depends_on=depends_on, routing=routing, **fields)

    def measure(self, mixtures: Sequence[MixtureRun], title: str) -> dict[str, list[Measurement]]:
        """Execute mixtures, after the runs that they depend on; measurements of all seeds by name."""
        needed = [run for mixture in mixtures for run in self._dependencies[mixture.id]]
        measured = self.execute([*needed, *mixtures], title)
        by_name: dict[str, list[Measurement]] = {}
        for mixture in mixtures:
            by_name.setdefault(mixture.id.rpartition("_s")[0], []).append(measured[mixture.id])
        return by_name

    def numbers(self, mixtures: Sequence[MixtureRun], title: str) -> dict[str, list[Metrics]]:
        """The plain numbers of mixtures, of all seeds by name."""
        return {name: list(map(numbers, of_seeds)) for name, of_seeds in self.measure(mixtures, title).items()}

    def _shared(self, seed: int) -> dict[str, Any]:
        shared = {"backbone": self.backbone, "texts": str(self.texts), "sizes": self.sizes}
        return shared | {"seed": seed, "device": self.options.device}

    def details(self) -> dict[str, Any]:
        """What a reader needs to know beside the rows."""
        return {
            "setting": self.sizes.model_dump(mode="json"),
            "rates": {"expert": EXPERT_RATE, "xlora": XLORA_RATE},
            "targets": list(TARGETS),
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
    runs = [
        study.mixture(f"{name}-{number}", routing={**policy, "every": 2}, part="validation", trace=True)
        for number, policy in enumerate(policies)
    ]
    measured = study.numbers(runs, f"{name} candidates").values()
    return [{**policy, **metrics} for policy, (metrics,) in zip(policies, measured, strict=True)]


def _best(measured: Sequence[Policy]) -> dict[str, Any]:
    """The policy of the lowest log-perplexity, without its metrics."""
    best = min(measured, key=lambda policy: policy["nll_average"])
    return {key: value for key, value in best.items() if not key.startswith(("nll_", "routing_"))}


def choose_window(study: TokenRoutingStudy, policy: Policy) -> tuple[int, dict[str, Metrics]]:
    """The number of last tokens in a route with the lowest log-perplexity of validation documents, and all tried."""
    runs = [
        study.mixture(
            f"window-{window}", routing=document_routing(policy, window), part="validation", reads="documents"
        )
        for window in WINDOWS
    ]
    measured = study.numbers(runs, "windows").values()
    metrics = {str(window): of_window for window, (of_window,) in zip(WINDOWS, measured, strict=True)}
    return int(min(metrics, key=lambda window: metrics[window]["nll_document"])), metrics


def document_routing(policy: Policy, window: int | None) -> dict[str, Any]:
    """A routing for documents without a prompt."""
    return {**policy, "every": 2, "prompt": "causal", "window": window}


def choice_rows(study: TokenRoutingStudy) -> list[Row]:
    """Targets and learning rates on validation text: of experts at a quarter of the steps, and of X-LoRA's router."""
    short = study.sizes.model_copy(update={"steps": max(1, study.sizes.steps // 4)})
    tried = [(name, rate) for name in TRIED_TARGETS for rate in TRIED_RATES["expert"]]
    runs: list[MixtureRun] = []
    for name, rate in tried:
        changes = {"learning_rate": rate, "targets": TRIED_TARGETS[name], "sizes": short}
        for domain in DOMAINS:
            expert = study.expert(domain, study.seeds[0], f"short-{name}-{rate:g}", **changes)
            runs.append(study.mixture(f"try-{name}-{rate:g}-{domain}", experts=[expert], part="validation"))
    for rate in TRIED_RATES["xlora"]:
        fields: dict[str, Any] = {"mixture_kind": "xlora", "router_learning_rate": rate, "part": "validation"}
        runs.append(study.mixture(f"try-xlora-{rate:g}", **fields))
    measured = study.numbers(runs, "choices")
    rows = []
    for name, rate in tried:
        nlls = {f"nll_{d}": measured[f"try-{name}-{rate:g}-{d}"][0][f"nll_{d}"] for d in DOMAINS}
        metrics: dict[str, Any] = nlls | {"nll_average": mean(nlls.values())}
        rows.append(Row(id=f"try_{name}_{rate:g}", label=f"experts on {name}, rate {rate:g}", metrics=metrics))
    for rate in TRIED_RATES["xlora"]:
        (metrics,) = measured[f"try-xlora-{rate:g}"]
        rows.append(Row(id=f"try_xlora_{rate:g}", label=f"X-LoRA, rate {rate:g}", metrics=metrics))
    return rows


def embedder_folder(options: Options) -> str:
    """The folder of the paper's sentence embedder: in the data folder, or in a package that carries it."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError("sentence-transformers", "routing", "The paper's embedder")
    return mini_lm(options.data, "The paper's embedder")

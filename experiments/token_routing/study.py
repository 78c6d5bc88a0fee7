"""The study of token routing: its backbone, its texts, and the runs that its tables consist of."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments import Options
from experiments.pretrain import PretrainRun
from experiments.study import Measurements, Study, mini_lm
from experiments.token_routing.experts import QUICK_SIZES, TARGETS, ExpertRun, RoutingSizes
from experiments.token_routing.measure import CentroidRun, MixtureRun
from experiments.token_routing.texts import DOMAINS, write_corpus, write_texts
from graftlm.data import SourceConfig
from graftlm.demo.run import train_corpus_tokenizer
from graftlm.errors import MissingExtraError
from graftlm.evaluation import value_of
from graftlm.io import digest
from graftlm.runs.run import Measurement, Run

EXPERT_RATE, XLORA_RATE = 1e-2, 3e-2  # chosen by `--table choices`


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
        tokenizer, written = corpus.parent / "tokenizer", corpus.parent / "corpus.json"
        amounts = self.sizes.model_dump(mode="json", include={"amounts", "vocabulary"})
        if not written.exists() or json.loads(written.read_text(encoding="utf-8")) != amounts:
            write_corpus(self.options.data, corpus, self.sizes.amounts)
            train_corpus_tokenizer([corpus], self.sizes.vocabulary).save_pretrained(tokenizer)
            written.write_text(json.dumps(amounts), encoding="utf-8")
        run = PretrainRun(
            id="backbone",
            tokenizer=str(tokenizer),
            sources=[SourceConfig(path=str(corpus))],
            batch_size=self.sizes.backbone_batch,
            **self.sizes.model_dump(include={"width", "layers", "heads", "length"}),
        )
        self.pretraining = self.execute([run], "backbone")[run.id]
        return str(self.runs / run.id)

    def expert(
        self,
        domain: str,
        seed: int,
        *,
        prefix: str = "expert",
        learning_rate: float = EXPERT_RATE,
        targets: tuple[str, ...] = TARGETS,
        sizes: RoutingSizes | None = None,
    ) -> ExpertRun:
        """The training of one domain's expert."""
        shared: dict[str, Any] = self._shared(seed) | ({"sizes": sizes} if sizes else {})
        return ExpertRun(
            id=f"{prefix}-{domain}_s{seed}", domains=(domain,), learning_rate=learning_rate, targets=targets, **shared
        )

    def experts(self, seed: int) -> list[ExpertRun]:
        """The training of every domain's expert."""
        return [self.expert(domain, seed) for domain in DOMAINS]

    def mixture(self, name: str, experts: Iterable[ExpertRun], seed: int, **fields: Any) -> MixtureRun:
        """The measurement of one mixture of experts.

        Args:
            name: start of the run's id; the seed follows.
            experts: the runs that it depends on.
            fields: of `MixtureRun`; `routing` may hold `examples`, the text of its centroids.
        """
        dependencies: list[Run] = list(experts)
        domains = tuple(domain for run in dependencies for domain in run.domains)  # type: ignore[attr-defined]
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
        depends_on = tuple(run.id for run in dependencies)
        run_id = f"{name}_s{seed}"
        self._dependencies[run_id] = dependencies
        return MixtureRun(
            id=run_id, domains=domains, depends_on=depends_on, routing=routing, **self._shared(seed), **fields
        )

    def measure(self, mixtures: Iterable[MixtureRun], title: str) -> Measurements:
        """Execute mixtures, after the runs that they depend on; measurements by id."""
        mixtures = list(mixtures)
        needed = {run.id: run for mixture in mixtures for run in self._dependencies[mixture.id]}
        return self.execute([*needed.values(), *mixtures], title)

    def _shared(self, seed: int) -> dict[str, Any]:
        return {
            "backbone": self.backbone,
            "texts": str(self.texts),
            "sizes": self.sizes,
            "seed": seed,
            "device": self.options.device,
        }

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
        runs = {run.domains[0]: run.id for run in self.experts(self.seeds[0])}
        measured = self.execute(self.experts(self.seeds[0]), "experts")
        return {
            "experts": {domain: numbers(measured[run_id]) for domain, run_id in runs.items()},
            "losses": {f"{domain} expert": measured[run_id].details["losses"] for domain, run_id in runs.items()},
        }


def numbers(measurement: Measurement) -> dict[str, float]:
    """All metrics as plain numbers."""
    return {name: value_of(value) for name, value in measurement.row.metrics.items()}


def numbers_of(measured: Mapping[str, Measurement], run: Run) -> dict[str, float]:
    """All metrics of a run as plain numbers."""
    return numbers(measured[run.id])


def embedder_folder(options: Options) -> str:
    """The folder of the paper's sentence embedder: in the data folder, or in a package that carries it.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        DataError: the model is in neither.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError("sentence-transformers", "routing", "The paper's embedder")
    return mini_lm(options.data, "The paper's embedder")

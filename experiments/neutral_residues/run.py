"""English novels, then French: what gate, local loss, initialisation and open start are each worth.

Every row has as many settings in its search, which reads validation texts of other sources than the tests, with the
first seed and a third of the steps. No row trains the embeddings.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from experiments import Options
from experiments.parents import ENGLISH, FRENCH
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, published, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.plots import learn_against_forget
from graftlm.evaluation.plots import spectrum as spectrum_plot
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import GraftRun

NAME = "neutral-residues"
TABLES = ("factorial", "frontier", "replay", "capacity")
WIKITEXT = "lm_text/wikitext2_valid_test/valid.txt"
FILES = (ENGLISH, FRENCH, "lm_text/tinyshakespeare/input.txt", "parallel/bible/BSB.txt", WIKITEXT)
UNLIKE = ("shakespeare", "bible")  # texts that are unlike the replayed novel
QUANTITIES = ("learned", "forgotten", "forgotten_unlike")

LOSS_SETTINGS = tuple({"learning_rate": rate, "alpha": alpha} for rate in (1e-3, 3e-3, 1e-2) for alpha in (1.0, 10.0))
RATE_SETTINGS = tuple({"learning_rate": rate} for rate in (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2))
LOW_RATE_SETTINGS = tuple({"learning_rate": rate} for rate in (1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 3e-3))
FRONTIER = tuple({"learning_rate": 3e-3, "alpha": alpha} for alpha in (1.0, 10.0, 100.0))
SHARES, CAPACITIES = (0.0, 0.01, 0.02, 0.05, 0.2), (0.05, 0.1, 0.4)
GATE_LABELS = {"none": "no gate", "relu-open": "open gate", "relu-random": "random gate"}
INIT_LABELS = {"low": "low variance", "he": "He"}
USUAL_LABELS = {
    NAME: "neutral residues",
    "adapter": "plain adapters",
    "relu-random-l1-low": "neutral residues, random gate",
}
UNGATED, PUBLISHED = "none-l1-low", "relu-random-l1-low"


class FactorialRow(NamedTuple):
    """A row: its label, its graft, and the settings of its search."""

    label: str
    graft: dict[str, Any]
    settings: Sequence[dict[str, float]]


def factorial() -> dict[str, FactorialRow]:
    """Gate (and how it starts) x local loss x initialisation; two of them have the usual names."""
    gates = {"none": {"gate": "none"}} | {
        f"relu-{start}": {"gate": "relu", "gate_init": start} for start in ("open", "random")
    }
    names = {"relu-open-l1-low": NAME, "none-he": "adapter"}
    methods = {}
    for (gate, fields), loss, init in product(gates.items(), ("l1", "none"), ("low", "he")):
        name = "-".join(part for part in (gate, loss if loss == "l1" else "", init) if part)
        graft = fields | {"local_loss": loss, "init": "low-variance" if init == "low" else "he"}
        loss_label = "local loss" if loss == "l1" else "no local loss"
        label = f"{GATE_LABELS[gate]}, {loss_label}, {INIT_LABELS[init]}"
        settings = LOSS_SETTINGS if loss == "l1" else RATE_SETTINGS
        name = names.get(name, name)
        methods[name] = FactorialRow(USUAL_LABELS.get(name, label), {"kind": NAME, **graft}, settings)
    return methods


METHODS = {
    "finetune": FactorialRow(
        "fine-tuning, embeddings frozen", {"kind": "finetune", "embeddings": False}, LOW_RATE_SETTINGS
    ),
    "lora": FactorialRow("LoRA on the FFN", {"kind": "lora"}, RATE_SETTINGS),
    **factorial(),
}
FACTORS = {  # what each factor is worth: the row with it, and the row that lacks it alone
    "gate": (NAME, UNGATED),
    "gate, He": ("relu-open-l1-he", "none-l1-he"),
    "gate, no local loss": ("relu-open-low", "none-low"),
    "gate as published": (PUBLISHED, UNGATED),
    "local loss": (NAME, "relu-open-low"),
    "local loss, no gate": (UNGATED, "none-low"),
    "open start": (NAME, PUBLISHED),
    "open start, He": ("relu-open-l1-he", "relu-random-l1-he"),
    "low variance": (NAME, "relu-open-l1-he"),
    "low variance, no gate": (UNGATED, "none-l1-he"),
    "all, over LoRA": (NAME, "lora"),
    "all, over adapters": (NAME, "adapter"),
    "no gate, over LoRA": (UNGATED, "lora"),
}
DRAWN = (NAME, PUBLISHED, UNGATED, "relu-open-low", "adapter", "lora", "finetune")
# Rows of as many seeds as the options name; the others have the first three of them.
FIVE_SEEDS = {"lora", "adapter", *(name for name, row in METHODS.items() if row.graft.get("local_loss") == "l1")}


class NeutralResiduesStudy(Study):
    """The runs of the experiment.

    Attributes:
        settings: what the search chose, by row.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        name = options.backbone or str(options.data / "models" / "english-novels-4m")
        self.backbone = BackboneConfig(name=name, device=options.device)
        self.settings: dict[str, Mapping[str, float]] = {}

    def search(self) -> None:
        """Choose every row's setting on validation text."""
        some = slice(2, 3) if self.options.quick else slice(None)
        tried = {
            name: {(run := self.run(name, values, search=True)).id: (run, values) for values in method.settings[some]}
            for name, method in METHODS.items()
        }
        candidates = {name: [run for run, _ in by_id.values()] for name, by_id in tried.items()}
        chosen = self.choose(candidates, ("old", "new"), "the settings")
        self.settings = {name: tried[name][run.id][1] for name, run in chosen.items()}

    def run(
        self,
        name: str,
        setting: Mapping[str, float],
        seed: int = 0,
        share: float = 0.1,
        *,
        search: bool = False,
        **graft: Any,
    ) -> GraftRun:
        """One run; its id says all that sets it apart."""
        values = {key: value for key, value in setting.items() if key != "learning_rate"} | graft
        steps = 3 if self.options.quick else (25 if search else 75)
        parts = ["search" if search else "", name, *(f"{k}-{v:g}" for k, v in (dict(setting) | graft).items())]
        return GraftRun(
            id="_".join([*filter(None, parts), f"p{share:g}", f"s{seed}"]),
            label=METHODS[name].label,
            backbone=self.backbone,
            graft=graft_config(METHODS[name].graft | values),
            data=self._data(share, seed, search),
            training=training_config(
                steps, 4, setting["learning_rate"], seed, warmup_steps=max(steps // 20, 1), precision="bf16"
            ),
            evaluation=EvaluationConfig(
                limit_tokens=600 if self.options.quick else 6000, own_tokens=0, decode_prompts=0
            ),
        )

    def bare(self) -> GraftRun:
        """The backbone's own scores."""
        return self.run("lora", RATE_SETTINGS[0]).model_copy(
            update={"id": "backbone", "label": "backbone", "graft": None}
        )

    def every_seed(self, name: str, share: float = 0.1, **graft: Any) -> list[GraftRun]:
        """A row at its chosen setting."""
        seeds = self.seeds if name in FIVE_SEEDS else self.seeds[:3]
        return [self.run(name, self.settings[name], seed, share, **graft) for seed in seeds]

    def _data(self, share: float, seed: int, search: bool) -> DataConfig:
        english, french, shakespeare, bible, wikitext = (str(self.options.data / name) for name in FILES)
        tests: dict[str, dict[str, Any]] = {
            "old": {"path": english, "documents": "24:25", "skip_characters": 0 if self.options.quick else 150_000},
            "new": {"path": french, "documents": "29:30"},
            "shakespeare": {"path": shakespeare},
            "bible": {"path": bible},
        }
        if search:
            tests = {"old": {"path": wikitext}, "new": {"path": french, "documents": "27:28"}}
        return DataConfig(
            new=[SourceConfig(path=french, documents="0:27", limit_characters=3_000_000)],
            old=[SourceConfig(path=english, documents="23:24")],
            replay_fraction=share,
            length=64 if self.options.quick else 256,
            test={name: [SourceConfig.parse(values | {"limit_characters": 40_000})] for name, values in tests.items()},
            seed=seed,
        )


def run(options: Options) -> Results:
    """Search every row's setting, then run the chosen tables."""
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    study = NeutralResiduesStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    study.search()
    groups: dict[str, tuple[str, list[GraftRun]]] = {}
    details: dict[str, Any] = {}
    if "factorial" in tables:
        groups |= {name: (METHODS[name].label, study.every_seed(name)) for name in METHODS}
    if "frontier" in tables:
        groups |= frontier(study)
    if "replay" in tables:
        groups |= {
            f"{name}-p{share:g}": (f"{METHODS[name].label}, p = {share:g}", study.every_seed(name, share)[:1])
            for name, share in product((NAME, UNGATED, "lora"), SHARES)
        }
    if "capacity" in tables:
        groups |= {
            f"{name}-c{size:g}": (f"{METHODS[name].label}, {size:.0%}", study.every_seed(name, capacity=size)[:1])
            for name, size in product((NAME, UNGATED, "lora"), CAPACITIES)
        }
    study.execute([run for _, runs in groups.values() for run in runs], "the rows")
    rows = [bare.row, *(_row(study, name, *group, bare) for name, group in groups.items())]
    runs = {name: group for name, (_, group) in groups.items()}
    if "factorial" in tables:
        details["factors"] = {
            factor: differences(study, runs[row], runs[other]) | {"rows": [row, other]}
            for factor, (row, other) in FACTORS.items()
        }
    if "frontier" in tables:
        alphas = [f"alpha{values['alpha']:g}" for values in FRONTIER]
        details["gate_at_equal_alpha"] = {
            alpha: differences(study, runs[f"{NAME}-{alpha}"], runs[f"{UNGATED}-{alpha}"]) for alpha in alphas
        }
        details["at_equal_learning"] = at_equal_learning(study, runs)
    details |= {"settings": {name: dict(values) for name, values in study.settings.items()}, "seconds": study.seconds}
    details |= study.evidence(runs)
    return study.write(
        NAME,
        rows,
        aims=aims(rows, details),
        paper=published(__file__, runs),
        details=details,
        plots=_plots(rows, study, runs),
    )


def frontier(study: NeutralResiduesStudy) -> dict[str, tuple[str, list[GraftRun]]]:
    """Rows with and without the gate at one rate and several alphas, three seeds."""
    return {
        f"{name}-alpha{values['alpha']:g}": (
            f"{METHODS[name].label}, alpha {values['alpha']:g}",
            [study.run(name, values, seed) for seed in study.seeds[:3]],
        )
        for name, values in product((NAME, UNGATED), FRONTIER)
    }


def differences(study: Study, ours: Sequence[GraftRun], theirs: Sequence[GraftRun]) -> dict[str, Any]:
    """Ours minus theirs in every quantity: the mean over seeds, and Student's interval of the paired differences."""
    return {
        name: combine_seeds(
            [
                metric(study.measured[a.id], name) - metric(study.measured[b.id], name)
                for a, b in zip(ours, theirs, strict=False)  # the seeds of both
            ]
        ).model_dump()
        for name in QUANTITIES
    }


def at_equal_learning(study: Study, runs: Mapping[str, Sequence[GraftRun]]) -> dict[str, Any]:
    """Forgotten with the gate minus without it, where both have learned the same; by seed, then with an interval.

    Each row is a path over alpha. The point of comparison is the middle of what both paths reach; between two alphas
    the path is a line. Seeds whose paths reach nothing in common are left out.
    """
    compared: dict[str, Any] = {}
    for quantity in QUANTITIES[1:]:
        by_seed = []
        for index in range(len(study.seeds[:3])):
            paths = []
            for row in (NAME, UNGATED):
                path = [of_row[index] for name, of_row in runs.items() if name.startswith(f"{row}-alpha")]
                points = sorted(tuple(metric(study.measured[r.id], n) for n in ("learned", quantity)) for r in path)
                paths.append(np.array(points).T)
            low, high = max(path[0, 0] for path in paths), min(path[0, -1] for path in paths)
            if low < high:
                ours, theirs = (float(np.interp((low + high) / 2, *path)) for path in paths)
                by_seed.append(ours - theirs)
        if by_seed:
            compared[f"{NAME} - {UNGATED}: {quantity}"] = combine_seeds(by_seed).model_dump() | {"by_seed": by_seed}
    return compared


def _row(study: Study, name: str, label: str, runs: Sequence[GraftRun], bare: Measurement) -> Row:
    """A row over its seeds, with what it forgot of texts unlike the replay, and how flat its gating matrices are."""
    measurements = [study.measured[run.id] for run in runs]
    losses: dict[str, list[float]] = {}
    for measurement in measurements:
        lost = {f"forgotten_{text}": metric(measurement, text) - metric(bare, text) for text in UNLIKE}
        lost["forgotten_unlike"] = sum(lost.values()) / len(UNLIKE)
        measurement.add_metrics(lost)
        for quantity, value in lost.items():
            losses.setdefault(quantity, []).append(value)
        spectra = measurement.details.get("statistics", {}).get("spectrum", {})
        measurement.add_metrics({f"flatness_{of}": float(np.mean(values)) for of, values in spectra.items()})
    row = over_seeds(measurements, name, label)
    intervals = {quantity: combine_seeds(values) for quantity, values in losses.items()} if len(runs) > 1 else {}
    return row.model_copy(update={"metrics": dict(row.metrics) | intervals})


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """A fifth of LoRA's and the adapters' forgetting, no less learned, and a gate whose interval is below 0."""
    values = numbers_of(rows)
    if "lora" not in values:
        return []
    limits = (
        ("forgotten", "lora", 0.2, operator.le),
        ("forgotten_unlike", "lora", 0.2, operator.le),
        ("forgotten_unlike", "adapter", 0.2, operator.le),
        ("learned", "lora", 1.0, operator.ge),
    )
    met = [
        aim(f"{name} over {other}'s", name, bound, values[NAME][name] / values[other][name], relation)
        for name, other, bound, relation in limits
    ]
    high = details["factors"]["gate"]["forgotten_unlike"]["high"]
    text = "what the gate changes in forgotten_unlike, high end of its interval"
    return [*met, aim(text, "forgotten_unlike", 0.0, high)]


def _plots(rows: Sequence[Row], study: Study, runs: Mapping[str, Sequence[GraftRun]]) -> dict[str, Any]:
    """Figure 1, and Figure 3: the gating matrices' spectra of backbone, gates and adapters."""
    shown = [row for row in rows if row.id in DRAWN]
    figures = {"learn-against-forget": learn_against_forget(shown)} if shown else {}
    spectra: dict[str, Any] = {}
    for name in (NAME, PUBLISHED, UNGATED, "adapter"):
        if name in runs:
            spectrum = study.measured[runs[name][0].id].details["statistics"]["spectrum"]
            spectra |= {"backbone": spectrum["backbone"], METHODS[name].label: spectrum["graft"]}
    if spectra:
        figures["spectrum"] = spectrum_plot(spectra)
    return figures

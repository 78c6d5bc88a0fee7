"""English novels, then French: the effects of the gate, the local loss, the initialisation and the open start.

Every row has the same number of settings in its search, which reads validation texts of other sources than the tests,
with the first seed and a third of the steps. No row trains the embeddings.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments import Options
from experiments.parents import ENGLISH, FRENCH
from experiments.study import (
    Study,
    aim,
    all_runs,
    check_files,
    metric,
    numbers_of,
    over_seeds,
    published,
    training_config,
)
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, Metric, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.plots import learn_against_forget
from graftlm.evaluation.plots import spectrum as spectrum_plot
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import GraftRun

NAME = "neutral-residues"
TABLES = ("factorial", "frontier", "replay", "capacity", "sigmoid", "alphas", "rates")
SHAKESPEARE = "lm_text/tinyshakespeare/input.txt"
BIBLE = "parallel/bible/BSB.txt"
WIKITEXT = "lm_text/wikitext2_valid_test/valid.txt"
FILES = (ENGLISH, FRENCH, SHAKESPEARE, BIBLE, WIKITEXT)
UNLIKE = ("shakespeare", "bible")  # texts that are unlike the replayed novel
QUANTITIES = ("learned", "forgotten", "forgotten_unlike")

Setting = Mapping[str, float]
Group = tuple[str, list[GraftRun]]  # label and runs of a row


def _rates(*rates: float) -> tuple[Setting, ...]:
    return tuple({"learning_rate": rate} for rate in rates)


LOSS_SETTINGS = tuple(
    {"learning_rate": rate, "alpha": alpha} for rate, alpha in product((1e-3, 3e-3, 1e-2), (1.0, 10.0))
)
RATE_SETTINGS = _rates(3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2)
LOW_RATE_SETTINGS = _rates(1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 3e-3)
FRONTIER = tuple({"learning_rate": 3e-3, "alpha": alpha} for alpha in (1.0, 10.0, 100.0))
SHARES = (0.0, 0.01, 0.02, 0.05, 0.2)
ALPHAS = (0.0, 0.01, 0.1, 1.0, 10.0, 100.0)
"""The weights of the local loss in Table 6 of the paper."""
CAPACITIES = (0.05, 0.1, 0.4)
GATES = {
    "none": {"gate": "none"},
    "relu-open": {"gate": "relu", "gate_init": "open"},
    "relu-random": {"gate": "relu", "gate_init": "random"},
}
GATE_LABELS = {
    "none": "no gate",
    "relu-open": "open gate",
    "relu-random": "random gate",
}
INITS = {"low": "low-variance", "he": "he"}
INIT_LABELS = {"low": "low variance", "he": "He"}
USUAL_NAMES = {
    "relu-open-l1-low": NAME,
    "none-he": "adapter",
}
USUAL_LABELS = {
    NAME: "neutral residues",
    "adapter": "plain adapters",
    "relu-random-l1-low": "neutral residues, random gate",
}
UNGATED = "none-l1-low"
PUBLISHED = "relu-random-l1-low"


class FactorialRow(NamedTuple):
    """A row.

    Attributes:
        label: label of the row.
        graft: config of its graft.
        settings: settings of its search.
    """

    label: str
    graft: dict[str, Any]
    settings: Sequence[Setting]


def factorial() -> dict[str, FactorialRow]:
    """Return all combinations of gate (with its start), local loss and initialisation; two have usual names."""
    methods = {}
    for gate, loss, init in product(GATES, ("l1", "none"), INITS):
        has_loss = loss == "l1"
        systematic = f"{gate}-l1-{init}" if has_loss else f"{gate}-{init}"
        name = USUAL_NAMES.get(systematic, systematic)
        loss_label = "local loss" if has_loss else "no local loss"
        label = f"{GATE_LABELS[gate]}, {loss_label}, {INIT_LABELS[init]}"
        graft = {
            "kind": NAME,
            **GATES[gate],
            "local_loss": loss,
            "init": INITS[init],
        }
        methods[name] = FactorialRow(
            label=USUAL_LABELS.get(name, label),
            graft=graft,
            settings=LOSS_SETTINGS if has_loss else RATE_SETTINGS,
        )
    return methods


METHODS = {
    "finetune": FactorialRow(
        "fine-tuning, embeddings frozen",
        {"kind": "finetune", "embeddings": False},
        LOW_RATE_SETTINGS,
    ),
    "lora": FactorialRow("LoRA on the FFN", {"kind": "lora"}, RATE_SETTINGS),
    **factorial(),
}
SIGMOID = {
    "sigmoid-cross-entropy-low": FactorialRow(
        "sigmoid gate, cross-entropy, low variance",
        {"kind": NAME, "gate": "sigmoid", "gate_init": "random", "local_loss": "cross-entropy", "init": "low-variance"},
        LOSS_SETTINGS,
    ),
    "sigmoid-low": FactorialRow(
        "sigmoid gate, no local loss, low variance",
        {"kind": NAME, "gate": "sigmoid", "gate_init": "random", "local_loss": "none", "init": "low-variance"},
        RATE_SETTINGS,
    ),
}
"""Lines 2 and 3 of Table 4; its other lines are rows of the factorial."""
ALL_METHODS = {**METHODS, **SIGMOID}
BY_RATE = ("finetune", "lora", "adapter", PUBLISHED)
"""Rows of Table 7: each at all rates of its search."""
# Pairs of rows that measure the effect of a factor: a row with the factor, and the row that differs only in lacking it.
FACTORS = {
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


def _rows_of_five_seeds() -> set[str]:
    with_loss = {name for name, row in METHODS.items() if row.graft.get("local_loss") == "l1"}
    return {"lora", "adapter", *with_loss}


# Rows with all seeds of the options; the others have the first three of them.
FIVE_SEEDS = _rows_of_five_seeds()


class NeutralResiduesStudy(Study):
    """The runs of the experiment.

    Attributes:
        backbone: config of the backbone.
        settings: setting that the search chose, by row.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        name = options.backbone or str(options.data / "models" / "english-novels-4m")
        self.backbone = BackboneConfig(name=name, device=options.device)
        self.settings: dict[str, Setting] = {}

    def search(self, names: Sequence[str]) -> None:
        """Choose the setting of each of these rows on validation text."""
        candidates: dict[str, list[GraftRun]] = {}
        settings: dict[str, Setting] = {}
        for name in names:
            method = ALL_METHODS[name]
            tried = method.settings[2:3] if self.options.quick else method.settings
            candidates[name] = []
            for setting in tried:
                run = self.run(name, setting, search=True)
                candidates[name].append(run)
                settings[run.id] = setting
        chosen = self.choose(candidates, ("old", "new"), "the settings")
        self.settings = {name: settings[run.id] for name, run in chosen.items()}

    def run(
        self,
        name: str,
        setting: Setting,
        seed: int = 0,
        share: float = 0.1,
        *,
        search: bool = False,
        **graft: Any,
    ) -> GraftRun:
        """Return one run, whose id names everything in which it differs from others.

        Args:
            name: name of the row.
            setting: learning rate, and keys of the graft.
            seed: seed of the run.
            share: share of replay in training rows.
            search: train a third of the steps and measure on validation texts.
            graft: other keys of the graft.
        """
        quick = self.options.quick
        values = {**setting, **graft}
        parts = [name, *(f"{key}-{value:g}" for key, value in values.items()), f"p{share:g}", f"s{seed}"]
        if search:
            parts.insert(0, "search")
        rate = values.pop("learning_rate")
        steps = 25 if search else 75
        if quick:
            steps = 3
        return GraftRun(
            id="_".join(parts),
            label=ALL_METHODS[name].label,
            backbone=self.backbone,
            graft=graft_config({**ALL_METHODS[name].graft, **values}),
            data=self._data(share, seed, search),
            training=training_config(
                steps,
                4,
                rate,
                seed,
                warmup_steps=max(steps // 20, 1),
                precision="bf16",
            ),
            evaluation=EvaluationConfig(
                limit_tokens=600 if quick else 6000,
                own_tokens=0,
                decode_prompts=0,
            ),
        )

    def bare(self) -> GraftRun:
        """Return the run of the backbone without a graft."""
        run = self.run("lora", RATE_SETTINGS[0])
        return run.model_copy(update={"id": "backbone", "label": "backbone", "graft": None})

    def every_seed(self, name: str, share: float = 0.1, **graft: Any) -> list[GraftRun]:
        """Return a row's runs at its chosen setting, one for each seed."""
        seeds = self.seeds if name in FIVE_SEEDS else self.seeds[:3]
        return [self.run(name, self.settings[name], seed, share, **graft) for seed in seeds]

    def _data(self, share: float, seed: int, search: bool) -> DataConfig:
        folder = self.options.data
        english = str(folder / ENGLISH)
        french = str(folder / FRENCH)
        if search:
            tests: dict[str, dict[str, Any]] = {
                "old": {"path": str(folder / WIKITEXT)},
                "new": {"path": french, "documents": "27:28"},
            }
        else:
            skipped = 0 if self.options.quick else 150_000
            tests = {
                "old": {"path": english, "documents": "24:25", "skip_characters": skipped},
                "new": {"path": french, "documents": "29:30"},
                "shakespeare": {"path": str(folder / SHAKESPEARE)},
                "bible": {"path": str(folder / BIBLE)},
            }
        return DataConfig(
            new=[SourceConfig(path=french, documents="0:27", limit_characters=3_000_000)],
            old=[SourceConfig(path=english, documents="23:24")],
            replay_fraction=share,
            length=64 if self.options.quick else 256,
            test={name: [SourceConfig(**values, limit_characters=40_000)] for name, values in tests.items()},
            seed=seed,
        )


def run(options: Options) -> Results:
    """Search every row's setting, then run the chosen tables."""
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    study = NeutralResiduesStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    study.search([*METHODS, *(SIGMOID if "sigmoid" in tables else ())])
    groups = groups_of(study, tables)
    runs = {name: runs_of_row for name, (_, runs_of_row) in groups.items()}
    study.execute(all_runs(runs), "the rows")
    rows = [bare.row]
    for name, (label, runs_of_row) in groups.items():
        rows.append(_row(study, name, label, runs_of_row, bare))
    details = _details(study, tables, runs)
    return study.write(
        NAME,
        rows,
        aims=aims(rows, details),
        paper=published(__file__, runs),
        details=details,
        plots=_plots(rows, study, runs),
    )


def groups_of(study: NeutralResiduesStudy, tables: Sequence[str]) -> dict[str, Group]:
    """Return label and runs of every row of the chosen tables."""
    groups: dict[str, Group] = {}
    compared = (NAME, UNGATED, "lora")
    if "factorial" in tables:
        for name, method in METHODS.items():
            groups[name] = (method.label, study.every_seed(name))
    if "frontier" in tables:
        groups.update(frontier(study))
    if "replay" in tables:
        for name, share in product(compared, SHARES):
            label = f"{METHODS[name].label}, p = {share:g}"
            groups[f"{name}-p{share:g}"] = (label, study.every_seed(name, share)[:1])
    if "capacity" in tables:
        for name, size in product(compared, CAPACITIES):
            label = f"{METHODS[name].label}, {size:.0%}"
            groups[f"{name}-c{size:g}"] = (label, study.every_seed(name, capacity=size)[:1])
    if "sigmoid" in tables:
        for name, method in SIGMOID.items():
            groups[name] = (method.label, study.every_seed(name))
    if "alphas" in tables:
        groups.update(alphas(study))
    if "rates" in tables:
        groups.update(rates(study))
    return groups


def alphas(study: NeutralResiduesStudy) -> dict[str, Group]:
    """Return rows of the published form at all alphas of Table 6 and the rate that its search chose."""
    groups = {}
    rate = study.settings[PUBLISHED]["learning_rate"]
    for alpha in ALPHAS:
        setting = {"learning_rate": rate, "alpha": alpha}
        runs = [study.run(PUBLISHED, setting, seed) for seed in study.seeds[:3]]
        groups[f"{PUBLISHED}-table6-alpha{alpha:g}"] = (f"{METHODS[PUBLISHED].label}, alpha {alpha:g}", runs)
    return groups


def rates(study: NeutralResiduesStudy) -> dict[str, Group]:
    """Return the rows of Table 7 at every rate of their searches, with the alpha that the search chose, if any."""
    groups = {}
    for name in BY_RATE:
        for rate in sorted({setting["learning_rate"] for setting in METHODS[name].settings}):
            setting = {**study.settings[name], "learning_rate": rate}
            runs = [study.run(name, setting, seed) for seed in study.seeds[:3]]
            groups[f"{name}-rate{rate:g}"] = (f"{METHODS[name].label}, rate {rate:g}", runs)
    return groups


def frontier(study: NeutralResiduesStudy) -> dict[str, Group]:
    """Return rows with and without the gate at one rate and several alphas, three seeds each."""
    groups = {}
    for name, setting in product((NAME, UNGATED), FRONTIER):
        alpha = setting["alpha"]
        runs = [study.run(name, setting, seed) for seed in study.seeds[:3]]
        groups[f"{name}-alpha{alpha:g}"] = (f"{METHODS[name].label}, alpha {alpha:g}", runs)
    return groups


def _details(
    study: NeutralResiduesStudy,
    tables: Sequence[str],
    runs: Mapping[str, Sequence[GraftRun]],
) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if "factorial" in tables:
        details["factors"] = {}
        for factor, (row, other) in FACTORS.items():
            compared = differences(study, runs[row], runs[other])
            details["factors"][factor] = {**compared, "rows": [row, other]}
    if "frontier" in tables:
        details["gate_at_equal_alpha"] = {}
        for setting in FRONTIER:
            alpha = f"alpha{setting['alpha']:g}"
            compared = differences(study, runs[f"{NAME}-{alpha}"], runs[f"{UNGATED}-{alpha}"])
            details["gate_at_equal_alpha"][alpha] = compared
        details["at_equal_learning"] = at_equal_learning(study, runs)
    details["settings"] = {name: dict(values) for name, values in study.settings.items()}
    details["seconds"] = study.seconds
    details.update(study.evidence(runs))
    return details


def differences(study: Study, ours: Sequence[GraftRun], theirs: Sequence[GraftRun]) -> dict[str, Any]:
    """Return ours minus theirs in every quantity: mean and Student's interval of the paired differences.

    Only seeds that both have are paired.
    """
    compared = {}
    for name in QUANTITIES:
        values = []
        for our_run, their_run in zip(ours, theirs, strict=False):
            difference = metric(study.measured[our_run.id], name) - metric(study.measured[their_run.id], name)
            values.append(difference)
        compared[name] = combine_seeds(values).model_dump()
    return compared


def at_equal_learning(study: Study, runs: Mapping[str, Sequence[GraftRun]]) -> dict[str, Any]:
    """Return forgetting with the gate minus without it where both have learned the same, by seed and with an interval.

    Each row is a path over alpha, interpolated linearly. The rows are compared in the middle of the range of learning
    that both paths reach. Seeds whose paths have no common range are left out.
    """
    compared: dict[str, Any] = {}
    for quantity in QUANTITIES[1:]:
        by_seed = []
        for index in range(len(study.seeds[:3])):
            gated = _path(study, runs, NAME, index, quantity)
            ungated = _path(study, runs, UNGATED, index, quantity)
            low = max(gated[0, 0], ungated[0, 0])
            high = min(gated[0, -1], ungated[0, -1])
            if low < high:
                middle = (low + high) / 2
                ours = float(np.interp(middle, *gated))
                theirs = float(np.interp(middle, *ungated))
                by_seed.append(ours - theirs)
        if by_seed:
            interval = combine_seeds(by_seed).model_dump()
            compared[f"{NAME} - {UNGATED}: {quantity}"] = {**interval, "by_seed": by_seed}
    return compared


def _path(
    study: Study,
    runs: Mapping[str, Sequence[GraftRun]],
    row: str,
    index: int,
    quantity: str,
) -> np.ndarray:
    """Return (2, alphas): the learning of a row, rising, and its value of a quantity, with one seed."""
    points = []
    for name, runs_of_row in runs.items():
        if name.startswith(f"{row}-alpha"):
            measurement = study.measured[runs_of_row[index].id]
            points.append((metric(measurement, "learned"), metric(measurement, quantity)))
    return np.array(sorted(points)).T


def _row(study: Study, name: str, label: str, runs: Sequence[GraftRun], bare: Measurement) -> Row:
    """Return a row over its seeds, with forgetting on texts unlike the replay and the flatness of gating matrices."""
    measurements = [study.measured[run.id] for run in runs]
    losses: dict[str, list[float]] = {}
    for measurement in measurements:
        lost = {}
        for text in UNLIKE:
            lost[f"forgotten_{text}"] = metric(measurement, text) - metric(bare, text)
        lost["forgotten_unlike"] = sum(lost.values()) / len(UNLIKE)
        measurement.add_metrics(lost)
        for quantity, value in lost.items():
            losses.setdefault(quantity, []).append(value)
        spectra = measurement.details.get("statistics", {}).get("spectrum", {})
        for matrices, values in spectra.items():
            measurement.add_metrics({f"flatness_{matrices}": float(np.mean(values))})
    row = over_seeds(measurements, name, label)
    metrics: dict[str, Metric] = dict(row.metrics)
    if len(runs) > 1:
        for quantity, values in losses.items():
            metrics[quantity] = combine_seeds(values)
    return row.model_copy(update={"metrics": metrics})


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """Return the aims: a fifth of the rivals' forgetting, no less learned, and a gate whose interval is below 0."""
    values = numbers_of(rows)
    if "lora" not in values:
        return []
    limits = (
        ("forgotten", "lora", 0.2, operator.le),
        ("forgotten_unlike", "lora", 0.2, operator.le),
        ("forgotten_unlike", "adapter", 0.2, operator.le),
        ("learned", "lora", 1.0, operator.ge),
    )
    shown = []
    for name, other, bound, relation in limits:
        ratio = values[NAME][name] / values[other][name]
        shown.append(aim(f"{name} over {other}'s", name, bound, ratio, relation))
    high = details["factors"]["gate"]["forgotten_unlike"]["high"]
    text = "what the gate changes in forgotten_unlike, high end of its interval"
    shown.append(aim(text, "forgotten_unlike", 0.0, high))
    return shown


def _plots(rows: Sequence[Row], study: Study, runs: Mapping[str, Sequence[GraftRun]]) -> dict[str, Figure]:
    """Return Figure 1, and Figure 3: the spectra of the gating matrices of backbone, gates and adapters."""
    figures = {}
    shown = [row for row in rows if row.id in DRAWN]
    if shown:
        figures["learn-against-forget"] = learn_against_forget(shown)
    spectra: dict[str, Any] = {}
    for name in (NAME, PUBLISHED, UNGATED, "adapter"):
        if name in runs:
            spectrum = study.measured[runs[name][0].id].details["statistics"]["spectrum"]
            spectra["backbone"] = spectrum["backbone"]
            spectra[METHODS[name].label] = spectrum["graft"]
    if spectra:
        figures["spectrum"] = spectrum_plot(spectra)
    return figures

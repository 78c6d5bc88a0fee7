"""English novels, then French: Tables 2, 4, 5, 6 and 7 at a size that two cores can carry.

Every method sees the same rows for the same number of steps. Settings are chosen on validation text (one English
novel's start, two French novels) by one rule, and measured on test text that took no part in any choice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import Options
from experiments.parents import ENGLISH, FRENCH
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, published, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.plots import learn_against_forget
from graftlm.evaluation.plots import spectrum as spectrum_plot
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun
from graftlm.training import TrainingConfig

NAME = "neutral-residues"
TABLES = ("2", "4", "5", "6", "7")
LABELS = {
    "finetune": "fine-tuning",
    "lora": "LoRA on the FFN",
    "adapter": "vanilla adapters",
    "neutral-residues": "neutral residues",
}
# Four learning rates a method, spread like the paper's around what a model of this size takes.
RATES = dict.fromkeys(LABELS, (3e-4, 1e-3, 3e-3, 1e-2)) | {"finetune": (1e-4, 3e-4, 1e-3, 3e-3)}
ALPHAS = (0.0, 0.01, 0.1, 1.0, 10.0, 100.0)
ALPHA_RATE = 3e-3
# Where the learning rate is searched as well: the values of Table 6 at which a short run keeps what it knew.
FINE_ALPHAS = (10.0, 100.0)
GATES: dict[str, dict[str, Any]] = {
    "none-l1": {"gate": "none", "local_loss": "l1"},
    "sigmoid-ce": {"gate": "sigmoid", "local_loss": "cross-entropy"},
    "sigmoid": {"gate": "sigmoid", "local_loss": "none"},
    "relu": {"gate": "relu", "local_loss": "none"},
    "relu-l1": {"gate": "relu", "local_loss": "l1"},
}
INITIALISED = ("none-l1", "sigmoid-ce", "relu-l1")  # the gates of Table 5
FILES = (ENGLISH, FRENCH, "lm_text/tinyshakespeare/input.txt", "parallel/bible/BSB.txt")

DATA = {
    "backbone": "english-novels-4m, pretrained on novels 1 to 23",
    "new": "French novels 1 to 27, the first 3,000,000 characters; novel 28 for validation, 30 for test",
    "old": "English novel 24 for training; novel 25 for validation (its start) and test (from character 150,000)",
    "out of distribution": "Shakespeare, and the Bible in English",
    "scored": "the first 60,000 characters of each, at most 10,000 tokens",
}

Choice = tuple[float, float]  # learning rate, alpha


class NeutralResiduesStudy(Study):
    """The runs of the experiment.

    Attributes:
        choices: the learning rate and alpha that validation text chose, by method.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        name = options.backbone or str(options.data / "models" / "english-novels-4m")
        self.backbone = BackboneConfig(name=name, device=options.device)
        self.rates = {name: rates[1:3] if options.quick else rates for name, rates in RATES.items()}
        self.alphas = (0.01, 10.0) if options.quick else ALPHAS
        self.fine_alphas = FINE_ALPHAS[:1] if options.quick else FINE_ALPHAS
        self.choices: dict[str, Choice] = {}

    def choose(self) -> None:
        """Choose learning rates (and alpha) on validation text, with the first seed and p = 0.1.

        One rule for every method: the lowest sum of old and new log-perplexity, so a nat learned counts as a nat kept.
        """
        seed = self.seeds[0]
        tried = {method: [(rate, 0.0) for rate in self.rates[method]] for method in LABELS}
        tried[NAME] = [(ALPHA_RATE, alpha) for alpha in self.alphas]
        tried[NAME] += [(rate, alpha) for alpha in self.fine_alphas for rate in self.rates[NAME]]
        runs = {m: {choice: self.run(m, choice, 0.1, seed) for choice in choices} for m, choices in tried.items()}
        self.execute([run for by_choice in runs.values() for run in by_choice.values()], "Tables 6 and 7")
        for method, by_choice in runs.items():
            self.choices[method] = min(by_choice, key=lambda choice, of=by_choice: self._validation(of[choice]))
        self.execute(self.rate_runs(NAME), "the rates at the chosen alpha")

    def _validation(self, run: GraftRun) -> float:
        return sum(metric(self.measured[run.id], name) for name in ("validation_old", "validation_new"))

    def main_run(self, method: str, p: float, seed: int) -> GraftRun:
        """A method at its chosen setting."""
        return self.run(method, self.choices[method], p, seed)

    def ablation(self, gate: str, **changes: Any) -> GraftRun:
        """A gate with its loss, and perhaps another initialisation, at the chosen rate and alpha, first seed."""
        if gate == "relu-l1" and not changes:
            return self.main_run(NAME, 0.1, self.seeds[0])
        return self.run(NAME, self.choices[NAME], 0.1, self.seeds[0], **GATES[gate], **changes)

    def rate_runs(self, method: str) -> list[GraftRun]:
        """A method at every learning rate, first seed."""
        alpha = self.choices[method][1]
        return [self.run(method, (rate, alpha), 0.1, self.seeds[0]) for rate in self.rates[method]]

    def table_runs(self, table: str) -> Iterator[tuple[str, str, GraftRun]]:
        """The rows of Tables 4 to 7: id, label and run.

        The paper's four learning rates of Table 7 stand beside ours by rank, since the sizes of the models differ.
        """
        if table == "4":
            yield from ((f"t4-{gate}", gate, self.ablation(gate)) for gate in GATES)
            yield "t4-adapter", "adapter", self.main_run("adapter", 0.1, self.seeds[0])
        elif table == "5":
            for gate in INITIALISED:
                yield f"t5-{gate}-he", f"{gate}, he", self.ablation(gate, init="he")
                yield f"t5-{gate}-low-variance", f"{gate}, low-variance", self.ablation(gate)
        elif table == "6":
            for alpha in self.alphas:
                run = self.run(NAME, (ALPHA_RATE, alpha), 0.1, self.seeds[0])
                yield f"t6-alpha-{alpha:g}", f"alpha {alpha:g}", run
        else:
            for method, label in LABELS.items():
                for rank, run in enumerate(self.rate_runs(method)):
                    yield f"t7-{method}-{rank}", f"{label}, lr {self.rates[method][rank]:g}", run

    def run(self, method: str, choice: Choice, p: float, seed: int, **graft: Any) -> GraftRun:
        """One run; its id says all that sets it apart."""
        rate, alpha = choice
        graft |= {"alpha": alpha} if method == NAME else {}
        parts = [method, f"p{p:g}", f"lr{rate:g}", *(f"{k}-{v}" for k, v in sorted(graft.items())), f"s{seed}"]
        run = self.bare(rate, p, seed)
        start = {"gate_init": "random"} if method == NAME else {}  # as in the paper
        config = graft_config({"kind": method, **start, **graft})
        changes = {"id": "_".join(parts), "label": LABELS[method], "graft": config}
        return run.model_copy(update=changes)

    def bare(self, rate: float = 1e-3, p: float = 0.1, seed: int = 0) -> GraftRun:
        """The backbone's own scores."""
        tokens, decoded = (600, 8) if self.options.quick else (10_000, 32)
        return GraftRun(
            id="backbone",
            backbone=self.backbone,
            data=self._data(p, seed),
            training=self.training(rate, seed),
            evaluation=EvaluationConfig(limit_tokens=tokens, decode_prompts=1, decode_tokens=decoded),
        )

    def training(self, rate: float, seed: int) -> TrainingConfig:
        steps, rows = (4, 4) if self.options.quick else (300, 4)
        return training_config(steps, rows, rate, seed, warmup_steps=min(10, steps // 4), precision="bf16")

    def _data(self, p: float, seed: int) -> DataConfig:
        english, french, shakespeare, bible = (str(self.options.data / name) for name in FILES)
        unseen = {"path": english, "documents": "24:25"}
        some = {"limit_characters": 60_000}
        sets = {
            "old": unseen | some | {"skip_characters": 150_000},
            "new": {"path": french, "documents": "29:30"} | some,
            "shakespeare": {"path": shakespeare} | some,
            "bible": {"path": bible} | some,
            "validation_old": unseen | some,
            "validation_new": {"path": french, "documents": "27:28"} | some,
        }
        return DataConfig(
            new=[SourceConfig(path=french, documents="0:27", limit_characters=3_000_000)],
            old=[SourceConfig(path=english, documents="23:24")],
            replay_fraction=p,
            length=64 if self.options.quick else 256,
            test={name: [SourceConfig.parse(values)] for name, values in sets.items()},
            seed=seed,
        )


def run(options: Options) -> Results:
    """Run the chosen tables."""
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    study = NeutralResiduesStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    study.choose()
    rows = [bare.row]
    if "2" in tables:
        study.execute([study.main_run(m, p, s) for m in LABELS for p in (0.1, 0.0) for s in study.seeds], "Table 2")
        rows += [*main_rows(study, 0.1, ""), *main_rows(study, 0.0, "-p0")]
    for table in TABLES[1:]:
        if table in tables:
            runs = list(study.table_runs(table))
            study.execute([run for _, _, run in runs], f"Table {table}")
            rows += [Row(id=name, label=label, metrics=study.measured[run.id].row.metrics) for name, label, run in runs]
    paper = [
        row for row in published(__file__, {row.id for row in rows}) if row.where != "Table 7" or not options.quick
    ]
    details = _details(study)
    plots = _plots(rows, details, study)
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def main_rows(study: NeutralResiduesStudy, p: float, suffix: str) -> list[Row]:
    """Table 2's rows at one share of old text."""
    runs = {method: [study.main_run(method, p, seed) for seed in study.seeds] for method in LABELS}
    return [
        over_seeds(
            [study.measured[run.id] for run in runs[method]], method + suffix, label + ("" if p else ", no old text")
        )
        for method, label in LABELS.items()
    ]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The aims of Table 2: a fifth of LoRA's and the adapters' forgetting, and no less learned."""
    values = numbers_of(rows)
    if not {NAME, "lora", "adapter"} <= values.keys():
        return []
    limits = (
        ("forgotten", "lora", LABELS["lora"], 0.2, operator.le),
        ("forgotten", "adapter", LABELS["adapter"], 0.2, operator.le),
        ("learned", "lora", "LoRA", 1.0, operator.ge),
    )
    return [
        aim(f"{name} over {label}'s", name, bound, values[NAME][name] / values[other][name], relation)
        for name, other, label, bound, relation in limits
    ]


def _details(study: NeutralResiduesStudy) -> dict[str, Any]:
    seed, measured = study.seeds[0], study.measured
    main = {method: measured[study.main_run(method, 0.1, seed).id] for method in LABELS}
    statistics = {method: measurement.details.get("statistics", {}) for method, measurement in main.items()}
    names = ("validation_old", "validation_new", "forgotten", "learned")
    return {
        "choices": {m: {"learning_rate": rate, "alpha": alpha} for m, (rate, alpha) in study.choices.items()},
        "tuned": {
            run_id: {name: metric(measurement, name) for name in names}
            for run_id, measurement in measured.items()
            if run_id.endswith(f"s{seed}")
        },
        "setting": {"training": study.training(0.001, 0).model_dump(mode="json"), "data": DATA},
        "statistics": {method: values for method, values in statistics.items() if values.get("spectrum")},
        "losses": {method: measurement.details["losses"] for method, measurement in main.items()},
        "paths": {
            method: [[metric(measured[run.id], name) for name in names[2:]] for run in study.rate_runs(method)]
            for method in LABELS
        },
    }


def _plots(rows: Sequence[Row], details: dict[str, Any], study: NeutralResiduesStudy) -> dict[str, Any]:
    """Figure 1, and Figure 3: the gating matrices' spectra of the backbone, each gate and the vanilla adapter."""
    main = [row for row in rows if row.id in LABELS]
    figures = {"learn-against-forget": learn_against_forget(main, details["paths"])} if main else {}
    statistics = {name: values["spectrum"] for name, values in details["statistics"].items()}
    for gate in GATES:
        measurement = study.measured.get(study.ablation(gate).id)
        if measurement and gate not in ("relu", "relu-l1"):
            statistics[gate] = measurement.details["statistics"]["spectrum"]
    if statistics:
        backbone = next(iter(statistics.values()))["backbone"]
        spectra: dict[str, Any] = {str(LABELS.get(name, name)): values["graft"] for name, values in statistics.items()}
        figures["spectrum"] = spectrum_plot({"backbone": backbone} | spectra)
    return figures

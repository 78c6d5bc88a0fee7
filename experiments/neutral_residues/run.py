"""English novels, then French: Tables 2, 4, 5, 6 and 7 at a size that two cores can carry.

Every method sees the same rows for the same number of steps. Settings are chosen on validation text (one English
novel's start, two French novels) by one rule, and measured on test text that took no part in any choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Options
from experiments.cells import metric, over_seeds
from experiments.composed import check_files
from experiments.neutral_residues import paper
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, PaperRow, Results, Row, value_of
from graftlm.evaluation.plots import learn_against_forget
from graftlm.evaluation.plots import spectrum as spectrum_plot
from graftlm.evaluation.report import write_report
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun
from graftlm.runs.run import Measurement, execute
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
RATES = {
    "finetune": (1e-4, 3e-4, 1e-3, 3e-3),
    "lora": (3e-4, 1e-3, 3e-3, 1e-2),
    "adapter": (3e-4, 1e-3, 3e-3, 1e-2),
    "neutral-residues": (3e-4, 1e-3, 3e-3, 1e-2),
}
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
FILES = (
    "lm_text/eltec_eng.jsonl",
    "lm_text/eltec_fra.jsonl",
    "lm_text/tinyshakespeare/input.txt",
    "parallel/bible/BSB.txt",
)

Choice = tuple[float, float]  # learning rate, alpha
Cells = dict[str, Measurement]


class Plan:
    """Which cells there are, and what they have in common."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.backbone = BackboneConfig(
            name=options.backbone or str(options.data / "models" / "english-novels-4m"), device=options.device
        )
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.rates = {name: rates[1:3] if options.quick else rates for name, rates in RATES.items()}
        self.alphas = (0.01, 10.0) if options.quick else ALPHAS
        self.fine_alphas = FINE_ALPHAS[:1] if options.quick else FINE_ALPHAS

    def cell(self, method: str, rate: float, p: float, seed: int, **graft: Any) -> GraftRun:
        """One run; its id says all that sets it apart."""
        parts = [method, f"p{p:g}", f"lr{rate:g}", *(f"{k}-{v}" for k, v in sorted(graft.items())), f"s{seed}"]
        return GraftRun(
            id="_".join(parts),
            label=LABELS.get(method, method),
            backbone=self.backbone,
            graft=graft_config({"kind": method, **graft}),
            data=self._data(p, seed),
            training=self._training(rate, seed),
            evaluation=self._evaluation(),
        )

    def bare(self) -> GraftRun:
        """The backbone's own scores."""
        return GraftRun(
            id="backbone",
            backbone=self.backbone,
            data=self._data(0.1, 0),
            training=self._training(1e-3, 0),
            evaluation=self._evaluation(),
        )

    def run(self, cells: Sequence[GraftRun], title: str) -> Cells:
        return execute(cells, self.options.out / "runs", jobs=self.options.jobs, title=title)

    def _training(self, rate: float, seed: int) -> TrainingConfig:
        steps, rows = (4, 4) if self.options.quick else (300, 4)
        return TrainingConfig(
            steps=steps,
            batch_size=rows,
            learning_rate=rate,
            warmup_steps=min(10, steps // 4),
            precision="bf16",
            seed=seed,
            checkpoint_every=steps,
            keep_checkpoints=1,
        )

    def _evaluation(self) -> EvaluationConfig:
        tokens, decoded = (600, 8) if self.options.quick else (10_000, 32)
        return EvaluationConfig(limit_tokens=tokens, decode_prompts=1, decode_tokens=decoded)

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
    """Run the asked tables and write `results.json`, `report.md` and plots.

    Raises:
        DataError: the data folder lacks a file.
        RecipeError: there is no such table.
    """
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    plan = Plan(options)
    bare = plan.run([plan.bare()], "the backbone")["backbone"]
    tuning, choices = tune(plan)
    rows, paper_rows, cells = [bare.row], [], dict(tuning)
    if "2" in tables:
        cells |= plan.run(main_cells(plan, choices), "Table 2")
        rows += [*main_rows(plan, cells, choices, 0.1, ""), *main_rows(plan, cells, choices, 0.0, "-p0")]
        paper_rows += _paper_table_2()
    if "4" in tables or "5" in tables:
        cells |= plan.run(ablation_cells(plan, choices), "Tables 4 and 5")
    for table, build in (("4", table_4), ("5", table_5), ("6", table_6), ("7", table_7)):
        if table in tables:
            more, published = build(plan, cells, choices)
            rows += more
            paper_rows += published
    details = _details(plan, cells, choices)
    results = Results.here(NAME, rows, seeds=plan.seeds, aims=aims(rows), paper=paper_rows, details=details)
    write_report(results, options.out, plots=_plots(rows, details, plan, cells, choices))
    return results


def tune(plan: Plan) -> tuple[Cells, dict[str, Choice]]:
    """Choose learning rates (and alpha) on validation text, with the first seed and p = 0.1.

    One rule for every method: the lowest sum of old and new log-perplexity, so a nat learned counts as a nat kept.
    """
    seed = plan.seeds[0]
    settings = {m: {(rate, 0.0): plan.cell(m, rate, 0.1, seed) for rate in plan.rates[m]} for m in LABELS if m != NAME}
    pairs = [(ALPHA_RATE, alpha) for alpha in plan.alphas]
    pairs += [(rate, alpha) for alpha in plan.fine_alphas for rate in plan.rates[NAME]]
    settings[NAME] = {(rate, alpha): plan.cell(NAME, rate, 0.1, seed, alpha=alpha) for rate, alpha in pairs}
    cells = plan.run([cell for of_method in settings.values() for cell in of_method.values()], "Tables 6 and 7")

    def log_perplexities(cell: GraftRun) -> float:
        return metric(cells[cell.id], "validation_old") + metric(cells[cell.id], "validation_new")

    choices = {m: min(cells_of, key=lambda key: log_perplexities(cells_of[key])) for m, cells_of in settings.items()}
    return cells | plan.run(_rate_cells(plan, NAME, choices), "the rates at the chosen alpha"), choices


def main_cell(plan: Plan, choices: Mapping[str, Choice], method: str, p: float, seed: int) -> GraftRun:
    """The cell of one method at its chosen setting."""
    rate, alpha = choices[method]
    return plan.cell(method, rate, p, seed, **({"alpha": alpha} if method == NAME else {}))


def main_cells(plan: Plan, choices: Mapping[str, Choice]) -> list[GraftRun]:
    """Table 2: every method, with and without old text, for every seed."""
    return [main_cell(plan, choices, m, p, s) for m in LABELS for p in (0.1, 0.0) for s in plan.seeds]


def main_rows(plan: Plan, cells: Cells, choices: Mapping[str, Choice], p: float, suffix: str) -> list[Row]:
    """Table 2's rows at one share of old text."""
    label = "" if p else ", no old text"
    return [
        over_seeds([cells[main_cell(plan, choices, m, p, s).id] for s in plan.seeds], m + suffix, LABELS[m] + label)
        for m in LABELS
    ]


def _ablation(plan: Plan, choices: Mapping[str, Choice], gate: str, init: str) -> GraftRun:
    rate, alpha = choices[NAME]
    more = {} if init == "low-variance" else {"init": init}
    if gate == "relu-l1" and not more:
        return plan.cell(NAME, rate, 0.1, plan.seeds[0], alpha=alpha)
    return plan.cell(NAME, rate, 0.1, plan.seeds[0], alpha=alpha, **GATES[gate], **more)


def ablation_cells(plan: Plan, choices: Mapping[str, Choice]) -> list[GraftRun]:
    """Tables 4 and 5: gates with their losses, and both initialisations, at the chosen rate and alpha, first seed."""
    gates = [_ablation(plan, choices, gate, "low-variance") for gate in GATES]
    return gates + [_ablation(plan, choices, gate, "he") for gate in paper.TABLE_5]


def table_4(plan: Plan, cells: Cells, choices: Mapping[str, Choice]) -> tuple[list[Row], list[PaperRow]]:
    """Gate and local loss."""
    rows = [_relabelled(cells[_ablation(plan, choices, g, "low-variance").id], f"t4-{g}", g) for g in GATES]
    rows.append(_relabelled(cells[main_cell(plan, choices, "adapter", 0.1, plan.seeds[0]).id], "t4-adapter", "adapter"))
    return rows, [paper.row(f"t4-{name}", pair, "Table 4") for name, pair in paper.TABLE_4.items()]


def table_5(plan: Plan, cells: Cells, choices: Mapping[str, Choice]) -> tuple[list[Row], list[PaperRow]]:
    """Initialisation."""
    rows, published = [], []
    for gate, pairs in paper.TABLE_5.items():
        for init, pair in zip(("he", "low-variance"), pairs, strict=True):
            row_id = f"t5-{gate}-{init}"
            rows.append(_relabelled(cells[_ablation(plan, choices, gate, init).id], row_id, f"{gate}, {init}"))
            published.append(paper.row(row_id, pair, "Table 5"))
    return rows, published


def table_6(plan: Plan, cells: Cells, choices: Mapping[str, Choice]) -> tuple[list[Row], list[PaperRow]]:
    """Alpha, at the first learning rate tried."""
    seed = plan.seeds[0]
    cell = {a: plan.cell(NAME, ALPHA_RATE, 0.1, seed, alpha=a) for a in plan.alphas}
    rows = [_relabelled(cells[cell[a].id], f"t6-alpha-{a:g}", f"alpha {a:g}") for a in plan.alphas]
    return rows, [paper.row(f"t6-alpha-{a:g}", pair, "Table 6") for a, pair in paper.TABLE_6.items()]


def table_7(plan: Plan, cells: Cells, choices: Mapping[str, Choice]) -> tuple[list[Row], list[PaperRow]]:
    """Learning rates; the paper's four stand beside ours by rank, since the sizes of the models differ."""
    rows, published = [], []
    for method in LABELS:
        for rank, cell in enumerate(_rate_cells(plan, method, choices)):
            row_id = f"t7-{method}-{rank}"
            rows.append(_relabelled(cells[cell.id], row_id, f"{LABELS[method]}, lr {plan.rates[method][rank]:g}"))
            if not plan.options.quick:
                published.append(paper.row(row_id, paper.TABLE_7[method][rank], "Table 7"))
    return rows, published


def _rate_cells(plan: Plan, method: str, choices: Mapping[str, Choice]) -> list[GraftRun]:
    more = {"alpha": choices[NAME][1]} if method == NAME else {}
    return [plan.cell(method, rate, 0.1, plan.seeds[0], **more) for rate in plan.rates[method]]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """What the issue asks of Table 2: a fifth of LoRA's and the adapters' forgetting, and no less learned."""
    by_id = {row.id: row for row in rows}
    if not {NAME, "lora", "adapter"} <= by_id.keys():
        return []

    def ratio(name: str, other: str) -> float:
        return value_of(by_id[NAME].metrics[name]) / value_of(by_id[other].metrics[name])

    forgotten = [
        (f"forgotten over {LABELS[o]}'s", "forgotten", 0.2, ratio("forgotten", o)) for o in ("lora", "adapter")
    ]
    found = [Aim(text=t, metric=m, aim=a, measured=v, met=v <= a) for t, m, a, v in forgotten]
    learned = ratio("learned", "lora")
    return [*found, Aim(text="learned over LoRA's", metric="learned", aim=1.0, measured=learned, met=learned >= 1)]


def _details(plan: Plan, cells: Cells, choices: Mapping[str, Choice]) -> dict[str, Any]:
    seed = plan.seeds[0]
    chosen = {m: main_cell(plan, choices, m, 0.1, seed) for m in LABELS}
    statistics = {m: cells[c.id].details.get("statistics", {}) for m, c in chosen.items()}
    return {
        "choices": {m: {"learning_rate": rate, "alpha": alpha} for m, (rate, alpha) in choices.items()},
        "tuned": {
            cell_id: {name: metric(one, name) for name in ("validation_old", "validation_new", "forgotten", "learned")}
            for cell_id, one in cells.items()
            if cell_id.endswith(f"s{seed}")
        },
        "setting": {"training": plan._training(0.001, 0).model_dump(mode="json"), "data": _data_in_words()},
        "statistics": {m: values for m, values in statistics.items() if values.get("spectrum")},
        "losses": {m: cells[c.id].details["losses"] for m, c in chosen.items()},
        "paths": {
            m: [
                [metric(cells[c.id], "forgotten"), metric(cells[c.id], "learned")]
                for c in _rate_cells(plan, m, choices)
            ]
            for m in LABELS
        },
    }


def _data_in_words() -> dict[str, str]:
    return {
        "backbone": "english-novels-4m, pretrained on novels 1 to 23",
        "new": "French novels 1 to 27, the first 3,000,000 characters; novel 28 for validation, 30 for test",
        "old": "English novel 24 for training; novel 25 for validation (its start) and test (from character 150,000)",
        "out of distribution": "Shakespeare, and the Bible in English",
        "scored": "the first 60,000 characters of each, at most 10,000 tokens",
    }


def _plots(
    rows: Sequence[Row], details: dict[str, Any], plan: Plan, cells: Cells, choices: Mapping[str, Choice]
) -> dict[str, Any]:
    """Figure 1, and Figure 3: the gating matrices' spectra of the backbone, each gate and the vanilla adapter."""
    main = [row for row in rows if row.id in LABELS]
    figures = {"learn-against-forget": learn_against_forget(main, details["paths"])} if main else {}
    statistics = {name: found["spectrum"] for name, found in details["statistics"].items()}
    for gate in GATES:
        found = cells.get(_ablation(plan, choices, gate, "low-variance").id)
        if found and gate not in ("relu", "relu-l1"):
            statistics[gate] = found.details["statistics"]["spectrum"]
    if statistics:
        backbone = next(iter(statistics.values()))["backbone"]
        spectra: dict[str, Any] = {str(LABELS.get(name, name)): found["graft"] for name, found in statistics.items()}
        figures["spectrum"] = spectrum_plot({"backbone": backbone} | spectra)
    return figures


def _relabelled(measured: Measurement, row_id: str, label: str) -> Row:
    return Row(id=row_id, label=label, metrics=measured.row.metrics)


def _paper_table_2() -> list[PaperRow]:
    rows = [paper.row("backbone", paper.BACKBONE, "Table 1")]
    for method, (with_old, without) in paper.TABLE_2.items():
        rows += [paper.row(method, with_old, "Table 2"), paper.row(f"{method}-p0", without, "Table 2")]
    return rows

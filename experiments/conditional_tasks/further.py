"""What stands beside the main table: a task that is added later, more and more tasks, how alike their inputs lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.conditional_tasks.cell import GRAFT, Cell
from experiments.conditional_tasks.plan import Choices, Measured, Plan, average, scores
from experiments.conditional_tasks.setting import MODULES, OFF
from experiments.conditional_tasks.texts import TASKS
from graftlm.evaluation import Metric, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE

FEW = {
    "few_added": "added to a trained graft: its embedding and its head train",
    "few_finetune": "fine-tuning of the encoder",
}
COUNTED = ("multi_task", "ca_mtl")
COUNT_LABELS = {"multi_task": "multi-task fine-tuning", "ca_mtl": "all modules, MT-Uncertainty"}


def few(plan: Plan, choices: Choices) -> list[Row]:
    """A held-out task from more and more of its rows, with the first seed: added to a graft of all others, or alone.

    Both take as many steps; the learning rate of an addition is chosen by validation rows at the largest share.
    """
    seed = plan.seeds[0]
    base = few_base(plan, choices, seed)
    plan.run([base], "the graft to add to")
    rate = added_rate(plan, base, seed)
    cells = {name: few_cells(plan, base, name, rate, choices["single_task"], seed) for name in FEW}
    found = plan.run([cell for of in cells.values() for cell in of.values()], "few rows")
    metrics: dict[str, dict[str, Metric]] = {
        name: {f"score_{share}": average(found, [cell], "test") for share, cell in of.items()}
        for name, of in cells.items()
    }
    unlike = sum(found[cell.id]["old_changed"] for cell in cells["few_added"].values())
    metrics["few_added"] |= {"old_changed": unlike, "learning_rate": rate}
    return [Row(id=name, label=label, metrics=metrics[name]) for name, label in FEW.items()]


def few_base(plan: Plan, choices: Choices, seed: int) -> Cell:
    """The graft of all tasks but the held-out one, uniformly sampled."""
    tasks = [task for task in TASKS if task != plan.setting.held_out]
    graft = MODULES["+alignment_cln"]
    return plan.cell("few_base", tasks, graft, choices["+alignment_cln"], seed, parts=("validation",), kept=True)


def added_rate(plan: Plan, base: Cell, seed: int) -> float:
    """The learning rate of an addition, by the validation rows of the largest share."""
    share = max(plan.setting.shares, key=lambda share: plan.setting.shares[share])
    tried = {
        rate: few_cell(plan, base, "few_added", share, rate, seed, prefix="try_") for rate in plan.setting.added_rates
    }
    measured = plan.run(list(tried.values()), "rates of an addition")
    return max(tried, key=lambda rate: average(measured, [tried[rate]], "validation"))


def few_cells(plan: Plan, base: Cell, name: str, added: float, alone: float, seed: int) -> dict[str, Cell]:
    """The cells of a row by share."""
    rate = added if name == "few_added" else alone
    return {share: few_cell(plan, base, name, share, rate, seed) for share in plan.setting.shares}


def few_cell(plan: Plan, base: Cell, name: str, share: str, rate: float, seed: int, prefix: str = "") -> Cell:
    """One share of the held-out task's rows, each part of the next larger."""
    s = plan.setting
    files = {s.held_out: plan.pool(share, seed)}
    more = {"tasks": files, "steps": s.shares[share]}
    if name == "few_finetune":
        return plan.cell(f"{name}_{share}", [s.held_out], OFF | {"frozen": 0}, rate, seed, **more)
    graft = {"extends": str(plan.out / base.id / GRAFT)}
    if prefix:
        more["parts"] = ("validation",)
    # The key of the graft that is extended stands in the name, so that another one is another cell.
    label = f"{prefix}{name}_{share}_{base.key()[:8]}"
    return plan.cell(label, [s.held_out], graft, rate, seed, **more, old=base.tasks)


def count(plan: Plan, choices: Choices, main: Measured) -> list[Row]:
    """The first tasks alone, more and more, with the first seed: the average over all, and over those always there."""
    rows, always = [], list(TASKS)[: plan.setting.counts[0]]
    for row in COUNTED:
        for tasks in plan.setting.counts:
            whole = tasks == len(TASKS)
            names, prefix = list(TASKS)[:tasks], "" if whole else f"count{tasks}_"
            cells = plan.row(row, choices[row], plan.seeds[0], names, prefix=prefix)
            said = scores(main if whole else plan.run(cells, f"{tasks} tasks"), cells, "test")
            metrics: dict[str, Metric] = {
                "average": mean(said.values()),
                "average_first": mean(said[task] for task in always),
            }
            rows.append(Row(id=f"{row}_{tasks}", label=f"{COUNT_LABELS[row]}, {tasks} tasks", metrics=metrics))
    return rows


def similarity(plan: Plan, choices: Choices, main: Measured) -> list[Row]:
    """Covariance similarity of each task's inputs to the other tasks', and its score over single-task fine-tuning."""
    rows = []
    for row in COUNTED:
        of_seeds = []
        for seed in plan.seeds:
            alone = scores(main, plan.row("single_task", choices["single_task"], seed), "test")
            (cell,) = plan.row(row, choices[row], seed)
            said, alike = scores(main, [cell], "test"), main[cell.id]["similarity"]
            metrics = {f"similarity_{task}": alike[task] for task in TASKS}
            metrics |= {f"gain_{task}": said[task] - alone[task] for task in TASKS}
            of_seeds.append(metrics | {"similarity": mean(alike.values())})
        rows.append(Row(id=f"{row}_similarity", label=f"{COUNT_LABELS[row]}: inputs", metrics=_combined(of_seeds)))
    return rows


def _combined(of_seeds: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Over seeds; of one seed plain numbers."""
    if len(of_seeds) == 1:
        return dict(of_seeds[0])
    return {name: combine_seeds([one[name] for one in of_seeds]) for name in of_seeds[0]}


def draw_few(rows: Sequence[Row]) -> Figure:
    """Score by share of the rows."""
    figure, axes = _figure("share of the held-out task's rows", "score")
    for number, row in enumerate(rows):
        shares = [name.removeprefix("score_") for name in row.metrics if name.startswith("score_")]
        _line(axes, shares, [value_of(row.metrics[f"score_{share}"]) for share in shares], row.label, number)
    axes.legend(frameon=False)
    return figure


def draw_count(rows: Sequence[Row]) -> Figure:
    """Average by number of tasks."""
    figure, axes = _figure("tasks", "average over the first tasks")
    for number, (row, label) in enumerate(COUNT_LABELS.items()):
        shown = [one for one in rows if one.id.removeprefix(row)[1:].isdigit()]
        values = [value_of(one.metrics["average_first"]) for one in shown]
        _line(axes, [one.id.rpartition("_")[2] for one in shown], values, label, number)
    axes.legend(frameon=False)
    return figure


def draw_similarity(rows: Sequence[Row]) -> Figure:
    """Each task's gain over single-task fine-tuning by its covariance similarity."""
    figure, axes = _figure("covariance similarity to the other tasks", "score over single-task fine-tuning's")
    axes.axhline(0, color="#8A8A8A", linewidth=0.9)
    for number, row in enumerate(rows):
        alike = [value_of(row.metrics[f"similarity_{task}"]) for task in TASKS]
        gains = [value_of(row.metrics[f"gain_{task}"]) for task in TASKS]
        axes.plot(alike, gains, MARKERS[number], color=PALETTE[number], label=row.label)
        for task, x, y in zip(TASKS, alike, gains, strict=True):
            axes.annotate(task, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.legend(frameon=False)
    return figure


def _line(axes: Axes, places: Sequence[str], values: Sequence[float], label: str, number: int) -> None:
    axes.plot(places, values, MARKERS[number] + "-", color=PALETTE[number], label=label)


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes

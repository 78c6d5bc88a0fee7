"""Six rows whose training is long enough: rates and numbers of steps are searched to an interior best.

The validation rows stop the training: the number of steps is the best of a ladder that extends as long as its best rung
is at an edge. The comparisons were declared before the run. An item of a comparison is a task with its score.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import mean
from typing import Any

from experiments import Options
from experiments.conditional_tasks.corpora import TASKS
from experiments.conditional_tasks.probe import TextEmbedder, probe_scores
from experiments.conditional_tasks.rows import LABELS, TRAINED
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.conditional_tasks.study import FULL, QUICK, SEARCH_SEED, ConditionalTasksStudy
from experiments.protocol import (
    Comparison,
    Condition,
    Evidence,
    RateSearch,
    conditions,
    decide,
    described,
    search_rate,
)
from experiments.study import all_runs
from graftlm.evaluation import Metric, Results, Row, combine_seeds

NAME = "conditional-tasks"
ROWS = ("single_task", "multi_task", "ca_mtl", "lora_per_task", "lora")
RIDGE = "ridge"
SEEDS = (11, 12, 13)
"""The seeds of the declared comparisons. No row of this experiment was measured with them before."""
RATES = (3e-4, 6e-4, 1.2e-3)
STEPS = (250, 500, 1000)
DOUBLINGS = 2
"""How often the longest training may be doubled."""
DECLARED = (
    Comparison("ca_mtl", "single_task", "score"),
    Comparison("ca_mtl", "multi_task", "score"),
    Comparison("lora_per_task", "ca_mtl", "score"),
)
"""The primary comparisons, which the README lists."""

SIZE = FULL.model_copy(
    update={
        "train": 500,
        "by_question": True,
        "test": 2000,
        "training": FULL.training.model_copy(update={"batch_size": 32}),
    }
)


class TrainedStudy(ConditionalTasksStudy):
    """The runs of the table.

    Attributes:
        rate_searches: the search of each row's rate, with the smallest number of steps.
        step_searches: the search of each row's number of steps, with its best rate.
        embedder: returns the vectors that ridge regression reads.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.size = QUICK if options.quick else SIZE
        if "seeds" not in options.model_fields_set:
            self.seeds = SEEDS[:1] if options.quick else SEEDS
        self.rate_searches: dict[str, RateSearch] = {}
        self.step_searches: dict[str, RateSearch] = {}
        self.embedder = TextEmbedder(self)

    def trained_runs(self, row: str, seed: int, rate: float, steps: int) -> list[ConditionalTasksRun]:
        """Return the runs of a row with a number of steps, that of all tasks together."""
        runs = []
        for run in self.row_runs(row, seed, rate):
            own = max(1, steps * len(run.tasks) // len(TASKS))
            changes = {"steps": own, "checkpoint_every": own, "warmup_steps": max(1, own // 10)}
            training = run.training.model_copy(update=changes)
            runs.append(run.model_copy(update={"id": f"{run.id}_{steps}steps", "training": training}))
        return runs

    def search(self) -> None:
        """Search the rate of every row, and then its number of steps, by the mean score on the validation rows."""
        quick = self.options.quick
        rates = RATES[:1] if quick else RATES
        rungs = (self.size.training.steps,) if quick else STEPS
        first = [run for row in ROWS for rate in rates for run in self.tried(row, rate, rungs[0])]
        self.execute(first, "search of rates")
        for row in ROWS:
            self.rate_searches[row] = search_rate(
                partial(self.validation_score, row, steps=rungs[0]),
                rates,
                limit=1 if quick else 6,
            )
        best = {row: search.best for row, search in self.rate_searches.items()}
        at_best = [run for row in ROWS for steps in rungs for run in self.tried(row, best[row], steps)]
        self.execute(at_best, "search of steps")
        for row in ROWS:
            self.step_searches[row] = search_rate(
                partial(self.validation_score, row, best[row]),
                rungs,
                limit=1 if quick else len(STEPS) + DOUBLINGS,
            )

    def tried(self, row: str, rate: float, steps: float) -> list[ConditionalTasksRun]:
        """Return the runs of a row in a search, which read no test rows."""
        runs = []
        for run in self.trained_runs(row, SEARCH_SEED, rate, round(steps)):
            tasks = {name: task.model_copy(update={"test": task.validation}) for name, task in run.tasks.items()}
            runs.append(run.model_copy(update={"id": f"search_{run.id}", "tasks": tasks}))
        return runs

    def validation_score(self, row: str, rate: float, steps: float) -> float:
        """Return the mean score of all tasks on the validation rows, as a share."""
        runs = self.tried(row, rate, steps)
        self.execute(runs, f"search of {row}")
        return mean(self.scores(runs, "validation").values()) / 100

    def chosen_runs(self, row: str, seed: int) -> list[ConditionalTasksRun]:
        """Return the runs of a row with its best rate and number of steps."""
        return self.trained_runs(row, seed, self.rate_searches[row].best, round(self.step_searches[row].best))

    def measure(self, seed: int) -> dict[str, dict[str, float]]:
        """Return the scores of all tasks by row, as shares."""
        runs = {row: self.chosen_runs(row, seed) for row in ROWS}
        self.execute(all_runs(runs), f"seed {seed}")
        measured = {}
        for row, of_row in runs.items():
            measured[row] = {task: score / 100 for task, score in self.scores(of_row).items()}
        return measured

    def measure_ridge(self, seed: int) -> dict[str, float]:
        """Return the scores of ridge regression by task, as shares."""
        found = probe_scores(self, seed, self.embedder)
        return {task: found[task] / 100 for task in TASKS if task in found}


def run_trained(options: Options) -> Results:
    """Search and measure all rows; the results are written after each seed, in a folder of their own."""
    study = TrainedStudy(options.model_copy(update={"out": options.out / TRAINED}))
    scores: dict[str, dict[int, dict[str, float]]] = {row: {} for row in (RIDGE, *ROWS)}
    study.search()
    results = None
    for seed in study.seeds:
        scores[RIDGE][seed] = study.measure_ridge(seed)
        for row, of_row in study.measure(seed).items():
            scores[row][seed] = of_row
        results = _write(study, scores)
    assert results is not None, "there are seeds"
    return results


def _write(study: TrainedStudy, scores: dict[str, dict[int, dict[str, float]]]) -> Results:
    rows = [_row(name, by_seed) for name, by_seed in scores.items()]
    items = {name: {seed: {"score": of_seed} for seed, of_seed in by_seed.items()} for name, by_seed in scores.items()}
    evidence = Evidence(
        nats={},
        bigram_nats=0.0,
        searches=study.rate_searches,
        declared=DECLARED,
        decisions=decide(DECLARED, items),
    )
    *_, searched, declared = conditions(evidence)
    judged = [_beats_ridge(scores), _stopped(study), searched, declared]
    decided = all(condition.met for condition in judged)
    details: dict[str, Any] = {
        "seconds": study.seconds,
        "rates": {row: search.scores for row, search in study.rate_searches.items()},
        "steps": {row: search.scores for row, search in study.step_searches.items()},
        "conditions": [asdict(condition) for condition in judged],
        "comparisons": [described(decision, is_decided=decided) for decision in evidence.decisions],
        "by_seed": {name: list(by_seed.values()) for name, by_seed in scores.items()},
    }
    return study.write(NAME, rows, seeds=study.seeds, details=_with_text_keys(details))


def _row(name: str, by_seed: dict[int, dict[str, float]]) -> Row:
    """Return a row with points of all tasks, their average, and the average without tagging."""
    label = "ridge regression on the bare encoder's states" if name == RIDGE else LABELS[name]
    metrics: dict[str, Metric] = {}
    for task in next(iter(by_seed.values())):
        metrics[task] = combine_seeds([100 * of_seed[task] for of_seed in by_seed.values()])
    metrics["average_without_tagging"] = combine_seeds([100 * without_tagging(each) for each in by_seed.values()])
    if name != RIDGE:
        metrics["average"] = combine_seeds([100 * mean(of_seed.values()) for of_seed in by_seed.values()])
    return Row(id=name, label=label, metrics=metrics)


def without_tagging(scores: dict[str, float]) -> float:
    """Return the mean score of all tasks but tagging, which ridge regression does not do."""
    return mean(score for task, score in scores.items() if TASKS[task].type != "tagging")


def _beats_ridge(scores: dict[str, dict[int, dict[str, float]]]) -> Condition:
    averages = {name: mean(without_tagging(each) for each in by_seed.values()) for name, by_seed in scores.items()}
    ridge = averages.pop(RIDGE)
    worse = [name for name, average in averages.items() if average <= ridge]
    figures = f"ridge {ridge:.3f}, rows {min(averages.values()):.3f} to {max(averages.values()):.3f}"
    reason = f"{figures}; not better: {', '.join(worse)}" if worse else figures
    return Condition("every trained row beats ridge regression", not worse, reason)


def _stopped(study: TrainedStudy) -> Condition:
    """Return whether every row has its best number of steps inside the range that was tried."""
    at_edge = [row for row, search in study.step_searches.items() if not search.is_interior]
    best = ", ".join(f"{row} {search.best:g}" for row, search in study.step_searches.items())
    reason = f"at an edge: {', '.join(at_edge)}" if at_edge else best
    return Condition("every row is trained to its end on the validation rows", not at_edge, reason)


def _with_text_keys(details: dict[str, Any]) -> dict[str, Any]:
    """Return details in which the scores of searches have texts as keys."""
    for name in ("rates", "steps"):
        for row, scores in details[name].items():
            details[name][row] = {f"{value:g}": round(score, 4) for value, score in scores.items()}
    return details

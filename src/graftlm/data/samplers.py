"""Task samplers: which rows of which tasks make the next batch.

For T tasks with D_t rows, and H the entropy of a prediction in nats; numbers have a stand-in of at most log 2:

    uniform       q(t) = 1 / T
    size          q(t) = D_t / sum of D_s
    temperature   q(t) = D_t^alpha / sum of D_s^alpha                                                      (eq. 1.7)
    entropy       q(t) = H_t^beta / sum of H_s^beta, H_t the mean entropy of the task's latest predictions (eq. 1.8)
    uncertainty   of some candidates of each task the b rows of the largest H / H'_t, H'_t = log C_t       (algorithm 1)
    learnability  the same by 4 p (1 - p) over the task's mean of it, p the probability of what is right

A sampler does not know the model: it names rows, and is given entropies or scores. Each task's rows are shuffled anew
in every epoch. All choices follow from the seed and what is given. A step calls `candidates`, then `choose` with their
scores, then, under policy entropy, `observe`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.errors import DataError

_TASKS, _ROWS = 1, 2  # keep random numbers for tasks apart from those for rows
SCORED = ("uncertainty", "learnability")


class SamplerConfig(Config):
    """How rows are chosen.

    Args:
        alpha: for `temperature`: 0 is uniform, 1 is by size.
        beta: for `entropy`: larger values prefer uncertain tasks more.
        task_mean: for `uncertainty`: multiply a row's uncertainty by its task's mean over the largest task's mean.
            Algorithm 1 only divides by the largest mean, which is the same for all rows and changes no choice.
        fixed: for policies with scores: the share in every batch of tasks whose rows have no score.
        floor: for policies with scores: the share of uniform sampling that every task gets at least, by its own scores.
        passes: for policies with scores: how often each row is a candidate in all steps; null takes b candidates of
            each task in every step, as algorithm 1 does.
        keep: for policies with scores: a row's score serves this many steps; 0 scores every candidate anew.
    """

    policy: Literal["uniform", "size", "temperature", "entropy", "uncertainty", "learnability"] = "uniform"
    alpha: float = Field(0.5, ge=0, le=1)
    beta: float = Field(1.0, gt=0)
    task_mean: bool = False
    fixed: dict[str, float] = {}
    floor: float = Field(0.0, ge=0, le=1)
    passes: float | None = Field(None, gt=0)
    keep: int = Field(0, ge=0)


class Pick(NamedTuple):
    """One row of one task."""

    task: str
    row: int


class TaskSampler:
    """Endless batches of `batch_size` rows, b above, of tasks with `sizes` rows; `steps` are those of the whole run.

    Raises DataError if a task has no rows, a fixed share does not fit, or candidates are fewer than rows to choose.
    """

    def __init__(
        self, sizes: Mapping[str, int], config: SamplerConfig, batch_size: int, seed: int = 0, steps: int | None = None
    ) -> None:
        _check(sizes, config, batch_size, steps)
        self.sizes, self.config, self.batch_size, self.seed = dict(sizes), config, batch_size, seed
        self.step = 0
        self._drawn = dict.fromkeys(sizes, 0)
        self._entropy: dict[str, float] = {}
        self._used = {task: np.zeros(size, dtype=bool) for task, size in sizes.items()}
        self._history: list[dict[str, int]] = []
        self._candidates: list[Pick] = []
        self._steps, self._scored = steps, 0
        self._scores = {task: np.zeros(size) for task, size in sizes.items()}
        self._scored_at = {task: np.full(size, -1, dtype=np.int32) for task, size in sizes.items()}  # -1: never
        self._of_rows: tuple[dict[str, np.ndarray], ...] = (self._used, self._scores, self._scored_at)

    def candidates(self) -> list[Pick]:
        """The rows whose score `choose` needs: the candidates without one that may serve; none without scores."""
        if self.config.policy in SCORED and not self._candidates:
            free = [task for task in self.sizes if task not in self.config.fixed]
            self._candidates = [pick for task in free for pick in self._draw(task, self._count(task))]
        return [pick for pick in self._candidates if not self._is_scored(pick)]

    def _count(self, task: str) -> int:
        """The number of a task's candidates in this step."""
        if self.config.passes is None or self._steps is None:
            return self.batch_size
        per_step = self.config.passes * self.sizes[task] / self._steps
        return int((self.step + 1) * per_step) - int(self.step * per_step)

    def _is_scored(self, pick: Pick) -> bool:
        at = int(self._scored_at[pick.task][pick.row])
        return at >= 0 and self.step - at < max(1, self.config.keep)

    def choose(self, scores: Sequence[float] = ()) -> list[Pick]:
        """The rows of the next batch, given the score of each of `candidates()`, in their order.

        Raises DataError if their number is not that of the candidates, or one is not finite.
        """
        unscored = self.candidates()
        if len(scores) != len(unscored):
            raise DataError(
                f"choose got {len(scores)} scores for {len(unscored)} candidates: give one for each of "
                "candidates(), in their order."
            )
        for pick, value in zip(unscored, scores, strict=True):
            if not math.isfinite(value):
                raise DataError(
                    f"The score of row {pick.row} of the task {pick.task} is {value}: a number is expected; the "
                    "model's predictions may have overflowed."
                )
            self._scores[pick.task][pick.row], self._scored_at[pick.task][pick.row] = value, self.step
        self._scored += len(unscored)
        picks = self._highest(self._candidates) if self._candidates else self._by_task()
        for pick in picks:
            self._used[pick.task][pick.row] = True
        self._history.append(dict(Counter(pick.task for pick in picks)))
        self.step, self._candidates = self.step + 1, []
        return picks

    def observe(self, task: str, entropies: Sequence[float]) -> None:
        """Set the entropies of a task's latest predictions, in nats; policy `entropy` uses their mean.

        Raises DataError if the task is unknown, or an entropy is negative or not finite.
        """
        values = np.asarray(entropies, dtype=float)
        if task not in self.sizes:
            raise DataError(f"There is no task {task!r} in this sampler; it has {', '.join(self.sizes)}.")
        if values.size:
            if not np.isfinite(values).all() or values.min() < 0:
                raise DataError(f"An entropy of the task {task} is {values.min()}; a number from 0 is expected.")
            self._entropy[task], self._scored = float(values.mean()), self._scored + len(values)

    def shares(self) -> dict[str, float]:
        """q(t), the probability of each task; for policies that choose rows the shares so far."""
        policy, sizes = self.config.policy, self.sizes
        weights: dict[str, float] = {}
        if policy in SCORED:
            weights = {task: sum(step.get(task, 0) for step in self._history) for task in sizes}
        elif policy != "entropy":
            alpha = {"uniform": 0.0, "size": 1.0, "temperature": self.config.alpha}[policy]
            weights = {task: size**alpha for task, size in sizes.items()}
        elif len(self._entropy) == len(sizes):  # every task has been seen
            weights = {task: self._entropy[task] ** self.config.beta for task in sizes}
        if not any(weights.values()):
            weights = dict.fromkeys(sizes, 1.0)
        total = sum(weights.values())
        return {task: weight / total for task, weight in weights.items()}

    def report(self) -> dict[str, Any]:
        """The choices so far: rows of each task in each step, and the share of all rows that were trained on."""
        used = {task: int(rows.sum()) for task, rows in self._used.items()}
        return {
            "steps": list(self._history),
            "data_share": sum(used.values()) / sum(self.sizes.values()),
            "data_share_by_task": {task: count / self.sizes[task] for task, count in used.items()},
            "picked": sum(sum(step.values()) for step in self._history),
            "drawn": sum(self._drawn.values()),
            "scored": self._scored,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values; call it between a `choose` and the next `candidates`."""
        return {
            "sizes": dict(self.sizes),
            "step": self.step,
            "drawn": dict(self._drawn),
            "entropy": dict(self._entropy),
            "scored": self._scored,
            "history": list(self._history),
            "rows": [{task: of[task].tolist() for task in self.sizes} for of in self._of_rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a sampler of the same tasks.

        Raises DataError if the state belongs to other tasks.
        """
        if state["sizes"] != self.sizes:
            raise DataError(
                f"The saved sampler chose from {state['sizes']}, but the data has {self.sizes}: resume with the data "
                "of the run that saved it."
            )
        self.step, self._drawn, self._entropy = state["step"], dict(state["drawn"]), dict(state["entropy"])
        self._scored = state["scored"]
        self._history = list(state["history"])
        for of, saved in zip(self._of_rows, state["rows"], strict=True):
            of.update({task: np.array(saved[task], dtype=of[task].dtype) for task in of})
        self._candidates = []

    def _draw(self, task: str, count: int) -> list[Pick]:
        """The next rows of a task, in its shuffled order."""
        size, start = self.sizes[task], self._drawn[task]
        self._drawn[task] += count
        number = list(self.sizes).index(task)
        epochs = {at // size for at in range(start, start + count)}
        orders = {epoch: _generator(self.seed, _ROWS, number, epoch).permutation(size) for epoch in epochs}
        return [Pick(task, int(orders[at // size][at % size])) for at in range(start, start + count)]

    def _by_task(self) -> list[Pick]:
        """Draw a task for each row of the batch, then take its next row."""
        names, shares = zip(*self.shares().items(), strict=True)
        numbers = _generator(self.seed, _TASKS, self.step, 0).choice(len(names), size=self.batch_size, p=shares)
        drawn = [names[number] for number in numbers]
        rows = {task: iter(self._draw(task, count)) for task, count in Counter(drawn).items()}
        return [next(rows[task]) for task in drawn]

    def _highest(self, candidates: list[Pick]) -> list[Pick]:
        """The batch: rows of fixed tasks, the floor of every other task, and then the highest scores of all."""
        config, values = self.config, np.array([self._scores[pick.task][pick.row] for pick in candidates], dtype=float)
        if config.policy == "learnability":
            values = values / np.maximum(_task_means(candidates, values), 1e-9)
        elif config.task_mean:
            means = _task_means(candidates, values)
            values = values * means / (means.max() or 1.0)
        picks = [pick for task, share in config.fixed.items() for pick in self._draw(task, self._due(share))]
        order = np.argsort(-values, kind="stable").tolist()  # ties: the earlier candidate
        floor = {task: self._due(config.floor / len(self.sizes)) for task in self.sizes}
        first = []
        for index in order if config.floor else ():
            if floor[candidates[index].task] > 0:
                floor[candidates[index].task] -= 1
                first.append(index)
        rest = [index for index in order if index not in set(first)]
        return [candidates[index] for index in [*first, *rest][: self.batch_size - len(picks)]] + picks

    def _due(self, share: float) -> int:
        """The rows of this step for a share of all rows, exact in the long run."""
        before, after = (int(step * self.batch_size * share) for step in (self.step, self.step + 1))
        return after - before


def _task_means(candidates: list[Pick], values: np.ndarray) -> np.ndarray:
    """The mean value of each candidate's task."""
    tasks = np.array([pick.task for pick in candidates])
    means = {task: float(values[tasks == task].mean()) for task in dict.fromkeys(tasks)}
    return np.array([means[task] for task in tasks])


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _check(sizes: Mapping[str, int], config: SamplerConfig, batch_size: int, steps: int | None) -> None:
    empty = [task for task, size in sizes.items() if size < 1]
    if empty or not sizes:
        what = f"The task {empty[0]} has no rows" if empty else "There is no task"
        raise DataError(f"{what}: name a file with at least one row for every task, or leave the task out.")
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; a whole number from 1 is expected.")
    for task, share in config.fixed.items():
        if config.policy not in SCORED:
            why = f"fixed shares belong to policies with scores, and the policy is {config.policy}: leave them out."
            raise DataError(why)
        if task not in sizes:
            raise DataError(f"fixed names the task {task!r}; the tasks are {', '.join(sizes)}.")
        if not 0 <= share < 1:
            raise DataError(f"The fixed share of the task {task} is {share}; a number from 0 to below 1 is expected.")
    if sum(config.fixed.values()) >= 1 or set(config.fixed) >= set(sizes):
        why = "The fixed shares leave nothing to choose by uncertainty: lower them, or take policy: temperature."
        raise DataError(why)
    if config.passes is not None and config.policy in SCORED and steps is not None:
        free = {task: size for task, size in sizes.items() if task not in config.fixed}
        per_step = sum(int(config.passes * size / steps) for size in free.values())
        if per_step < batch_size:
            raise DataError(
                f"{config.passes:g} passes over {sum(free.values()):,} rows give {per_step} candidates in each of "
                f"{steps:,} steps, but {batch_size} rows are chosen: raise passes, or lower steps or batch_size."
            )

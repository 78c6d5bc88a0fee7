"""Samplers choose the rows of each batch from several tasks.

A task t has D_t rows, and H is the entropy of a prediction in nats. The policies are:

    uniform       q(t) = 1 / T for T tasks
    size          q(t) = D_t / sum of D_s
    temperature   q(t) = D_t^alpha / sum of D_s^alpha                                                      (eq. 1.7)
    annealed      the same with alpha = 1 - 0.8 s / (S - 1) in step s = 0 .. S - 1 (Stickland and Murray 2019, by epoch)
    entropy       q(t) = H_t^beta / sum of H_s^beta, H_t the mean entropy of the task's latest predictions (eq. 1.8)
    uncertainty   the b candidates of all tasks with the largest H / H'_t, H'_t = log C_t for C_t classes  (algorithm 1)

q(t) is the probability of a task, and b is the batch size. `graftlm.grafts.heads.uncertainty` defines the uncertainty
of predictions that are not classes.

A sampler never runs the model. It returns row numbers, and receives the entropies or scores of predictions. The rows of
a task are shuffled anew in every epoch. All choices follow from the seed and the received values. Each step calls
`candidates`, then `choose` with their scores, and finally `observe` if the policy is `entropy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.errors import DataError

# These numbers separate the random numbers of tasks from those of rows.
_TASKS = 1
_ROWS = 2
_NEVER = -1
_ALPHAS = {"uniform": 0.0, "size": 1.0}  # exponents of the sizes of tasks
_ANNEALED = 0.8  # by how much annealed sampling lowers the exponent in a run


class SamplerConfig(Config):
    """Settings of a sampler.

    Args:
        policy: how tasks and rows are chosen; see the table of the module.
        alpha: exponent of `temperature`: 0 is uniform sampling, 1 is sampling by size.
        beta: exponent of `entropy`: larger values prefer uncertain tasks more strongly.
        task_mean: multiply each uncertainty by the mean of its task over the largest mean of a task. Algorithm 1 only
            divides by the largest mean, which is the same for all rows and does not change the choice.
        fixed: for `uncertainty`: the share in every batch of tasks whose rows have no score.
        floor: for `uncertainty`: the minimum share of each task, as a part of its share in uniform sampling. The rows
            are the most uncertain ones of the task.
        passes: for `uncertainty`: how many times each row is a candidate over all steps. None takes b candidates of
            each task in every step, as algorithm 1 does.
        keep: for `uncertainty`: number of steps for which a score is reused; 0 scores every candidate anew.
    """

    policy: Literal["uniform", "size", "temperature", "annealed", "entropy", "uncertainty"] = "uniform"
    alpha: float = Field(0.5, ge=0, le=1)
    beta: float = Field(1.0, gt=0)
    task_mean: bool = False
    fixed: dict[str, float] = {}
    floor: float = Field(0.0, ge=0, le=1)
    passes: float | None = Field(None, gt=0)
    keep: int = Field(0, ge=0)


class Pick(NamedTuple):
    """A row of a task.

    Attributes:
        task: the name of the task.
        row: the number of the row in the task, from 0.
    """

    task: str
    row: int


class TaskSampler:
    """An endless sequence of batches of rows.

    Args:
        sizes: number of rows of each task.
        config: the policy.
        batch_size: number of rows of a batch, b in the table of the module.
        seed: seed of all random numbers.
        steps: number of steps of the run, at least 1, over which `passes` are spread and the policy `annealed` changes.
            None ignores `passes`.

    Attributes:
        step: number of batches that were chosen so far.

    Raises:
        DataError: there is no task, a task has no rows, `batch_size` is below 1; `fixed` is set for another policy than
            `uncertainty`, has an unknown task or a share outside [0, 1), or leaves no rows to the other tasks;
            `passes` gives fewer candidates per step than rows of a batch; or the policy is `annealed` and `steps` is
            None.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        config: SamplerConfig,
        batch_size: int,
        seed: int = 0,
        steps: int | None = None,
    ) -> None:
        _check_sizes(sizes, batch_size)
        _check_fixed(sizes, config)
        if config.policy == "annealed" and steps is None:
            raise DataError(
                "The policy annealed changes with the steps of a run, but steps is None: give the number of steps, or "
                "set policy to temperature."
            )
        if config.policy == "uncertainty" and steps is not None:
            _check_passes(sizes, config, batch_size, steps)
        self.sizes = dict(sizes)
        self.config = config
        self.batch_size = batch_size
        self.seed = seed
        self.step = 0
        self._steps = steps
        self._candidates: list[Pick] = []
        self._drawn = dict.fromkeys(sizes, 0)
        self._entropy: dict[str, float] = {}
        self._history: list[dict[str, int]] = []
        self._scored = 0
        self._used: dict[str, np.ndarray] = {}
        self._scores: dict[str, np.ndarray] = {}
        self._scored_at: dict[str, np.ndarray] = {}
        for task, size in sizes.items():
            self._used[task] = np.zeros(size, dtype=bool)
            self._scores[task] = np.zeros(size)
            self._scored_at[task] = np.full(size, _NEVER, dtype=np.int32)

    def candidates(self) -> list[Pick]:
        """Return the rows whose scores `choose` needs.

        These are the candidates of this step without a score that may be reused. The list is empty unless the policy is
        `uncertainty`. The candidates are drawn in the first call of a step, and stay the same until `choose`.
        """
        if self.config.policy == "uncertainty" and not self._candidates:
            for task in self.sizes:
                if task not in self.config.fixed:
                    self._candidates += self._draw(task, self._candidate_count(task))
        return [pick for pick in self._candidates if not self._is_scored(pick)]

    def _candidate_count(self, task: str) -> int:
        """Return the number of a task's candidates in this step."""
        if self.config.passes is None or self._steps is None:
            return self.batch_size
        per_step = self.config.passes * self.sizes[task] / self._steps
        return int((self.step + 1) * per_step) - int(self.step * per_step)

    def _is_scored(self, pick: Pick) -> bool:
        """Return whether a row has a score that may be reused in this step."""
        scored_at = int(self._scored_at[pick.task][pick.row])
        age = self.step - scored_at
        return scored_at != _NEVER and age < max(1, self.config.keep)

    def choose(self, scores: Sequence[float] = ()) -> list[Pick]:
        """Choose the rows of the next batch, and advance to the next step.

        Args:
            scores: the score of each of `candidates()`, in their order.

        Raises:
            DataError: the number of scores differs from that of the candidates, or a score is not finite.
        """
        self._set_scores(self.candidates(), scores)
        picks = self._highest(self._candidates) if self._candidates else self._by_task()
        for pick in picks:
            self._used[pick.task][pick.row] = True
        counts = Counter(pick.task for pick in picks)
        self._history.append(dict(counts))
        self.step += 1
        self._candidates = []
        return picks

    def _set_scores(self, picks: Sequence[Pick], scores: Sequence[float]) -> None:
        """Store the scores of the candidates of this step, after checking them."""
        if len(scores) != len(picks):
            raise DataError(
                f"The number of scores is {len(scores)}, but the number of candidates is {len(picks)}: give choose one "
                "score for each of candidates(), in their order."
            )
        for pick, score in zip(picks, scores, strict=True):
            if not math.isfinite(score):
                raise DataError(
                    f"The score of row {pick.row} of the task {pick.task} is {score}, but a finite number is expected: "
                    "check whether the model's predictions overflow."
                )
            self._scores[pick.task][pick.row] = score
            self._scored_at[pick.task][pick.row] = self.step
        self._scored += len(picks)

    def observe(self, task: str, entropies: Sequence[float]) -> None:
        """Set the entropies of a task's latest predictions. The policy `entropy` uses their mean.

        Args:
            task: the name of the task.
            entropies: entropies in nats; an empty sequence changes nothing.

        Raises:
            DataError: the task is unknown, or an entropy is negative or not finite.
        """
        if task not in self.sizes:
            raise DataError(f"There is no task {task!r} in this sampler: choose one of {', '.join(self.sizes)}.")
        values = np.asarray(entropies, dtype=float)
        if not values.size:
            return
        invalid = values[~np.isfinite(values) | (values < 0)]
        if invalid.size:
            raise DataError(
                f"An entropy of the task {task} is {invalid[0]}, but a finite number from 0 is expected: check whether "
                "the model's predictions overflow."
            )
        self._entropy[task] = float(values.mean())
        self._scored += len(values)

    def shares(self) -> dict[str, float]:
        """Return the probability q(t) of each task, or under `uncertainty` its share of the rows so far.

        Shares are equal before the first batch under `uncertainty`, and under `entropy` until each task has an entropy.
        """
        weights = self._weights()
        if not any(weights.values()):
            weights = dict.fromkeys(self.sizes, 1.0)
        total = sum(weights.values())
        return {task: weight / total for task, weight in weights.items()}

    def _weights(self) -> dict[str, float]:
        """Return numbers in proportion to the shares; empty if nothing is known yet."""
        policy = self.config.policy
        if policy == "uncertainty":
            return {task: sum(counts.get(task, 0) for counts in self._history) for task in self.sizes}
        if policy == "entropy":
            if len(self._entropy) < len(self.sizes):
                return {}
            return {task: self._entropy[task] ** self.config.beta for task in self.sizes}
        alpha = self._annealed_alpha() if policy == "annealed" else _ALPHAS.get(policy, self.config.alpha)
        return {task: size**alpha for task, size in self.sizes.items()}

    @property
    def horizon(self) -> int | None:
        """The number of steps on which the shares of single steps depend; None if they do not depend on it."""
        return self._steps if self.config.policy == "annealed" else None

    def _annealed_alpha(self) -> float:
        """Return the exponent of annealed sampling in this step, from 1 in the first to 0.2 in the last step."""
        assert self._steps is not None, "the policy was checked"
        progress = self.step / max(1, self._steps - 1)
        return 1 - _ANNEALED * min(1.0, progress)

    def report(self) -> dict[str, Any]:
        """Return the choices so far, as plain JSON values.

        | key | value |
        |---|---|
        | `steps` | number of rows of each task in each step |
        | `data_share` | share of all rows that were chosen at least once |
        | `data_share_by_task` | the same for each task |
        | `picked` | number of rows in all batches |
        | `drawn` | number of rows and candidates that were drawn |
        | `scored` | number of predictions that the model made for the sampler |
        """
        used = {task: int(rows.sum()) for task, rows in self._used.items()}
        share = sum(used.values()) / sum(self.sizes.values())
        share_by_task = {task: count / self.sizes[task] for task, count in used.items()}
        picked = sum(sum(counts.values()) for counts in self._history)
        return {
            "steps": list(self._history),
            "data_share": share,
            "data_share_by_task": share_by_task,
            "picked": picked,
            "drawn": sum(self._drawn.values()),
            "scored": self._scored,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values. Call it after `choose` and before the next `candidates`."""
        return {
            "sizes": dict(self.sizes),
            "step": self.step,
            "drawn": dict(self._drawn),
            "entropy": dict(self._entropy),
            "scored": self._scored,
            "history": list(self._history),
            "rows": [
                _as_lists(self._used),
                _as_lists(self._scores),
                _as_lists(self._scored_at),
            ],
        }

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later batches have been chosen."""
        copied = copy(self)
        copied._drawn = dict(self._drawn)
        copied._entropy = dict(self._entropy)
        copied._history = list(self._history)
        copied._used = _copies(self._used)
        copied._scores = _copies(self._scores)
        copied._scored_at = _copies(self._scored_at)
        return copied.state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of a sampler of the same tasks.

        Raises:
            DataError: the state's tasks, or their numbers of rows, are not those of this sampler.
        """
        if state["sizes"] != self.sizes:
            raise DataError(
                f"The saved sampler has the numbers of rows {_sizes_text(state['sizes'])}, but the data has "
                f"{_sizes_text(self.sizes)}: resume with the data of the run that saved it."
            )
        self.step = state["step"]
        self._drawn = dict(state["drawn"])
        self._entropy = dict(state["entropy"])
        self._scored = state["scored"]
        self._history = list(state["history"])
        self._candidates = []
        used, scores, scored_at = state["rows"]
        for task in self.sizes:
            self._used[task] = np.array(used[task], dtype=bool)
            self._scores[task] = np.array(scores[task], dtype=float)
            self._scored_at[task] = np.array(scored_at[task], dtype=np.int32)

    def _draw(self, task: str, count: int) -> list[Pick]:
        """Draw the next rows of a task, in its shuffled order."""
        size = self.sizes[task]
        number = list(self.sizes).index(task)
        start = self._drawn[task]
        self._drawn[task] = start + count
        orders: dict[int, np.ndarray] = {}
        picks = []
        for position in range(start, start + count):
            epoch, place = divmod(position, size)
            if epoch not in orders:
                orders[epoch] = _generator(self.seed, _ROWS, number, epoch).permutation(size)
            row = int(orders[epoch][place])
            picks.append(Pick(task, row))
        return picks

    def _by_task(self) -> list[Pick]:
        """Draw a task for each row of the batch, then take the task's next row."""
        shares = self.shares()
        names = list(shares)
        generator = _generator(self.seed, _TASKS, self.step, 0)
        numbers = generator.choice(len(names), size=self.batch_size, p=list(shares.values()))
        drawn = [names[number] for number in numbers]
        rows: dict[str, Iterator[Pick]] = {}
        for task, count in Counter(drawn).items():
            rows[task] = iter(self._draw(task, count))
        return [next(rows[task]) for task in drawn]

    def _highest(self, candidates: Sequence[Pick]) -> list[Pick]:
        """Choose the minimum of each task and then the highest scores, and draw the rows of fixed tasks."""
        fixed = []
        for task, share in self.config.fixed.items():
            fixed += self._draw(task, self._due(share))
        order = self._order(candidates)
        first = self._floor(candidates, order) if self.config.floor else []
        taken = set(first)
        rest = [index for index in order if index not in taken]
        order = first + rest
        count = self.batch_size - len(fixed)
        highest = [candidates[index] for index in order[:count]]
        return highest + fixed

    def _order(self, candidates: Sequence[Pick]) -> list[int]:
        """Return the indices of candidates from the highest score to the lowest. Equal scores keep their order."""
        scores = [self._scores[pick.task][pick.row] for pick in candidates]
        values = np.array(scores, dtype=float)
        if self.config.task_mean:
            means = _task_means(candidates, values)
            values = values * means / (means.max() or 1.0)
        return np.argsort(-values, kind="stable").tolist()

    def _floor(self, candidates: Sequence[Pick], order: Sequence[int]) -> list[int]:
        """Return the indices of each task's highest candidates, as many as `floor` guarantees in this step."""
        due = self._due(self.config.floor / len(self.sizes))
        left = dict.fromkeys(self.sizes, due)
        indices = []
        for index in order:
            task = candidates[index].task
            if left[task] > 0:
                left[task] -= 1
                indices.append(index)
        return indices

    def _due(self, share: float) -> int:
        """Return the number of rows in this step that a share of all rows amounts to. Over many steps it is exact."""
        before = int(self.step * self.batch_size * share)
        after = int((self.step + 1) * self.batch_size * share)
        return after - before


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{task}: {size:,}" for task, size in sizes.items())


def _copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {task: array.copy() for task, array in arrays.items()}


def _as_lists(arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    return {task: array.tolist() for task, array in arrays.items()}


def _task_means(candidates: Sequence[Pick], values: np.ndarray) -> np.ndarray:
    """Return the mean value of each candidate's task, shape (candidates,)."""
    tasks = np.array([pick.task for pick in candidates])
    means = np.empty(len(values))
    for task in dict.fromkeys(tasks):
        of_task = tasks == task
        means[of_task] = values[of_task].mean()
    return means


def _generator(*key: int) -> np.random.Generator:
    sequence = np.random.SeedSequence(key)
    return np.random.Generator(np.random.Philox(sequence))


def _check_sizes(sizes: Mapping[str, int], batch_size: int) -> None:
    if not sizes:
        raise DataError("There are no tasks to sample from: name at least one.")
    for task, size in sizes.items():
        if size < 1:
            raise DataError(f"The task {task} has no rows: name a file with at least one, or leave the task out.")
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}, but at least 1 is expected: set a larger one.")


def _check_fixed(sizes: Mapping[str, int], config: SamplerConfig) -> None:
    """Raise `DataError` if the fixed shares do not fit the policy or the tasks."""
    if not config.fixed:
        return
    if config.policy != "uncertainty":
        raise DataError(
            f"fixed is set, but only the policy uncertainty uses it and the policy is {config.policy}: leave fixed out."
        )
    for task, share in config.fixed.items():
        if task not in sizes:
            raise DataError(f"fixed has the unknown task {task!r}: choose among {', '.join(sizes)}.")
        if not 0 <= share < 1:
            raise DataError(
                f"The fixed share of the task {task} is {share:g}, but a number in [0, 1) is expected: change fixed."
            )
    total = sum(config.fixed.values())
    if total >= 1 or set(config.fixed) >= set(sizes):
        found = f"sum to {total:g}" if total >= 1 else "cover all tasks"
        raise DataError(
            f"The fixed shares {found}, which leaves no rows to choose by uncertainty: lower them or leave one out, "
            "or set policy to temperature."
        )


def _check_passes(sizes: Mapping[str, int], config: SamplerConfig, batch_size: int, steps: int) -> None:
    """Raise `DataError` if `passes` gives fewer candidates per step than rows of a batch."""
    if config.passes is None:
        return
    scored_sizes = [size for task, size in sizes.items() if task not in config.fixed]
    per_step = sum(int(config.passes * size / steps) for size in scored_sizes)
    if per_step < batch_size:
        raise DataError(
            f"passes is {config.passes:g}, which gives {per_step} candidates per step (rows: {sum(scored_sizes):,}, "
            f"steps: {steps:,}), but batch_size is {batch_size}: raise passes, or lower steps or batch_size."
        )

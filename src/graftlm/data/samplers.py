"""Task samplers: which rows of which tasks make the next batch.

For T tasks with D_t rows, and H the entropy of a prediction in nats:

    uniform       q(t) = 1 / T
    size          q(t) = D_t / sum of D_s
    temperature   q(t) = D_t^alpha / sum of D_s^alpha                                                      (eq. 1.7)
    entropy       q(t) = H_t^beta / sum of H_s^beta, H_t the mean entropy of the task's latest predictions (eq. 1.8)
    uncertainty   of b candidates of each task the b rows of the largest H / H'_t, H'_t = log C_t          (algorithm 1)

A sampler does not know the model: it names rows, and is given entropies. Each task's rows are shuffled anew in every
epoch. All choices follow from the seed and the given entropies. A step calls `candidates`, then `choose` with their
uncertainties, then, under policy entropy, `observe`.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.errors import DataError

_TASKS, _ROWS = 1, 2  # keep random numbers for tasks apart from those for rows


class SamplerConfig(Config):
    """How rows are chosen.

    Args:
        alpha: for `temperature`: 0 is uniform, 1 is by size.
        beta: for `entropy`: larger values prefer uncertain tasks more.
        task_mean: for `uncertainty`: multiply a row's uncertainty by its task's mean over the largest task's mean.
            Algorithm 1 only divides by the largest mean, which is the same for all rows and changes no choice.
        fixed: for `uncertainty`: the share in every batch of tasks whose predictions have no entropy.
    """

    policy: Literal["uniform", "size", "temperature", "entropy", "uncertainty"] = "uniform"
    alpha: float = Field(0.5, ge=0, le=1)
    beta: float = Field(1.0, gt=0)
    task_mean: bool = False
    fixed: dict[str, float] = {}


class Pick(NamedTuple):
    """One row of one task."""

    task: str
    row: int


class TaskSampler:
    """Endless batches of `batch_size` rows, b above, of tasks with `sizes` rows.

    Raises:
        DataError: a task has no rows, or a fixed share does not fit.
    """

    def __init__(self, sizes: Mapping[str, int], config: SamplerConfig, batch_size: int, seed: int = 0) -> None:
        _check(sizes, config, batch_size)
        self.sizes, self.config, self.batch_size, self.seed = dict(sizes), config, batch_size, seed
        self.step = 0
        self._drawn = dict.fromkeys(sizes, 0)
        self._entropy: dict[str, float] = {}
        self._used = {task: np.zeros(size, dtype=bool) for task, size in sizes.items()}
        self._history: list[dict[str, int]] = []
        self._candidates: list[Pick] = []

    def candidates(self) -> list[Pick]:
        """The rows whose uncertainty `choose` needs: b of each task under `uncertainty`, else none."""
        if self.config.policy != "uncertainty":
            return []
        if not self._candidates:
            free = [task for task in self.sizes if task not in self.config.fixed]
            self._candidates = [pick for task in free for pick in self._draw(task, self.batch_size)]
        return list(self._candidates)

    def choose(self, uncertainties: Sequence[float] = ()) -> list[Pick]:
        """The rows of the next batch, given H / H'_t of each of `candidates()`, in their order.

        Raises:
            DataError: their number is not that of the candidates, or one is not finite.
        """
        candidates = self.candidates()
        if len(uncertainties) != len(candidates):
            raise DataError(
                f"choose got {len(uncertainties)} uncertainties for {len(candidates)} candidates: give one for each of "
                "candidates(), in their order."
            )
        picks = self._most_uncertain(candidates, uncertainties) if candidates else self._by_task()
        for pick in picks:
            self._used[pick.task][pick.row] = True
        self._history.append(dict(Counter(pick.task for pick in picks)))
        self.step, self._candidates = self.step + 1, []
        return picks

    def observe(self, task: str, entropies: Sequence[float]) -> None:
        """Set the entropies of a task's latest predictions, in nats; policy `entropy` uses their mean.

        Raises:
            DataError: the task is unknown, or an entropy is negative or not finite.
        """
        values = np.asarray(entropies, dtype=float)
        if task not in self.sizes:
            raise DataError(f"There is no task {task!r} in this sampler; it has {', '.join(self.sizes)}.")
        if values.size:
            if not np.isfinite(values).all() or values.min() < 0:
                raise DataError(f"An entropy of the task {task} is {values.min()}; a number from 0 is expected.")
            self._entropy[task] = float(values.mean())

    def shares(self) -> dict[str, float]:
        """q(t), the probability of each task; for `uncertainty`, which chooses rows, the shares so far."""
        policy, sizes = self.config.policy, self.sizes
        weights: dict[str, float] = {}
        if policy == "uncertainty":
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
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values; call it between a `choose` and the next `candidates`."""
        return {
            "sizes": dict(self.sizes),
            "step": self.step,
            "drawn": dict(self._drawn),
            "entropy": dict(self._entropy),
            "history": list(self._history),
            "used": {task: base64.b64encode(np.packbits(rows).tobytes()).decode() for task, rows in self._used.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a sampler of the same tasks.

        Raises:
            DataError: the state belongs to other tasks.
        """
        if state["sizes"] != self.sizes:
            raise DataError(
                f"The saved sampler chose from {state['sizes']}, but the data has {self.sizes}: resume with the data "
                "of the run that saved it."
            )
        self.step, self._drawn, self._entropy = state["step"], dict(state["drawn"]), dict(state["entropy"])
        self._history = list(state["history"])
        for task, size in self.sizes.items():
            bits = np.frombuffer(base64.b64decode(state["used"][task]), dtype=np.uint8)
            self._used[task] = np.unpackbits(bits, count=size).astype(bool)
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

    def _most_uncertain(self, candidates: list[Pick], uncertainties: Sequence[float]) -> list[Pick]:
        values = np.asarray(uncertainties, dtype=float)
        if not np.isfinite(values).all():
            worst = int(np.argmin(np.isfinite(values)))
            raise DataError(
                f"The uncertainty of row {candidates[worst].row} of the task {candidates[worst].task} is "
                f"{values[worst]}: a number is expected; the model's predictions may have overflowed."
            )
        if self.config.task_mean:
            values = values * _task_means(candidates, values)
        fixed: list[Pick] = []
        for task, share in self.config.fixed.items():  # exact in the long run
            before, after = (int(step * self.batch_size * share) for step in (self.step, self.step + 1))
            fixed += self._draw(task, after - before)
        best = np.argsort(-values, kind="stable")[: self.batch_size - len(fixed)]  # ties: the earlier candidate
        return [candidates[index] for index in best] + fixed


def _task_means(candidates: list[Pick], values: np.ndarray) -> np.ndarray:
    """The mean of each candidate's task over the largest mean of a task."""
    tasks = np.array([pick.task for pick in candidates])
    means = {task: float(values[tasks == task].mean()) for task in dict.fromkeys(tasks)}
    largest = max(means.values()) or 1.0
    return np.array([means[task] / largest for task in tasks])


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _check(sizes: Mapping[str, int], config: SamplerConfig, batch_size: int) -> None:
    empty = [task for task, size in sizes.items() if size < 1]
    if empty or not sizes:
        what = f"The task {empty[0]} has no rows" if empty else "There is no task"
        raise DataError(f"{what}: name a file with at least one row for every task, or leave the task out.")
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; a whole number from 1 is expected.")
    for task, share in config.fixed.items():
        if config.policy != "uncertainty":
            raise DataError(
                f"fixed shares belong to policy: uncertainty, and the policy is {config.policy}: leave them out."
            )
        if task not in sizes:
            raise DataError(f"fixed names the task {task!r}; the tasks are {', '.join(sizes)}.")
        if not 0 <= share < 1:
            raise DataError(f"The fixed share of the task {task} is {share}; a number from 0 to below 1 is expected.")
    if sum(config.fixed.values()) >= 1 or set(config.fixed) >= set(sizes):
        raise DataError(
            "The fixed shares leave nothing to choose by uncertainty: lower them, or take policy: temperature."
        )

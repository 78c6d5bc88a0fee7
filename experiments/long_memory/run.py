"""Tasks that need a long memory: the end of a text asks for its beginning, many windows before.

A task gives rows of ids, and which of them are answers; only answers are trained and tested. Id 0 is padding.

- recall: the first window has pairs of a key and a value, noise follows, and the last window repeats every key, each
  with its value. An eighth of all pairs of a key and a value is held out: validation and test have no others.
  `recall64` is the same with as many pairs as fit into a window of 128 tokens.
- copy: values at random positions of the first half, noise between them, and all of them in order in the last window.
  An eighth of all pairs of neighbours is held out in the same way.
- listops: a nested expression (Long Range Arena), read in both directions. At each closing bracket stands the question
  for the value of the list that it ends; only the last one, the whole expression's, is tested:

    [MAX 4 3 [MIN 2 3 ] 1 0 ]    answers 2 and 4

Operations are MAX, MIN, MED (the median, rounded down) and SM (the sum modulo ten). They have two to ten arguments and
a depth of at most ten. An operation with its bracket, the closing bracket and a digit are one token each.

The compared models are of equal size with one difference. Every row is trained on each task with the same steps and
examples, at the rate that its own search on validation examples chose (the README names the rows without one).
"""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from experiments import Options
from experiments.sequence_rows import CONTROLS, LABELS, LISTS, PEERS, model_config, new_model
from experiments.study import Study, aim, bars, losses, metric, published, training_config
from graftlm.config import Config
from graftlm.data import NEW, Mixture, TokenBlocks
from graftlm.data.marked_ids import PADDING, PROMPT
from graftlm.evaluation import Aim, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.model import BlockStateModel, BlockStatePreTrainedModel
from graftlm.runs.run import Run, RunContext
from graftlm.training import train
from graftlm.training.language_model import LanguageModel

PADDING_ID, HELD_OUT = 0, 8
OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
DIGIT_ID = 1 + len(OPERATIONS)
CLOSE_ID = DIGIT_ID + 10  # in examples plus the value, which models are not shown
MAX_DEPTH, MAX_ARGUMENTS, DIGIT_PROBABILITY = 10, 10, 0.75


class TrainingStage(NamedTuple):
    """Training on new texts of one length; for listops the maximum, and a fourth of it is the minimum."""

    length: int
    steps: int
    batch_size: int


class MemoryTask(Config):
    """A task, its sizes, and the stages of its training.

    Args:
        name: `listops_last` is listops with one answer a text in training too.
        length: tokens of a row; listops has fewer, and padding behind.
        window: of the models that learn it; the questions of recall and copy are in the last window.
        pairs: pairs of recall; values of copy.
        keys, values: number of different keys and values.
        noise: number of different noise tokens.
        shortest: fewest tokens of a listops expression.
    """

    name: Literal["recall", "copy", "listops", "listops_last"]
    length: int = Field(128, ge=8)
    window: int = Field(8, ge=4)
    pairs: int = Field(2, ge=1)
    keys: int = Field(4, ge=1)
    values: int = Field(8, ge=HELD_OUT, multiple_of=HELD_OUT)
    noise: int = Field(1, ge=1)
    shortest: int = Field(500, ge=3)
    stages: tuple[TrainingStage, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Number of ids that models read."""
        return CLOSE_ID + 1 if "listops" in self.name else 2 + self.keys + self.values + self.noise


class TaskExamples(NamedTuple):
    """Ids (N, L) int64, and which of them are answers, (N, L) bool."""

    ids: np.ndarray
    answers: np.ndarray


def make_examples(task: MemoryTask, count: int, seed: int, split: str) -> TaskExamples:
    """Examples of a task, which depend on the seed and on the name of the split."""
    random = np.random.default_rng([seed, *split.encode()])
    if "listops" in task.name:
        return _listops(task, count, random, every_list=task.name == "listops" and split.startswith("train"))
    return {"recall": _recall, "copy": _copy}[task.name](task, count, random, held_out=not split.startswith("train"))


def informed_guesses(task: MemoryTask, tested: int, seed: int) -> dict[str, float]:
    """Percent right of `tested` listops examples, given the commonest result of 8 times as many read as the same."""
    known, test = make_examples(task, 8 * tested, seed, "guesses"), make_examples(task, tested, seed, "test")

    def right(read: Callable[[np.ndarray], Any]) -> float:
        results: dict[Any, Counter[int]] = defaultdict(Counter)
        for row, result in zip(known.ids, known.ids[known.answers], strict=True):
            results[read(row)][result] += 1
        guesses = [[*results[read(row)].most_common(1), (PADDING_ID, 0)][0][0] for row in test.ids]
        return 100 * float((test.ids[test.answers] == guesses).mean())

    reads = {"the commonest result": lambda _: None, "that of the outermost operation": lambda row: row[0]}
    return {name: right(read) for name, read in reads.items()} | {"that of its own digits": right(_of_own_digits)}


def _of_own_digits(row: np.ndarray) -> tuple[int, int]:
    """The outermost operation of an expression, and its value if it had no nested lists; -1 without digits."""
    depth = ((row > PADDING_ID) & (row < DIGIT_ID)).cumsum() - (row >= CLOSE_ID).cumsum()
    digits = (row[(depth == 1) & (row >= DIGIT_ID) & (row < CLOSE_ID)] - DIGIT_ID).tolist()
    return row[0], tuple(OPERATIONS.values())[row[0] - 1](digits) if digits else -1


def _recall(task: MemoryTask, count: int, random: np.random.Generator, *, held_out: bool) -> TaskExamples:
    ids = _noise(task, count, random)
    keys = _sample(random, count, task.keys, task.pairs)
    values = random.integers(task.values // HELD_OUT, size=(count, task.pairs)) * HELD_OUT
    shifts = 0 if held_out else random.integers(1, HELD_OUT, size=(count, task.pairs))
    values += (keys + shifts) % HELD_OUT  # a pair is held out whose key and value have the same remainder
    positions = 2 * np.sort(_sample(random, count, task.window // 2, task.pairs), axis=1)
    np.put_along_axis(ids, positions, 1 + keys, axis=1)
    np.put_along_axis(ids, positions + 1, 1 + task.keys + values, axis=1)
    order = _sample(random, count, task.pairs, task.pairs)
    first = task.length - 2 * task.pairs
    ids[:, first::2] = 1 + np.take_along_axis(keys, order, axis=1)
    ids[:, first + 1 :: 2] = 1 + task.keys + np.take_along_axis(values, order, axis=1)
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first + 1 :: 2] = True
    return TaskExamples(ids, answers)


def _copy(task: MemoryTask, count: int, random: np.random.Generator, *, held_out: bool) -> TaskExamples:
    ids = _noise(task, count, random)
    shifts = random.integers(*((0, 1) if held_out else (1, HELD_OUT)), size=(count, task.pairs))
    shifts[:, 0] = random.integers(HELD_OUT, size=count)
    values = random.integers(task.values // HELD_OUT, size=(count, task.pairs)) * HELD_OUT
    values += 1 + task.keys + shifts.cumsum(axis=1) % HELD_OUT  # neighbours of one remainder are held out
    np.put_along_axis(ids, np.sort(_sample(random, count, task.length // 2, task.pairs), axis=1), values, axis=1)
    first = task.length - task.pairs
    ids[:, first - 1] = task.vocab_size - 1  # the token that asks for the copy
    ids[:, first:] = values
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first:] = True
    return TaskExamples(ids, answers)


def _noise(task: MemoryTask, count: int, random: np.random.Generator) -> np.ndarray:
    return 1 + task.keys + task.values + random.integers(task.noise, size=(count, task.length))


def _sample(random: np.random.Generator, rows: int, below: int, count: int) -> np.ndarray:
    """(rows, count): for each row, different numbers less than `below` in random order."""
    return np.argsort(random.random((rows, below)), axis=1)[:, :count]


def _listops(task: MemoryTask, count: int, random: np.random.Generator, *, every_list: bool) -> TaskExamples:
    ids = np.full((count, task.length), PADDING_ID)
    for row, expression in enumerate(islice(expressions(random, task.shortest, task.length - 1), count)):
        ids[row, : len(expression)] = expression
    return TaskExamples(ids, (ids >= CLOSE_ID) & (every_list | (np.roll(ids, -1, axis=1) == PADDING_ID)))


def expressions(random: np.random.Generator, shortest: int, longest: int) -> Iterator[list[int]]:
    """An endless stream of expressions within these lengths, as ids; each closing bracket has its list's value."""
    draws = (draw for _ in count() for draw in random.random(4096).tolist())  # many at a time: most are rejected
    while True:
        ids: list[int] = []
        if _write_list(draws, ids, 1, longest) is not None and shortest <= len(ids) <= longest:
            yield ids


def _write_list(draws: Iterator[float], ids: list[int], depth: int, longest: int) -> int | None:
    """Append a random list to `ids`, and return its value; None if it is too long."""
    operation = int(len(OPERATIONS) * next(draws))
    ids.append(1 + operation)
    values = []
    for _ in range(2 + int((MAX_ARGUMENTS - 1) * next(draws))):
        if depth < MAX_DEPTH and next(draws) >= DIGIT_PROBABILITY:
            value = _write_list(draws, ids, depth + 1, longest)
        else:
            value = int(10 * next(draws))
            ids.append(DIGIT_ID + value)
        if value is None or len(ids) > longest:
            return None
        values.append(value)
    value = tuple(OPERATIONS.values())[operation](values)
    ids.append(CLOSE_ID + value)
    return value


class ListValuesConfig(BlockStateConfig):
    """The config of `ListValues`."""

    model_type = "list-values"


class ListValues(BlockStatePreTrainedModel):
    """A block-state model that gives the value of each list at its closing bracket, which it reads without the value.

    Logits stand a position before their bracket, where training and `accuracy` look for the next token's.
    """

    config_class = ListValuesConfig

    def __init__(self, config: ListValuesConfig) -> None:
        super().__init__(config)
        self.model, self.head = BlockStateModel(config), nn.Linear(config.hidden_size, 10)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        """Logits (B, T, ids) of ids (B, T)."""
        hidden = self.model(input_ids.clamp(max=CLOSE_ID), **more).last_hidden_state
        logits = nn.functional.pad(self.head(hidden), (CLOSE_ID, 0), value=-torch.inf)
        return CausalLMOutput(logits=logits.roll(-1, dims=1))


AutoConfig.register("list-values", ListValuesConfig)
AutoModelForCausalLM.register(ListValuesConfig, ListValues)


NAME = "long-memory"
SHORT = ("slide", "block_recurrent", "bst_sh_s4d", "slide_ssm", "sh_s4d", "sh_delta", "gated_delta", *PEERS)
SOLVED, UNSOLVED = 95.0, 2.0  # accuracy in percent; factor on chance
_DEEP = {"model_type": "list-values", "num_hidden_layers": 6, "bidirectional": True, "positional_ssm": False}


class MemoryTaskRun(Run):
    """Train one model on one task in stages, and measure the percentage of correct answers.

    Args:
        model: its config, with `model_type`.
        tested: number of test examples, and of validation examples.
    """

    task: MemoryTask
    model: dict[str, Any]
    learning_rate: float = Field(gt=0)
    tested: int = Field(ge=1)
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        """Accuracy on validation and test, the number of parameters, and the losses."""
        torch.manual_seed(self.seed)
        model = new_model(self.model).to(PartialState().device)
        started = time.process_time()
        curve, steps = [], 0
        for number, stage in enumerate(self.task.stages):
            stage_losses = self._train_stage(model, stage, context.folder / f"stage-{number}")
            curve += [[steps + step, loss] for step, loss in stage_losses]
            steps += stage.steps
        details = {"losses": curve, "training_cpu_s": round(time.process_time() - started, 1)}
        metrics: dict[str, Metric] = {"parameters": count_parameters(model.parameters())}
        for split in ("validation", "test"):
            examples = make_examples(self.task, self.tested, self.seed, split)
            metrics[split] = accuracy(model, examples, self.task.stages[-1].batch_size)
        metrics["validation_wrong"] = 100 - value_of(metrics["validation"])
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics), details)

    def _train_stage(self, model: Any, stage: TrainingStage, folder: Path) -> list[list[float]]:
        """Train for one stage; gives its losses."""
        more: dict[str, Any] = dict.fromkeys(("warmup_steps", "log_every"), max(1, stage.steps // 20))
        training = training_config(stage.steps, stage.batch_size, self.learning_rate, self.seed, **more)
        shortest = min(self.task.shortest, stage.length // 4)
        task = self.task.model_copy(update={"length": stage.length, "shortest": shortest})
        examples = make_examples(task, stage.steps * stage.batch_size, self.seed, f"train-{stage.length}")
        mixture = Mixture({NEW: token_blocks(examples)}, {NEW: 1.0}, stage.batch_size, self.seed)
        identity = {"run": self.settings()}
        summary = train(LanguageModel(model), mixture, training, folder, identity=identity, progress=False)
        return losses(summary.history)


def token_blocks(examples: TaskExamples) -> TokenBlocks:
    """Rows for the training loop, whose labels are the answers."""
    marked = np.where(examples.answers, examples.ids, examples.ids | PROMPT).astype(np.int32)
    marked[examples.ids == PADDING_ID] = PADDING
    return TokenBlocks(marked, boundaries="joined", pad_id=PADDING_ID)


def accuracy(model: Any, examples: TaskExamples, batch_size: int) -> float:
    """Percentage of answers that are the most likely token at their position."""
    ids, answers = (torch.from_numpy(part).to(model.device) for part in examples)
    correct = 0
    with evaluation_mode(model), torch.inference_mode():
        for batch, is_answer in zip(ids.split(batch_size), answers.split(batch_size), strict=True):
            mask = (batch != PADDING_ID).long()
            more = {} if bool(mask.all()) else {"attention_mask": mask}
            predicted = model(input_ids=batch, use_cache=False, **more).logits[:, :-1].argmax(dim=-1)
            correct += int((predicted == batch[:, 1:])[is_answer[:, 1:]].sum())
    return 100 * correct / int(answers.sum())


class LongMemoryConfig(Config):
    """Tasks and sizes.

    Args:
        tasks: by name.
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        rates: that are tried.
        tested: number of test examples.

    `shape_of`, `parameters_of`, `rates_of` and `tested_of` have those of tasks where they differ.
    """

    tasks: dict[str, MemoryTask]
    shape: dict[str, Any]
    parameters: int
    rates: tuple[float, ...] = (1.5e-3, 3e-3)
    tested: int = 512
    shape_of: dict[str, dict[str, Any]] = Field({"recall64": {"mixer_layers": [0]}, "listops": _DEEP})
    parameters_of: dict[str, int] = Field({"listops": 350_000})
    rates_of: dict[str, tuple[float, ...]] = Field({"copy": (1.5e-3, 3e-3, 6e-3), "listops": (1e-3, 2e-3, 4e-3)})
    tested_of: dict[str, int] = Field({"recall64": 64, "listops": 256})


_FLAT: Any = ((48, 600, 32), (96, 300, 32), (256, 300, 16))
_PAIRS: Any = {"length": 256, "window": 16, "pairs": 8, "keys": 64, "values": 64, "noise": 64, "stages": _FLAT}
_FULL_WINDOW: Any = _PAIRS | {"length": 2048, "window": 128, "pairs": 64}
_FULL_WINDOW["stages"] = ((384, 100, 32), (768, 50, 32), (2048, 50, 16))
_NESTED: Any = ((16, 400, 16), (32, 200, 16), (64, 60, 16), (128, 40, 16), (256, 20, 16), (512, 10, 16), (2000, 6, 8))
_SHAPE = {
    "hidden_size": 64,
    "state_width": 64,  # the default, a fourth of the width, is 16 numbers for the whole text
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mixer_layers": [1],
    "filters": 16,
    "initializer_range": 0.125,  # 1 / sqrt(width): with 0.02 the attention is too uniform to learn
}
FULL = LongMemoryConfig(
    tasks={
        "recall": MemoryTask(name="recall", **_PAIRS),
        "recall64": MemoryTask(name="recall", **_FULL_WINDOW),
        "copy": MemoryTask(name="copy", **_PAIRS),
        "listops": MemoryTask(name="listops", length=2000, window=64, stages=_NESTED),
    },
    shape=_SHAPE,
    parameters=150_000,
)
_SHORT = {"length": 64, "window": 8, "pairs": 2, "shortest": 10, "stages": ((24, 1, 2), (64, 1, 2))}
QUICK = LongMemoryConfig(
    tasks={name: MemoryTask.parse(task.model_dump() | _SHORT) for name, task in FULL.tasks.items()},
    shape=_SHAPE | {"hidden_size": 16, "state_width": 4, "num_attention_heads": 2, "filters": 4},
    parameters=12_000,
    parameters_of={"listops": 50_000},
    tested=4,
)


def rows_of(name: str) -> dict[str, str]:
    """Labels of the rows of a task; listops has its own, all others have controls and peers."""
    if name == "listops":
        return LISTS
    rows = LABELS | CONTROLS | PEERS
    return {row: rows[row] for row in SHORT} if name in ("recall64", "copy") else rows


def memory_run(config: LongMemoryConfig, row: str, name: str, seed: int, rate: float) -> MemoryTaskRun:
    """The run of one row on the task `name`."""
    task = config.tasks[name]
    task = task.model_copy(update={"name": "listops_last"}) if row == "listops_bst_s4_last" else task
    shape = {"window": task.window, "kernel_length": task.length, "vocab_size": task.vocab_size}
    shape = config.shape | shape | config.shape_of.get(name, {})
    return MemoryTaskRun(
        id=f"{name}-{row}_lr{rate:g}_s{seed}",
        label=rows_of(name)[row],
        task=task,
        model=model_config(row, shape, config.parameters_of.get(name, config.parameters)),
        learning_rate=rate,
        tested=min(config.tested, config.tested_of.get(name, config.tested)),
        seed=seed,
    )


def run(options: Options) -> Results:
    """Run all tasks, or those in `tables`."""
    config, tasks = QUICK if options.quick else FULL, options.chosen(tuple(FULL.tasks))
    study = Study(options)
    cells = {f"{task} {row}": (row, task) for task in tasks for row in rows_of(task)}
    candidates = {
        name: [memory_run(config, *cell, study.seeds[0], rate) for rate in config.rates_of.get(cell[1], config.rates)]
        for name, cell in cells.items()
    }
    chosen = study.choose(candidates, ["validation_wrong"], "the search")
    rates = {name: run.learning_rate for name, run in chosen.items()}
    runs = {name: [memory_run(config, *cells[name], seed, rates[name]) for seed in study.seeds] for name in cells}
    study.execute([run for of_seeds in runs.values() for run in of_seeds], NAME)
    chance = {task: 100 / (10 if task == "listops" else config.tasks[task].values) for task in tasks}
    rows = [Row(id="random", label="guessing", metrics={**chance})]
    for row, label in (LABELS | CONTROLS | PEERS | LISTS).items():
        metrics: dict[str, Metric] = {}
        for task in (task for task in tasks if row in rows_of(task)):
            measured = [study.measured[run.id] for run in runs[f"{task} {row}"]]
            metrics[task] = combine_seeds([metric(measurement, "test") for measurement in measured])
            metrics["parameters"] = measured[0].row.metrics["parameters"]
        if metrics:
            rows.append(Row(id=row, label=label, metrics=metrics))
    details = study.evidence(runs) | {"wall_s": study.seconds, "config": config.model_dump(mode="json")}
    paper = []
    if "listops" in tasks:
        details["listops_guesses"] = informed_guesses(
            config.tasks["listops"], runs["listops listops_s4"][0].tested, study.seeds[0]
        )
        paper = published(__file__)
    plots = {"accuracy": bars(rows, {task: task for task in tasks}, "right answers, %")}
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The state of a block-state layer solves recall by itself, and the sliding window does not."""
    values = {row.id: value_of(row.metrics["recall64"]) for row in rows if "recall64" in row.metrics}
    if not values:
        return []
    best, slide, bound = values["sh_delta"], values["slide"], UNSOLVED * values["random"]
    solved = f"the delta rule's layer recalls at least {SOLVED:g}%"
    unsolved = f"the sliding window recalls less than {UNSOLVED:g} times as much as guessing"
    return [aim(solved, "recall64", SOLVED, best, operator.ge), aim(unsolved, "recall64", bound, slide)]

"""Tasks that need a long memory: the end of a text asks for its beginning, many windows earlier.

A task consists of rows of ids and a mask of answers; only answers are trained and tested. Id 0 is padding.

- recall: the first window has pairs of a key and a value, noise follows, and the last window repeats every key with its
  value. An eighth of all possible pairs of key and value is held out; validation and test have only these.
  `recall64` is the same with as many pairs as fit into a window of 128 tokens.
- copy: values at random positions of the first half with noise between them, and all of them in order in the last
  window. An eighth of all pairs of neighbours is held out in the same way.
- listops: a nested expression (Long Range Arena), read in both directions. Each closing bracket asks for the value of
  its list; only the last one, that of the whole expression, is tested:

    [MAX 4 3 [MIN 2 3 ] 1 0 ]    answers 2 and 4

Operations are MAX, MIN, MED (the median, rounded down) and SM (the sum modulo ten). They have two to ten arguments and
a depth of at most ten. An operation with its bracket, the closing bracket and a digit are one token each.

The compared models are of equal size with one difference. Every row is trained on each task with the same steps and
examples, at the learning rate that its own search on validation examples chose.
"""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
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
from experiments.study import Study, aim, all_runs, bars, losses, metric, published, training_config
from graftlm.config import Config
from graftlm.data import NEW, Mixture, TokenBlocks
from graftlm.data.listops import OPERATIONS
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

PADDING_ID = 0
HELD_OUT = 8  # one pair in eight is held out


DIGIT_ID = 1 + len(OPERATIONS)
CLOSE_ID = DIGIT_ID + 10  # examples add the list's value to it, which models do not read
MAX_DEPTH = 10
MAX_ARGUMENTS = 10
DIGIT_PROBABILITY = 0.75


class TrainingStage(NamedTuple):
    """Training on new texts of one length.

    Attributes:
        length: tokens of a text; for listops the maximum, of which a fourth is the minimum.
        steps: number of steps.
        batch_size: texts of a step.
    """

    length: int
    steps: int
    batch_size: int


class MemoryTask(Config):
    """A task, its sizes, and the stages of its training.

    Args:
        name: kind of task; `listops_last` is listops with a single answer per text in training too.
        length: tokens of a row; listops has fewer, followed by padding.
        window: window of the models that learn it; the questions of recall and copy are in the last window.
        pairs: pairs of recall, or values of copy.
        keys: number of different keys.
        values: number of different values.
        noise: number of different noise tokens.
        shortest: fewest tokens of a listops expression.
        stages: stages of the training.
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
    """Examples of a task.

    Attributes:
        ids: (N, L) int64 ids.
        answers: (N, L) bool mask of answers.
    """

    ids: np.ndarray
    answers: np.ndarray


def make_examples(task: MemoryTask, count: int, seed: int, split: str) -> TaskExamples:
    """Return examples of a task, which depend on the seed and on the name of the split."""
    random = np.random.default_rng([seed, *split.encode()])
    is_training = split.startswith("train")
    if task.name == "recall":
        return _recall(task, count, random, held_out=not is_training)
    if task.name == "copy":
        return _copy(task, count, random, held_out=not is_training)
    every_list = task.name == "listops" and is_training
    return _listops(task, count, random, every_list=every_list)


def informed_guesses(task: MemoryTask, tested: int, seed: int) -> dict[str, float]:
    """Return the percentages of listops examples that simple features predict.

    A feature predicts the commonest result of the examples with the same feature, of which there are 8 times as many as
    `tested`.
    """
    known = make_examples(task, 8 * tested, seed, "guesses")
    test = make_examples(task, tested, seed, "test")
    features: dict[str, Callable[[np.ndarray], Any]] = {
        "the commonest result": _nothing,
        "that of the outermost operation": _outermost_operation,
        "that of its own digits": _of_own_digits,
    }
    return {name: _right_guesses(known, test, feature) for name, feature in features.items()}


def _right_guesses(known: TaskExamples, test: TaskExamples, feature: Callable[[np.ndarray], Any]) -> float:
    results: dict[Any, Counter[int]] = defaultdict(Counter)
    for row, result in zip(known.ids, known.ids[known.answers], strict=True):
        results[feature(row)][result] += 1
    guesses = []
    for row in test.ids:
        commonest = results[feature(row)].most_common(1)
        guesses.append(commonest[0][0] if commonest else PADDING_ID)
    is_right = test.ids[test.answers] == guesses
    return 100 * float(is_right.mean())


def _nothing(row: np.ndarray) -> None:
    """Return the same for every expression."""


def _outermost_operation(row: np.ndarray) -> int:
    return row[0]


def _of_own_digits(row: np.ndarray) -> tuple[int, int]:
    """Return the outermost operation of an expression and its value without the nested lists; -1 without digits."""
    opens = (row > PADDING_ID) & (row < DIGIT_ID)
    closes = row >= CLOSE_ID
    depth = opens.cumsum() - closes.cumsum()
    is_own_digit = (depth == 1) & (row >= DIGIT_ID) & ~closes
    digits = (row[is_own_digit] - DIGIT_ID).tolist()
    operation = tuple(OPERATIONS.values())[row[0] - 1]
    return row[0], operation(digits) if digits else -1


def _recall(task: MemoryTask, count: int, random: np.random.Generator, *, held_out: bool) -> TaskExamples:
    size = (count, task.pairs)
    ids = _noise(task, count, random)
    keys = _sample(random, count, task.keys, task.pairs)
    values = random.integers(task.values // HELD_OUT, size=size) * HELD_OUT
    shifts = 0 if held_out else random.integers(1, HELD_OUT, size=size)
    values += (keys + shifts) % HELD_OUT  # the pairs whose key and value have the same remainder are held out
    key_ids = 1 + keys
    value_ids = 1 + task.keys + values
    slots = np.sort(_sample(random, count, task.window // 2, task.pairs), axis=1)
    np.put_along_axis(ids, 2 * slots, key_ids, axis=1)
    np.put_along_axis(ids, 2 * slots + 1, value_ids, axis=1)
    order = _sample(random, count, task.pairs, task.pairs)
    first = task.length - 2 * task.pairs
    ids[:, first::2] = np.take_along_axis(key_ids, order, axis=1)
    ids[:, first + 1 :: 2] = np.take_along_axis(value_ids, order, axis=1)
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first + 1 :: 2] = True
    return TaskExamples(ids, answers)


def _copy(task: MemoryTask, count: int, random: np.random.Generator, *, held_out: bool) -> TaskExamples:
    size = (count, task.pairs)
    ids = _noise(task, count, random)
    if held_out:
        shifts = random.integers(0, 1, size=size)
    else:
        shifts = random.integers(1, HELD_OUT, size=size)
    shifts[:, 0] = random.integers(HELD_OUT, size=count)
    values = random.integers(task.values // HELD_OUT, size=size) * HELD_OUT
    values += 1 + task.keys + shifts.cumsum(axis=1) % HELD_OUT  # neighbours with the same remainder are held out
    positions = np.sort(_sample(random, count, task.length // 2, task.pairs), axis=1)
    np.put_along_axis(ids, positions, values, axis=1)
    first = task.length - task.pairs
    ids[:, first - 1] = task.vocab_size - 1  # the token that asks for the copy
    ids[:, first:] = values
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first:] = True
    return TaskExamples(ids, answers)


def _noise(task: MemoryTask, count: int, random: np.random.Generator) -> np.ndarray:
    noise = random.integers(task.noise, size=(count, task.length))
    return 1 + task.keys + task.values + noise


def _sample(random: np.random.Generator, rows: int, below: int, count: int) -> np.ndarray:
    """Return (rows, count) different numbers less than `below` in random order, for each row."""
    keys = random.random((rows, below))
    return np.argsort(keys, axis=1)[:, :count]


def _listops(task: MemoryTask, count: int, random: np.random.Generator, *, every_list: bool) -> TaskExamples:
    ids = np.full((count, task.length), PADDING_ID)
    stream = expressions(random, task.shortest, task.length - 1)
    for row, expression in enumerate(islice(stream, count)):
        ids[row, : len(expression)] = expression
    answers = ids >= CLOSE_ID
    if not every_list:
        is_last = np.roll(ids, -1, axis=1) == PADDING_ID
        answers = answers & is_last
    return TaskExamples(ids, answers)


def expressions(random: np.random.Generator, shortest: int, longest: int) -> Iterator[list[int]]:
    """Yield expressions within these lengths without end, as ids; a closing bracket has the value of its list."""
    draws = _draws(random)
    while True:
        ids: list[int] = []
        value = _write_list(draws, ids, 1, longest)
        if value is not None and shortest <= len(ids) <= longest:
            yield ids


def _draws(random: np.random.Generator) -> Iterator[float]:
    """Yield random numbers without end, drawn many at a time, because most expressions are rejected."""
    while True:
        yield from random.random(4096).tolist()


def _write_list(draws: Iterator[float], ids: list[int], depth: int, longest: int) -> int | None:
    """Append a random list to `ids` and return its value; None if it is too long."""
    operation = int(len(OPERATIONS) * next(draws))
    ids.append(1 + operation)
    arguments = 2 + int((MAX_ARGUMENTS - 1) * next(draws))
    values = []
    for _ in range(arguments):
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
    """A block-state model that predicts the value of each list at its closing bracket, which it reads without it.

    Logits are moved to the position before their bracket, where training and `accuracy` expect those of the next token.
    """

    config_class = ListValuesConfig

    def __init__(self, config: ListValuesConfig) -> None:
        super().__init__(config)
        self.model = BlockStateModel(config)
        self.head = nn.Linear(config.hidden_size, 10)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        """Return logits (B, T, ids) of ids (B, T)."""
        visible_ids = input_ids.clamp(max=CLOSE_ID)
        hidden = self.model(visible_ids, **more).last_hidden_state
        value_logits = self.head(hidden)
        logits = nn.functional.pad(value_logits, (CLOSE_ID, 0), value=-torch.inf)
        return CausalLMOutput(logits=logits.roll(-1, dims=1))


AutoConfig.register("list-values", ListValuesConfig)
AutoModelForCausalLM.register(ListValuesConfig, ListValues)


NAME = "long-memory"
# Rows of recall64 and copy.
SHORT = ("slide", "block_recurrent", "bst_sh_s4d", "slide_ssm", "sh_s4d", "sh_delta", "gated_delta", *PEERS)
SOLVED = 95.0  # accuracy in percent
UNSOLVED = 2.0  # factor on chance
_DEEP = {
    "model_type": "list-values",
    "num_hidden_layers": 6,
    "bidirectional": True,
    "positional_ssm": False,
}


class MemoryTaskRun(Run):
    """Train one model on one task in stages, and measure the percentage of correct answers.

    Args:
        task: the task.
        model: model config, with `model_type`.
        learning_rate: learning rate.
        tested: number of test examples, and of validation examples.
        seed: seed of weights and examples.
    """

    task: MemoryTask
    model: dict[str, Any]
    learning_rate: float = Field(gt=0)
    tested: int = Field(ge=1)
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        """Return the accuracy on validation and test, the number of parameters, and the losses."""
        torch.manual_seed(self.seed)
        model = new_model(self.model).to(PartialState().device)
        started = time.process_time()
        curve = []
        steps = 0
        for number, stage in enumerate(self.task.stages):
            stage_losses = self._train_stage(model, stage, context.folder / f"stage-{number}")
            curve += [[steps + step, loss] for step, loss in stage_losses]
            steps += stage.steps
        details = {
            "losses": curve,
            "training_cpu_s": round(time.process_time() - started, 1),
        }
        metrics: dict[str, Metric] = {"parameters": count_parameters(model.parameters())}
        for split in ("validation", "test"):
            examples = make_examples(self.task, self.tested, self.seed, split)
            metrics[split] = accuracy(model, examples, self.task.stages[-1].batch_size)
        metrics["validation_wrong"] = 100 - value_of(metrics["validation"])
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics), details)

    def _train_stage(self, model: Any, stage: TrainingStage, folder: Path) -> list[list[float]]:
        """Train for one stage and return its losses."""
        twentieth = max(1, stage.steps // 20)
        training = training_config(
            stage.steps,
            stage.batch_size,
            self.learning_rate,
            self.seed,
            warmup_steps=twentieth,
            log_every=twentieth,
        )
        changes = {
            "length": stage.length,
            "shortest": min(self.task.shortest, stage.length // 4),
        }
        task = self.task.model_copy(update=changes)
        examples = make_examples(task, stage.steps * stage.batch_size, self.seed, f"train-{stage.length}")
        mixture = Mixture({NEW: token_blocks(examples)}, {NEW: 1.0}, stage.batch_size, self.seed)
        summary = train(
            LanguageModel(model),
            mixture,
            training,
            folder,
            identity={"run": self.settings()},
            progress=False,
        )
        return losses(summary.history)


def token_blocks(examples: TaskExamples) -> TokenBlocks:
    """Return rows for the training loop, whose labels are the answers."""
    marked = np.where(examples.answers, examples.ids, examples.ids | PROMPT).astype(np.int32)
    marked[examples.ids == PADDING_ID] = PADDING
    return TokenBlocks(marked, boundaries="joined", pad_id=PADDING_ID)


def accuracy(model: Any, examples: TaskExamples, batch_size: int) -> float:
    """Return the percentage of answers that are the most likely token at their position."""
    ids = torch.from_numpy(examples.ids).to(model.device)
    answers = torch.from_numpy(examples.answers).to(model.device)
    correct = 0
    with evaluation_mode(model), torch.inference_mode():
        for batch, is_answer in zip(ids.split(batch_size), answers.split(batch_size), strict=True):
            mask = (batch != PADDING_ID).long()
            more = {} if bool(mask.all()) else {"attention_mask": mask}
            logits = model(input_ids=batch, use_cache=False, **more).logits
            predicted = logits[:, :-1].argmax(dim=-1)
            is_right = predicted == batch[:, 1:]
            is_right_answer = is_right & is_answer[:, 1:]
            correct += int(is_right_answer.sum())
    return 100 * correct / int(answers.sum())


class LongMemoryConfig(Config):
    """Tasks and sizes.

    Args:
        tasks: tasks, by name.
        shape: keys of the model config that all rows share.
        parameters: parameters of every row's model, up to rounding.
        rates: learning rates of the search.
        tested: number of test examples.
        shape_of: other keys of the model config, by task.
        parameters_of: parameters of the tasks that differ.
        rates_of: learning rates of the tasks that differ.
        tested_of: number of test examples of the tasks that differ.
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


_EIGHT_PAIRS: Any = {
    "length": 256,
    "window": 16,
    "pairs": 8,
    "keys": 64,
    "values": 64,
    "noise": 64,
    "stages": ((48, 600, 32), (96, 300, 32), (256, 300, 16)),
}
_FULL_WINDOW: Any = {
    **_EIGHT_PAIRS,
    "length": 2048,
    "window": 128,
    "pairs": 64,
    "stages": ((384, 100, 32), (768, 50, 32), (2048, 50, 16)),
}
_NESTED: Any = (
    (16, 400, 16),
    (32, 200, 16),
    (64, 60, 16),
    (128, 40, 16),
    (256, 20, 16),
    (512, 10, 16),
    (2000, 6, 8),
)
_SHAPE = {
    "hidden_size": 64,
    "state_width": 64,  # the default is a fourth of the width: 16 numbers for the whole text
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mixer_layers": [1],
    "filters": 16,
    "initializer_range": 0.125,  # 1 / sqrt(width): with 0.02 the attention is too uniform to learn
}
FULL = LongMemoryConfig(
    tasks={
        "recall": MemoryTask(name="recall", **_EIGHT_PAIRS),
        "recall64": MemoryTask(name="recall", **_FULL_WINDOW),
        "copy": MemoryTask(name="copy", **_EIGHT_PAIRS),
        "listops": MemoryTask(name="listops", length=2000, window=64, stages=_NESTED),
    },
    shape=_SHAPE,
    parameters=150_000,
)
_SHORT_TASK = {
    "length": 64,
    "window": 8,
    "pairs": 2,
    "shortest": 10,
    "stages": ((24, 1, 2), (64, 1, 2)),
}
QUICK = LongMemoryConfig(
    tasks={name: MemoryTask.parse({**task.model_dump(), **_SHORT_TASK}) for name, task in FULL.tasks.items()},
    shape={
        **_SHAPE,
        "hidden_size": 16,
        "state_width": 4,
        "num_attention_heads": 2,
        "filters": 4,
    },
    parameters=12_000,
    parameters_of={"listops": 50_000},
    tested=4,
)


def rows_of(name: str) -> dict[str, str]:
    """Return labels of the rows of a task; listops has its own rows, all others have controls and peers."""
    if name == "listops":
        return LISTS
    rows = LABELS | CONTROLS | PEERS
    if name in ("recall64", "copy"):
        return {row: rows[row] for row in SHORT}
    return rows


def memory_run(config: LongMemoryConfig, row: str, name: str, seed: int, rate: float) -> MemoryTaskRun:
    """Return the run of one row on the task `name`."""
    task = config.tasks[name]
    if row == "listops_bst_s4_last":
        task = task.model_copy(update={"name": "listops_last"})
    shape = {
        **config.shape,
        "window": task.window,
        "kernel_length": task.length,
        "vocab_size": task.vocab_size,
        **config.shape_of.get(name, {}),
    }
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
    config = QUICK if options.quick else FULL
    tasks = options.chosen(tuple(FULL.tasks))
    study = Study(options)
    cells = {f"{task} {row}": (row, task) for task in tasks for row in rows_of(task)}
    candidates = {}
    for name, (row, task) in cells.items():
        rates_of_task = config.rates_of.get(task, config.rates)
        candidates[name] = [memory_run(config, row, task, study.seeds[0], rate) for rate in rates_of_task]
    chosen = study.choose(candidates, ["validation_wrong"], "the search")
    runs = {}
    for name, (row, task) in cells.items():
        rate = chosen[name].learning_rate
        runs[name] = [memory_run(config, row, task, seed, rate) for seed in study.seeds]
    study.execute(all_runs(runs), NAME)
    rows = _rows(study, config, tasks, runs)
    details = {
        **study.evidence(runs),
        "wall_s": study.seconds,
        "config": config.model_dump(mode="json"),
    }
    paper = []
    if "listops" in tasks:
        tested = runs["listops listops_s4"][0].tested
        details["listops_guesses"] = informed_guesses(config.tasks["listops"], tested, study.seeds[0])
        paper = published(__file__)
    plots = {"accuracy": bars(rows, {task: task for task in tasks}, "right answers, %")}
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def _rows(
    study: Study,
    config: LongMemoryConfig,
    tasks: Sequence[str],
    runs: Mapping[str, Sequence[MemoryTaskRun]],
) -> list[Row]:
    """Return guessing and all rows, with one metric for each task."""
    chance: dict[str, Metric] = {}
    for task in tasks:
        outcomes = 10 if task == "listops" else config.tasks[task].values
        chance[task] = 100 / outcomes
    rows = [Row(id="random", label="guessing", metrics=chance)]
    for row, label in (LABELS | CONTROLS | PEERS | LISTS).items():
        metrics: dict[str, Metric] = {}
        for task in tasks:
            if row not in rows_of(task):
                continue
            measured = [study.measured[run.id] for run in runs[f"{task} {row}"]]
            metrics[task] = combine_seeds([metric(measurement, "test") for measurement in measured])
            metrics["parameters"] = measured[0].row.metrics["parameters"]
        if metrics:
            rows.append(Row(id=row, label=label, metrics=metrics))
    return rows


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims: a block-state layer solves recall by its state alone, and the sliding window does not."""
    values = {row.id: value_of(row.metrics["recall64"]) for row in rows if "recall64" in row.metrics}
    if not values:
        return []
    return [
        aim(
            f"the delta rule's layer recalls at least {SOLVED:g}%",
            "recall64",
            SOLVED,
            values["sh_delta"],
            operator.ge,
        ),
        aim(
            f"the sliding window recalls less than {UNSOLVED:g} times as much as guessing",
            "recall64",
            UNSOLVED * values["random"],
            values["slide"],
        ),
    ]

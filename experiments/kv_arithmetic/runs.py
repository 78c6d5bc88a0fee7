"""The runs: two models made here from nothing, and rows that compose them or train on what composing takes.

m_A memorises keys. It reads substitutions over all keys, but those that are tested, and never a result. m_B computes.
It reads sums of numbers, some behind text that says nothing about them, and never a key. It predicts what follows a
sum, and behind other text the sum's own characters as well. A row is a parent as it is, or a graft on m_B that is
trained on the joint data D_C.

m_A and the joint data are not trained on test expressions. m_B's stream does not exclude them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import set_seed
from pydantic import Field
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiments.kv_arithmetic.data import (
    COMPUTE,
    END,
    SUBSTITUTE,
    ArithmeticTask,
    Expression,
    Form,
    Pairs,
    World,
    make_pairs,
    make_tokenizer,
    noise,
    tasks,
    word,
)
from experiments.study import losses, training_config
from graftlm.backbone import load_backbone, padding_id
from graftlm.config import Config
from graftlm.data import NEW, Document, Mixture, pack
from graftlm.evaluation import Row
from graftlm.evaluation.examples import generate_answers
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel

METRICS = (
    "subs_held_in",
    "subs_held_out",
    "num_math",
    "kv_math_held_in",
    "kv_math_held_out",
    "kv_math_direct_held_out",
)


class Exam(Config):
    """Numbers of different expressions.

    Args:
        expressions: of test expressions over keys held in, and over keys held out.
        validation: of expressions over keys held out, used only to choose settings.
    """

    expressions: int = Field(300, ge=1)
    validation: int = Field(200, ge=1)


@dataclass(frozen=True)
class Questions:
    """The test and validation tasks of one seed."""

    held_in: tuple[ArithmeticTask, ...]
    held_out: tuple[ArithmeticTask, ...]
    validation: tuple[ArithmeticTask, ...]

    def expressions(self) -> set[Expression]:
        """All expressions, over keys and over numbers."""
        all_tasks = (*self.held_in, *self.held_out, *self.validation)
        return {task.keys for task in all_tasks} | {task.numbers for task in all_tasks}


def make_exam(world: World, pairs: Pairs, exam: Exam, seed: int) -> Questions:
    """The questions of a seed."""
    source = random.Random(f"exam {seed}")

    def unique(keys: Sequence[str], count: int) -> tuple[ArithmeticTask, ...]:
        chosen: dict[Expression, ArithmeticTask] = {}
        for task in islice(tasks(world, pairs, keys, source, chosen), count):
            chosen[task.keys] = task
        return tuple(chosen.values())

    held_in = unique(pairs.held_in, exam.expressions)
    held_out = unique(pairs.held_out, exam.expressions + exam.validation)
    return Questions(held_in, held_out[: exam.expressions], held_out[exam.expressions :])


def examine(model: Any, tokenizer: Any, questions: Questions) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Percentages by metric, and those of the arithmetic tests by operation or number of operands."""
    marks: dict[str, list[bool]] = {}
    for name, test_tasks in (("held_in", questions.held_in), ("held_out", questions.held_out)):
        answered = _answered(model, tokenizer, test_tasks, "scratchpad")
        marks[f"subs_{name}"] = [substituted(answer) == task.completion("substitution") for task, answer in answered]
        marks[f"kv_math_{name}"] = [COMPUTE in answer and result(answer) == task.result for task, answer in answered]
    alone: dict[str, Form] = {"num_math": "numeric", "kv_math_direct_held_out": "direct"}
    for name, form in alone.items():
        answered = _answered(model, tokenizer, questions.held_out, form)
        marks[name] = [answer == task.result for task, answer in answered]
    by_kind = {
        name: _by_kind(questions.held_out, marks[name]) for name in METRICS if name in ("kv_math_held_out", *alone)
    }
    return {name: percent(marks[name]) for name in METRICS}, by_kind


def percent(marks: Sequence[bool]) -> float:
    """The share of True, out of 100."""
    return 100 * float(np.mean(marks))


def substituted(answer: str) -> str:
    """The substitution in an answer: the text before the result."""
    return answer.split(COMPUTE, 1)[0]


def result(answer: str) -> str:
    """The result in an answer: the text after the last equals sign, or the whole answer."""
    return answer.rsplit(COMPUTE, 1)[-1]


def _answered(
    model: Any, tokenizer: Any, test_tasks: Sequence[ArithmeticTask], form: Form
) -> list[tuple[ArithmeticTask, str]]:
    prompts = [task.prompt(form) for task in test_tasks]
    longest = max(len(task.completion(form)) for task in test_tasks) + len(END)
    answers = generate_answers(model, tokenizer, prompts, max_new_tokens=longest, stop=(END,), batch_size=256)
    return list(zip(test_tasks, answers, strict=True))


def _by_kind(test_tasks: Sequence[ArithmeticTask], marks: Sequence[bool]) -> dict[str, float]:
    """Percentages by operation, or by the number of operands where some have more than two."""
    of_two = all(len(task.keys.operands) == 2 for task in test_tasks)
    kinds = [task.keys.operations if of_two else f"{len(task.keys.operands)} operands" for task in test_tasks]
    return {
        kind: percent([mark for own, mark in zip(kinds, marks, strict=True) if own == kind])
        for kind in sorted(set(kinds))
    }


Role = Literal["memory", "arithmetic", "random"]


class ModelShape(Config):
    """The shape of a Llama. `spread` is the initial standard deviation, `theta` the base of its rotary positions."""

    width: int = Field(64, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(192, ge=8)
    spread: float = Field(0.1, gt=0)
    theta: float = Field(100.0, gt=1)


class TrainingLength(Config):
    """How long a model trains: `examples` are drawn once, and read as often as `steps` of `batch_size` need."""

    steps: int = Field(ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    examples: int = Field(30_000, ge=1)

    def training(self, seed: int, rate: float | None = None) -> TrainingConfig:
        """The config of the training loop."""
        warmup, log_every = max(1, min(50, self.steps // 10)), max(1, self.steps // 100)
        rate = rate or self.learning_rate
        return training_config(self.steps, self.batch_size, rate, seed, warmup_steps=warmup, log_every=log_every)


class ParentRun(Run):
    """Train one parent; `random` is m_A with its random weights.

    Args:
        noise: share of m_B's sums that stand behind other text.
        named: share of m_B's sums over words that the text before gives values, `xyz210uvw430>xyz+uvw=640`.
    """

    role: Role
    world: World
    exam: Exam
    shape: ModelShape
    length: TrainingLength
    noise: float = Field(0.2, ge=0, le=1)
    named: float = Field(0.0, ge=0, le=1)
    seed: int = 0

    def artefacts(self) -> tuple[str, ...]:
        return ("config.json", "tokenizer.json")

    def measure(self, context: RunContext) -> Measurement:
        tokenizer = make_tokenizer()
        torch.manual_seed(2 * self.seed + (self.role == "arithmetic"))  # two models of one shape start apart
        model = _llama(self.shape, tokenizer)
        metrics: dict[str, Any] = {}
        if self.role != "random":
            examples = list(islice(documents(self), self.length.examples))
            batches = make_batches(examples, tokenizer, self.length.batch_size, self.seed)
            training = self.length.training(self.seed)
            folder, identity = context.folder / "training", {"run": context.key}
            summary = train(LanguageModel(model), batches, training, folder, identity=identity, progress=False)
            metrics = {"steps": summary.steps, "tokens": summary.tokens, "loss": summary.loss}
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.role, metrics=metrics))


def documents(run: ParentRun) -> Iterator[Document]:
    """The endless training documents of a parent."""
    world, pairs = run.world, make_pairs(run.world, run.seed)
    source = random.Random(f"{run.role} {run.seed}")
    if run.role == "memory":
        tested = make_exam(world, pairs, run.exam, run.seed).expressions()
        return (task.document("substitution") for task in tasks(world, pairs, tuple(pairs.values), source, tested))
    return _sums(run, pairs, source)


def _sums(run: ParentRun, pairs: Pairs, source: random.Random) -> Iterator[Document]:
    world, names = run.world, pairs.values
    # Products are the hardest, so they come twice as often.
    practised = world.model_copy(update={"operations": world.operations + "*" * world.operations.count("*")})
    for task in tasks(practised, pairs, tuple(names), source):
        before, expression, predicted = "", task.numbers, False
        kind = source.random()
        if kind < run.named:
            words = tuple(word(world, source, names) for _ in expression.operands)
            before = "".join(map("".join, zip(words, expression.operands, strict=True))) + SUBSTITUTE
            expression = Expression(words, expression.operations)
        elif kind < run.named + run.noise:
            before, predicted = noise(world, source, names), True
        known, rest = ("", f"{expression}") if predicted else (f"{expression}", "")
        yield Document(f"{rest}{COMPUTE}{task.result}{END}", prompt=f"{before}{known}")


def make_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int
) -> Mixture:
    """Batches of rows as long as the longest document, or as two of the shortest where that needs fewer tokens."""
    by_length = sorted(documents, key=lambda document: len(document.full_text))  # those that share a row are neighbours
    longest, shortest = len(by_length[-1].full_text), len(by_length[0].full_text)  # a character is a token
    lengths = {longest, max(longest, 2 * shortest)}
    candidates = (pack(by_length, tokenizer, length, boundaries="whole") for length in lengths)
    blocks = min(candidates, key=lambda candidate: candidate.marked.size)
    return Mixture({NEW: blocks}, {NEW: 1.0}, batch_size, seed)


def _llama(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=512,
        initializer_range=shape.spread,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=padding_id(tokenizer),
    )
    return LlamaForCausalLM(config)


class JointData(Config):
    """The content of D_C, all of it over the keys that are held in.

    Args:
        task: `arithmetic` over keys, as in section 3.2 of the paper; `substitution`, as in section 4.1; or a `mixture`,
            half of each.
        form: how arithmetic over keys is written.
        numeric: share of sums of numbers, which keep m_B's own task.
        direct: share of the arithmetic in the direct form, whatever `form` is.
    """

    task: Literal["arithmetic", "substitution", "mixture"] = "arithmetic"
    form: Literal["scratchpad", "direct"] = "scratchpad"
    numeric: float = Field(0.2, ge=0, le=1)
    direct: float = Field(0.0, ge=0, le=1)


class KvArithmeticRun(Run):
    """A row for one seed. The first dependency is the model; a second one is the model that a composition reads.

    Args:
        graft: None measures the first dependency as it is.
        validation: measure on the validation expressions alone.
    """

    world: World
    exam: Exam
    graft: dict[str, Any] | None = None
    joint: JointData = Field(default_factory=JointData)
    length: TrainingLength
    rate: float | None = None
    validation: bool = False
    seed: int = 0

    def questions(self) -> tuple[Pairs, Questions]:
        """Keys with their values, and the test questions of the seed."""
        pairs = make_pairs(self.world, self.seed)
        return pairs, make_exam(self.world, pairs, self.exam, self.seed)

    def measure(self, context: RunContext) -> Measurement:
        folder, *others = context.dependencies.values()
        backbone = load_backbone(folder)
        if self.graft is None:
            return self._examine(backbone.model, backbone.need_tokenizer())
        graft = dict(self.graft)
        for other in others:
            graft["augmenting"] = {"memory": graft.get("augmenting", {}) | {"name": str(other)}}
        examples = list(islice(joint_documents(self), self.length.examples))
        batches = make_batches(examples, backbone.need_tokenizer(), self.length.batch_size, self.seed)
        set_seed(self.seed)
        started = time.process_time()
        with GraftedModel(backbone, {"graft": build_graft(graft_config(graft), backbone)}) as model:
            training = self.length.training(self.seed, self.rate)
            identity = {"run": context.key}
            summary = train(model, batches, training, context.folder, identity=identity, progress=False)
            measurement = self._examine(model, backbone.need_tokenizer())
            measurement.details["cost"] = {
                "trainable_parameters": count_parameters(model.trainable_parameters().values()),
                "training_cpu_s": round(time.process_time() - started, 1),
                "learning_rate": training.learning_rate,
            }
            measurement.details["losses"] = losses(summary.history)
        return measurement

    def _examine(self, model: Any, tokenizer: Any) -> Measurement:
        _, questions = self.questions()
        if self.validation:
            answered = _answered(model, tokenizer, questions.validation, self.joint.form)
            metrics = {"validation": percent([result(answer) == task.result for task, answer in answered])}
            details = {}
        else:
            metrics, operations = examine(model, tokenizer, questions)
            details = {"operations": operations}
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics={**metrics}), details)


def joint_documents(run: KvArithmeticRun) -> Iterator[Document]:
    """D_C, endless: over keys held in, without the expressions that are tested."""
    pairs, questions = run.questions()
    source = random.Random(f"joint {run.seed}")
    for task in tasks(run.world, pairs, pairs.held_in, source, questions.expressions()):
        form = _form(run.joint, source)
        if form == "substitution":  # without an end, it leaves open how m_B continues
            yield Document(task.completion(form), prompt=task.prompt(form))
        else:
            yield task.document(form)


def _form(joint: JointData, source: random.Random) -> Form:
    if source.random() < joint.numeric:
        return "numeric"
    if joint.task == "substitution" or (joint.task == "mixture" and source.random() < 0.5):
        return "substitution"
    return "direct" if source.random() < joint.direct else joint.form

"""The runs: two models that are trained here, and rows that compose them or train one of them on the same data.

m_A memorises keys. It reads substitutions over all keys except the tested ones, and never a result. m_B computes. It
reads sums of numbers, some of them after unrelated text, and never a key. It predicts what follows a sum, and after
other text the sum's own characters as well. A row is a parent without training, or a graft on m_B that is trained on
the joint data D_C.

No training data contains a test or validation expression as numbers, in any order of operands that gives the same
result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from string import ascii_lowercase
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import set_seed
from pydantic import Field
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiments.kv_arithmetic.data import (
    COMPUTE,
    END,
    ArithmeticTask,
    Expression,
    Form,
    Pairs,
    World,
    letters,
    make_pairs,
    make_tokenizer,
    noise,
    tasks,
)
from experiments.kv_arithmetic.rivals import Answer, Rival, answers_of, mixture, pipeline
from experiments.study import losses, training_config
from graftlm.backbone import Backbone, load_backbone, padding_id
from graftlm.config import Config
from graftlm.data import NEW, Document, Mixture, pack
from graftlm.evaluation import Row
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.run import Run, RunContext
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
VALIDATION_FORMS: tuple[Form, ...] = ("scratchpad", "direct")


class Exam(Config):
    """Numbers of different expressions.

    Args:
        expressions: test expressions over keys held out.
        held_in: test expressions over keys held in; few, so that products remain for D_C.
        validation: expressions over other keys held out, used only to choose settings.
    """

    expressions: int = Field(300, ge=1)
    held_in: int = Field(100, ge=1)
    validation: int = Field(200, ge=1)


@dataclass(frozen=True)
class Questions:
    """The test and validation tasks of one seed."""

    held_in: tuple[ArithmeticTask, ...]
    held_out: tuple[ArithmeticTask, ...]
    validation: tuple[ArithmeticTask, ...]

    def expressions(self) -> set[Expression]:
        """Return all expressions over keys and over numbers, with sorted operands."""
        expressions: set[Expression] = set()
        for task in (*self.held_in, *self.held_out, *self.validation):
            expressions.update(task.expressions())
        return expressions


def make_exam(world: World, pairs: Pairs, exam: Exam, seed: int) -> Questions:
    """Return the questions of a seed."""
    source = random.Random(f"exam {seed}")
    drawn: set[Expression] = set()

    def unique(keys: Sequence[str], count: int) -> tuple[ArithmeticTask, ...]:
        chosen: list[ArithmeticTask] = []
        for task in islice(tasks(world, pairs, keys, source, drawn), count):
            drawn.update(task.expressions())
            chosen.append(task)
        return tuple(chosen)

    quarter = len(pairs.held_out) // 4
    return Questions(
        held_in=unique(pairs.held_in, exam.held_in),
        held_out=unique(pairs.held_out[quarter:], exam.expressions),
        validation=unique(pairs.held_out[:quarter], exam.validation),
    )


def examine(answer: Answer, questions: Questions) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return percentages of right answers by metric, and those of the arithmetic tests by operation."""
    marks: dict[str, list[bool]] = {}
    for name, test_tasks in (("held_in", questions.held_in), ("held_out", questions.held_out)):
        answers = answer(test_tasks, "scratchpad")
        marks[f"subs_{name}"] = []
        marks[f"kv_math_{name}"] = []
        for task, text in zip(test_tasks, answers, strict=True):
            is_substituted = substituted(text) == task.completion("substitution")
            is_right = COMPUTE in text and result(text) == task.result
            marks[f"subs_{name}"].append(is_substituted)
            marks[f"kv_math_{name}"].append(is_right)
    marks["num_math"] = right(answer, questions.held_out, "numeric")
    marks["kv_math_direct_held_out"] = right(answer, questions.held_out, "direct")
    by_operation = {}
    for name in ("num_math", "kv_math_held_out", "kv_math_direct_held_out"):
        by_operation[name] = _by_operation(questions.held_out, marks[name])
    return {name: percent(marks[name]) for name in METRICS}, by_operation


def right(answer: Answer, test_tasks: Sequence[ArithmeticTask], form: Form) -> list[bool]:
    """Return whether each answer gives the task's result."""
    answers = answer(test_tasks, form)
    return [result(text) == task.result for task, text in zip(test_tasks, answers, strict=True)]


def percent(marks: Sequence[bool]) -> float:
    """Return the percentage of True."""
    return 100 * float(np.mean(marks))


def substituted(answer: str) -> str:
    """Return the substitution in an answer: the text before the result."""
    return answer.split(COMPUTE, 1)[0]


def result(answer: str) -> str:
    """Return the result in an answer: the text after the last equals sign, or the whole answer."""
    return answer.rsplit(COMPUTE, 1)[-1]


def _by_operation(test_tasks: Sequence[ArithmeticTask], marks: Sequence[bool]) -> dict[str, float]:
    """Return percentages of right answers by operation."""
    marks_by_operation: dict[str, list[bool]] = {}
    for task, mark in zip(test_tasks, marks, strict=True):
        marks_by_operation.setdefault(task.keys.operation, []).append(mark)
    return {operation: percent(marks_by_operation[operation]) for operation in sorted(marks_by_operation)}


Role = Literal["memory", "arithmetic", "random"]


class ModelShape(Config):
    """The shape of a Llama.

    Args:
        width: width of the model.
        layers: number of layers.
        heads: number of attention heads.
        inner: width of the FFNs.
        spread: standard deviation of the initial weights.
        theta: base of the rotary positions.
        starts_at: first layer that is not the identity. A composition writes after a layer, so it can write what this
            layer reads.
        attends_from: first layer with attention; earlier layers read each token separately.
    """

    width: int = Field(64, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(192, ge=8)
    spread: float = Field(0.1, gt=0)
    theta: float = Field(100.0, gt=1)
    starts_at: int = Field(0, ge=0)
    attends_from: int = Field(0, ge=0)


class TrainingLength(Config):
    """Length of a training. Examples are drawn once, and repeated as often as the steps need.

    Args:
        steps: number of steps.
        batch_size: rows of a step.
        learning_rate: learning rate.
        examples: number of examples.
    """

    steps: int = Field(ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    examples: int = Field(30_000, ge=1)

    def training(self, seed: int, rate: float | None = None) -> TrainingConfig:
        """Return the config of the training loop."""
        return training_config(
            self.steps,
            self.batch_size,
            rate or self.learning_rate,
            seed,
            warmup_steps=max(1, min(50, self.steps // 10)),
            log_every=max(1, self.steps // 100),
        )


class ParentRun(Run):
    """Train one parent; `random` is m_A with its random weights.

    Args:
        role: role of the parent.
        world: form of keys, numbers and expressions.
        exam: numbers of tested expressions, which the parent never reads.
        shape: shape of the model.
        length: length of the training.
        noise: share of m_B's sums that follow other text.
        spaced: share of m_B's sums that have letters before the numbers, fewer than a key has: `xy#012+z#034=640`.
        spelled: share of m_B's documents that write the digits of a number: `#012=210`.
        disturbed: standard deviation of noise on m_B's embeddings of numbers in training, so that it also reads
            approximate embeddings of numbers.
        alike: give all letters and keys the same small vector in m_B, so that a number can be written over any of them.
        recall: share of m_A's documents in which a number directly follows its key: `abc+def` and `#034`.
        seed: seed of keys, weights and data.
    """

    role: Role
    world: World
    exam: Exam
    shape: ModelShape
    length: TrainingLength
    noise: float = Field(0.1, ge=0, le=1)
    spaced: float = Field(0.4, ge=0, le=1)
    spelled: float = Field(0.1, ge=0, le=1)
    disturbed: float = Field(0.07, ge=0)
    alike: bool = True
    recall: float = Field(0.5, ge=0, le=1)
    seed: int = 0

    def artefacts(self) -> tuple[str, ...]:
        return ("config.json", "tokenizer.json")

    def measure(self, context: RunContext) -> Measurement:
        names = make_pairs(self.world, self.seed).values
        tokenizer = make_tokenizer(self.world, names)
        computes = self.role == "arithmetic"
        # Two models of one shape have different random weights.
        torch.manual_seed(2 * self.seed + (1 if computes else 0))
        model = _llama(self.shape, tokenizer)
        _set_numbers(model, tokenizer, self.world)
        if self.alike and computes:
            _set_names(model, tokenizer, names)
        metrics: dict[str, Any] = {}
        if self.role != "random":
            if self.disturbed and computes:
                first_number = len(tokenizer) - self.world.largest if self.world.whole else len(tokenizer)
                hook = partial(_disturb, self.disturbed, first_number)
                model.get_input_embeddings().register_forward_hook(hook)
            metrics = self._train(model, tokenizer, context)
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.role, metrics=metrics))

    def _train(self, model: Any, tokenizer: PreTrainedTokenizerBase, context: RunContext) -> dict[str, Any]:
        examples = list(islice(documents(self), self.length.examples))
        batches = make_batches(examples, tokenizer, self.length.batch_size, self.seed)
        summary = train(
            LanguageModel(model),
            batches,
            self.length.training(self.seed),
            context.folder / "training",
            identity={"run": context.key},
            progress=False,
        )
        return {"steps": summary.steps, "tokens": summary.tokens, "loss": summary.loss}


def documents(run: ParentRun) -> Iterator[Document]:
    """Return the endless training documents of a parent, without the expressions that are tested."""
    pairs = make_pairs(run.world, run.seed)
    tested = make_exam(run.world, pairs, run.exam, run.seed).expressions()
    source = random.Random(f"{run.role} {run.seed}")
    if run.role == "memory":
        return _values(run, pairs, tested, source)
    return _sums(run, pairs, tested, source)


def _values(run: ParentRun, pairs: Pairs, tested: set[Expression], source: random.Random) -> Iterator[Document]:
    for task in tasks(run.world, pairs, tuple(pairs.values), source, tested):
        if source.random() >= run.recall:
            yield task.document("substitution")
        elif source.random() < 0.5:
            yield task.document("recall")
        else:
            yield Document(task.numbers.first + END, prompt=task.keys.first)


def _sums(run: ParentRun, pairs: Pairs, tested: set[Expression], source: random.Random) -> Iterator[Document]:
    world = run.world
    names = pairs.values
    # Products are the hardest operation, so they occur twice as often.
    operations = world.operations + "*" * world.operations.count("*")
    practised = world.model_copy(update={"operations": operations})
    for task in tasks(practised, pairs, tuple(names), source, tested):
        numbers = task.numbers
        answer = f"{COMPUTE}{task.result}{END}"
        kind = source.random()
        if kind < run.noise:
            yield Document(f"{numbers}{answer}", prompt=noise(world, source, names))
        elif kind < run.noise + run.spaced:
            before_first = letters(source, source.randrange(world.letters))
            before_second = letters(source, source.randrange(world.letters))
            first = f"{before_first}{numbers.first}"
            second = f"{before_second}{numbers.second}"
            yield Document(answer, prompt=f"{first}{numbers.operation}{second}")
        elif kind < run.noise + run.spaced + run.spelled:
            spelled = world.spelled(numbers.first)
            yield Document(f"{COMPUTE}{spelled}{END}", prompt=numbers.first)
        else:
            yield Document(answer, prompt=f"{numbers}")


def make_batches(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    seed: int,
) -> Mixture:
    """Return batches of rows as long as the longest document, or as two of the shortest if that takes fewer tokens."""
    sizes = {document: len(tokenizer.tokenize(document.full_text)) for document in documents}
    # Consecutive documents share a row.
    by_length = sorted(documents, key=sizes.__getitem__)
    longest = sizes[by_length[-1]]
    shortest = sizes[by_length[0]]
    lengths = {longest, max(longest, 2 * shortest)}
    candidates = [pack(by_length, tokenizer, length, boundaries="whole") for length in lengths]
    blocks = min(candidates, key=lambda candidate: candidate.marked.size)
    return Mixture({NEW: blocks}, {NEW: 1.0}, batch_size, seed)


def _disturb(
    spread: float,
    first_number: int,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor],
    embedded: torch.Tensor,
) -> torch.Tensor:
    """Add noise to the embeddings of numbers in training; a forward hook of the embeddings."""
    is_number = (inputs[0] >= first_number)[..., None]
    noise = spread * torch.randn_like(embedded) * is_number
    return embedded + noise if module.training else embedded


def _set_numbers(model: Any, tokenizer: PreTrainedTokenizerFast, world: World) -> None:
    """Set and freeze the embeddings of whole numbers: the sum of one vector for each digit at its place.

    These vectors are orthogonal if the width allows it.
    """
    if not world.whole:
        return
    weight = model.get_input_embeddings().weight
    vocabulary = tokenizer.get_vocab()
    values = range(1, world.largest + 1)
    ids = torch.tensor([vocabulary[world.number(value)] for value in values])
    digits = torch.tensor([[int(digit) for digit in world.result(value)] for value in values])
    width = weight.shape[1]
    with torch.no_grad():
        vectors = torch.nn.init.orthogonal_(torch.empty(10 * world.digits, width))
        vectors = vectors.unflatten(0, (world.digits, 10))
        vectors *= model.config.initializer_range * width**0.5
        weight[ids] = sum(vectors[power, digits[:, power]] for power in range(world.digits))
    _freeze_rows(weight, ids)


def _set_names(model: Any, tokenizer: PreTrainedTokenizerFast, names: Iterable[str]) -> None:
    """Set the embeddings of letters and of names that are tokens to the same small vector, and freeze them.

    The vector is not zero, because the gradient of a norm is unbounded there.
    """
    weight = model.get_input_embeddings().weight
    alike = {*ascii_lowercase, *names}
    ids = torch.tensor([id_ for token, id_ in tokenizer.get_vocab().items() if token in alike])
    weight.data[ids] = weight.data[ids[0]] / 2
    _freeze_rows(weight, ids)


def _freeze_rows(weight: torch.Tensor, ids: torch.Tensor) -> None:
    weight.register_hook(lambda gradient: gradient.index_fill(0, ids, 0.0))


def _llama(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> Any:
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
    model = LlamaForCausalLM(config)
    layers: Any = model.model.layers
    without_attention = max(shape.starts_at, shape.attends_from)
    silenced = [layer.mlp.down_proj.weight for layer in layers[: shape.starts_at]]
    silenced += [layer.self_attn.o_proj.weight for layer in layers[:without_attention]]
    for weight in silenced:
        weight.data.zero_()
        weight.register_hook(torch.zeros_like)
    return model


class JointData(Config):
    """The content of D_C, which only has keys that are held in.

    Args:
        task: `arithmetic` over keys, as in section 3.2 of the paper; `substitution`, as in section 4.1; or a `mixture`,
            half of each.
        numeric: share of sums of numbers, which keep m_B's own task.
        direct: share of the arithmetic in the direct form; the rest has the scratchpad form.
        spelled: share of documents that ask for the digits of one key's value: `abc=` and `210`.
    """

    task: Literal["arithmetic", "substitution", "mixture"] = "arithmetic"
    numeric: float = Field(0.2, ge=0, le=1)
    direct: float = Field(0.5, ge=0, le=1)
    spelled: float = Field(0.2, ge=0, le=1)


class KvArithmeticRun(Run):
    """A row with one seed. The first dependency is m_B; a second one is m_A.

    Args:
        world: form of keys, numbers and expressions.
        exam: numbers of tested expressions.
        graft: graft on m_B, trained on D_C; without it nothing is trained.
        rival: how m_A and m_B answer without a graft; None measures the first dependency alone.
        weight: weight of m_A in a mixture.
        joint: content of D_C.
        length: length of the training.
        rate: learning rate; by default that of `length`.
        validation: measure on the validation expressions only.
        seed: seed of keys, weights and data.
    """

    world: World
    exam: Exam
    graft: dict[str, Any] | None = None
    rival: Rival | None = None
    weight: float = 0.5
    joint: JointData = Field(default_factory=JointData)
    length: TrainingLength
    rate: float | None = None
    validation: bool = False
    seed: int = 0

    def questions(self) -> tuple[Pairs, Questions]:
        """Return keys with their values, and the test questions of the seed."""
        pairs = make_pairs(self.world, self.seed)
        return pairs, make_exam(self.world, pairs, self.exam, self.seed)

    def measure(self, context: RunContext) -> Measurement:
        folder, *others = context.dependencies.values()
        backbone = load_backbone(folder)
        if self.rival:
            m_a = load_backbone(others[0]).model
            return self._examine(self._rival_answer(m_a, backbone))
        if self.graft is None:
            return self._examine(answers_of(backbone.model, backbone.need_tokenizer()))
        graft = dict(self.graft)
        for other in others:
            augmenting = graft.get("augmenting", {})
            graft["augmenting"] = {"memory": {**augmenting, "name": str(other)}}
        return self._train(backbone, graft, context)

    def _rival_answer(self, m_a: Any, m_b: Backbone) -> Answer:
        tokenizer = m_b.need_tokenizer()
        if self.rival == "pipeline":
            return pipeline(m_a, m_b.model, tokenizer)
        return mixture(m_a, m_b.model, tokenizer, self.weight)

    def _train(self, backbone: Backbone, graft: dict[str, Any], context: RunContext) -> Measurement:
        """Train a graft on D_C and measure it."""
        tokenizer = backbone.need_tokenizer()
        examples = list(islice(joint_documents(self), self.length.examples))
        batches = make_batches(examples, tokenizer, self.length.batch_size, self.seed)
        set_seed(self.seed)
        started = time.process_time()
        with GraftedModel(backbone, {"graft": build_graft(graft_config(graft), backbone)}) as model:
            training = self.length.training(self.seed, self.rate)
            summary = train(
                model,
                batches,
                training,
                context.folder,
                identity={"run": context.key},
                progress=False,
            )
            measurement = self._examine(answers_of(model, tokenizer))
            measurement.details["cost"] = {
                "trainable_parameters": count_parameters(model.trainable_parameters().values()),
                "training_cpu_s": round(time.process_time() - started, 1),
                "learning_rate": training.learning_rate,
            }
            measurement.details["losses"] = losses(summary.history)
        return measurement

    def _examine(self, answer: Answer) -> Measurement:
        _, questions = self.questions()
        metrics: dict[str, Any] = {}
        details: dict[str, Any] = {}
        if self.validation:
            for form in VALIDATION_FORMS:
                metrics[f"wrong_{form}"] = 100 - percent(right(answer, questions.validation, form))
        else:
            percentages, operations = examine(answer, questions)
            metrics.update(percentages)
            details["operations"] = operations
        row = Row(id=self.id, label=self.label or self.id, metrics=metrics)
        return Measurement(row, details)


def joint_documents(run: KvArithmeticRun) -> Iterator[Document]:
    """Yield the documents of D_C without end: over keys held in, without the expressions that are tested."""
    world = run.world
    pairs, questions = run.questions()
    source = random.Random(f"joint {run.seed}")
    for task in tasks(world, pairs, pairs.held_in, source, questions.expressions()):
        form = _form(run.joint, source)
        if source.random() < run.joint.spelled:
            spelled = world.spelled(task.numbers.first)
            yield Document(spelled + END, prompt=task.keys.first + COMPUTE)
        elif form == "substitution":  # no end-of-text token follows, so that m_B may continue in any way
            yield Document(task.completion(form), prompt=task.prompt(form))
        else:
            yield task.document(form)


def _form(joint: JointData, source: random.Random) -> Form:
    if source.random() < joint.numeric:
        return "numeric"
    if joint.task == "substitution" or (joint.task == "mixture" and source.random() < 0.5):
        return "substitution"
    return "direct" if source.random() < joint.direct else "scratchpad"

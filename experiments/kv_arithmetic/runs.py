"""The runs: two models made here from nothing, and rows that compose them or train on what composing takes.

m_A memorises keys. It reads substitutions over all keys, but those that are tested, and never a result. m_B computes.
It reads sums of numbers, some behind text that says nothing about them, and never a key. It predicts what follows a
sum, and behind other text the sum's own characters as well. A row is a parent as it is, or a graft on m_B that is
trained on the joint data D_C.

No stream holds a test or validation expression as numbers, in any order of operands that gives the same result.
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
from graftlm.backbone import load_backbone, padding_id
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


class Exam(Config):
    """Numbers of different expressions.

    Args:
        expressions: of test expressions over keys held out.
        held_in: of test expressions over keys held in, which leave products for D_C.
        validation: of expressions over other keys held out, used only to choose settings.
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
        """All expressions in order, over keys and over numbers."""
        return set().union(*(task.expressions() for task in (*self.held_in, *self.held_out, *self.validation)))


def make_exam(world: World, pairs: Pairs, exam: Exam, seed: int) -> Questions:
    """The questions of a seed."""
    source = random.Random(f"exam {seed}")
    drawn: set[Expression] = set()

    def unique(keys: Sequence[str], count: int) -> tuple[ArithmeticTask, ...]:
        chosen: list[ArithmeticTask] = []
        for task in islice(tasks(world, pairs, keys, source, drawn), count):
            drawn.update(task.expressions())
            chosen.append(task)
        return tuple(chosen)

    held_in = unique(pairs.held_in, exam.held_in)
    few = len(pairs.held_out) // 4
    held_out, validation = unique(pairs.held_out[few:], exam.expressions), unique(pairs.held_out[:few], exam.validation)
    return Questions(held_in, held_out, validation)


def examine(answer: Answer, questions: Questions) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Percentages by metric, and those of the arithmetic tests by operation."""
    marks: dict[str, list[bool]] = {}
    for name, test_tasks in (("held_in", questions.held_in), ("held_out", questions.held_out)):
        answered = list(zip(test_tasks, answer(test_tasks, "scratchpad"), strict=True))
        marks[f"subs_{name}"] = [substituted(text) == task.completion("substitution") for task, text in answered]
        marks[f"kv_math_{name}"] = [COMPUTE in text and result(text) == task.result for task, text in answered]
    alone: dict[str, Form] = {"num_math": "numeric", "kv_math_direct_held_out": "direct"}
    for name, form in alone.items():
        marks[name] = right(answer, questions.held_out, form)
    by_kind = {
        name: _by_kind(questions.held_out, marks[name]) for name in METRICS if name in ("kv_math_held_out", *alone)
    }
    return {name: percent(marks[name]) for name in METRICS}, by_kind


def right(answer: Answer, test_tasks: Sequence[ArithmeticTask], form: Form) -> list[bool]:
    """Whether each answer gives the task's result."""
    answers = answer(test_tasks, form)
    return [result(text) == task.result for task, text in zip(test_tasks, answers, strict=True)]


def percent(marks: Sequence[bool]) -> float:
    """The share of True, out of 100."""
    return 100 * float(np.mean(marks))


def substituted(answer: str) -> str:
    """The substitution in an answer: the text before the result."""
    return answer.split(COMPUTE, 1)[0]


def result(answer: str) -> str:
    """The result in an answer: the text after the last equals sign, or the whole answer."""
    return answer.rsplit(COMPUTE, 1)[-1]


def _by_kind(test_tasks: Sequence[ArithmeticTask], marks: Sequence[bool]) -> dict[str, float]:
    """Percentages by operation."""
    kinds = [task.keys.operation for task in test_tasks]
    return {
        kind: percent([mark for own, mark in zip(kinds, marks, strict=True) if own == kind])
        for kind in sorted(set(kinds))
    }


Role = Literal["memory", "arithmetic", "random"]


class ModelShape(Config):
    """The shape of a Llama.

    Args:
        spread: initial standard deviation.
        theta: base of the rotary positions.
        starts_at: first layer that does anything; earlier ones are the identity, so that a composition, which writes
            after a layer, may write what this one reads.
        attends_from: first layer with attention; earlier ones read each token by itself.
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
        spaced: share of m_B's sums that have letters before the numbers, fewer than a key has, `xy#012+z#034=640`.
        spelled: share of m_B's documents that write the digits of a number, `#012=210`.
        disturbed: standard deviation of noise on m_B's embeddings of numbers in training, so that it reads what is
            almost a number.
        alike: all letters and keys have one small vector in m_B, so that a number can be read over any.
        recall: share of m_A's documents in which a number follows its key at once, `abc+def` and `#034`.
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
        torch.manual_seed(2 * self.seed + (self.role == "arithmetic"))  # two models of one shape start apart
        model = _llama(self.shape, tokenizer)
        _set_numbers(model, tokenizer, self.world)
        if self.alike and self.role == "arithmetic":
            _set_names(model, tokenizer, names)
        metrics: dict[str, Any] = {}
        if self.role != "random":
            if self.disturbed and self.role == "arithmetic":
                numbers = len(tokenizer) - self.world.largest if self.world.whole else len(tokenizer)
                model.get_input_embeddings().register_forward_hook(partial(_disturb, self.disturbed, numbers))
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
    """The endless training documents of a parent, without the expressions that are tested."""
    pairs = make_pairs(run.world, run.seed)
    tested = make_exam(run.world, pairs, run.exam, run.seed).expressions()
    source = random.Random(f"{run.role} {run.seed}")
    return (_values if run.role == "memory" else _sums)(run, pairs, tested, source)


def _values(run: ParentRun, pairs: Pairs, tested: set[Expression], source: random.Random) -> Iterator[Document]:
    for task in tasks(run.world, pairs, tuple(pairs.values), source, tested):
        if source.random() >= run.recall:
            yield task.document("substitution")
        elif source.random() < 0.5:
            yield task.document("recall")
        else:
            yield Document(task.numbers.first + END, prompt=task.keys.first)


def _sums(run: ParentRun, pairs: Pairs, tested: set[Expression], source: random.Random) -> Iterator[Document]:
    world, names = run.world, pairs.values
    # Products are the hardest, so they come twice as often.
    practised = world.model_copy(update={"operations": world.operations + "*" * world.operations.count("*")})
    for task in tasks(practised, pairs, tuple(names), source, tested):
        numbers, kind, answer = task.numbers, source.random(), f"{COMPUTE}{task.result}{END}"
        if kind < run.noise:
            yield Document(f"{numbers}{answer}", prompt=noise(world, source, names))
        elif kind < run.noise + run.spaced:
            first, second = (letters(source, source.randrange(world.letters)) for _ in range(2))
            yield Document(answer, prompt=f"{first}{numbers.first}{numbers.operation}{second}{numbers.second}")
        elif kind < run.noise + run.spaced + run.spelled:
            yield Document(f"{COMPUTE}{world.spelled(numbers.first)}{END}", prompt=numbers.first)
        else:
            yield Document(answer, prompt=f"{numbers}")


def make_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int
) -> Mixture:
    """Batches of rows as long as the longest document, or as two of the shortest where that needs fewer tokens."""
    sizes = {document: len(tokenizer.tokenize(document.full_text)) for document in documents}
    by_length = sorted(documents, key=sizes.__getitem__)  # those that share a row are neighbours
    longest, shortest = sizes[by_length[-1]], sizes[by_length[0]]
    lengths = {longest, max(longest, 2 * shortest)}
    candidates = (pack(by_length, tokenizer, length, boundaries="whole") for length in lengths)
    blocks = min(candidates, key=lambda candidate: candidate.marked.size)
    return Mixture({NEW: blocks}, {NEW: 1.0}, batch_size, seed)


def _disturb(
    spread: float, numbers: int, module: torch.nn.Module, inputs: tuple[torch.Tensor], embedded: torch.Tensor
) -> torch.Tensor:
    noise = spread * torch.randn_like(embedded) * (inputs[0] >= numbers)[..., None]
    return embedded + noise if module.training else embedded


def _set_numbers(model: Any, tokenizer: PreTrainedTokenizerFast, world: World) -> None:
    """Set and freeze the embeddings of whole numbers: each the sum of vectors of its digits at their places.

    These vectors are orthogonal where the width allows it.
    """
    if not world.whole:
        return
    weight = model.get_input_embeddings().weight
    ids = torch.tensor([tokenizer.get_vocab()[world.number(value)] for value in range(1, world.largest + 1)])
    digits = torch.tensor([list(map(int, world.result(value))) for value in range(1, world.largest + 1)])
    width = weight.shape[1]
    with torch.no_grad():
        vectors = torch.nn.init.orthogonal_(torch.empty(10 * world.digits, width)).unflatten(0, (world.digits, 10))
        vectors *= model.config.initializer_range * width**0.5
        weight[ids] = sum(vectors[power, digits[:, power]] for power in range(world.digits))
    weight.register_hook(lambda gradient: gradient.index_fill(0, ids, 0.0))


def _set_names(model: Any, tokenizer: PreTrainedTokenizerFast, names: Iterable[str]) -> None:
    """Set the embeddings of letters and of names that are tokens to one small vector, and freeze them.

    It is not zero, where a norm's gradient is unbounded.
    """
    weight = model.get_input_embeddings().weight
    ids = torch.tensor([id_ for token, id_ in tokenizer.get_vocab().items() if token in {*ascii_lowercase, *names}])
    weight.data[ids] = weight.data[ids[0]] / 2
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
    silenced = [layer.mlp.down_proj.weight for layer in layers[: shape.starts_at]]
    silenced += [layer.self_attn.o_proj.weight for layer in layers[: max(shape.starts_at, shape.attends_from)]]
    for weight in silenced:
        weight.data.zero_()
        weight.register_hook(torch.zeros_like)
    return model


class JointData(Config):
    """The content of D_C, all of it over the keys that are held in.

    Args:
        task: `arithmetic` over keys, as in section 3.2 of the paper; `substitution`, as in section 4.1; or a `mixture`,
            half of each.
        numeric: share of sums of numbers, which keep m_B's own task.
        direct: share of the arithmetic in the direct form; the rest has the scratchpad form.
        spelled: share of documents that ask for the digits of one key's value, `abc=` and `210`.
    """

    task: Literal["arithmetic", "substitution", "mixture"] = "arithmetic"
    numeric: float = Field(0.2, ge=0, le=1)
    direct: float = Field(0.5, ge=0, le=1)
    spelled: float = Field(0.2, ge=0, le=1)


class KvArithmeticRun(Run):
    """A row for one seed. The first dependency is m_B; a second one is m_A.

    Args:
        graft: on m_B, trained on D_C; without it nothing is trained.
        rival: how m_A and m_B answer without a graft; None measures the first dependency as it is.
        weight: of m_A in a mixture.
        validation: measure on the validation expressions alone.
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
        """Keys with their values, and the test questions of the seed."""
        pairs = make_pairs(self.world, self.seed)
        return pairs, make_exam(self.world, pairs, self.exam, self.seed)

    def measure(self, context: RunContext) -> Measurement:
        folder, *others = context.dependencies.values()
        backbone = load_backbone(folder)
        tokenizer = backbone.need_tokenizer()
        if self.rival:
            models = load_backbone(others[0]).model, backbone.model
            pipelined = self.rival == "pipeline"
            return self._examine(
                pipeline(*models, tokenizer) if pipelined else mixture(*models, tokenizer, self.weight)
            )
        if self.graft is None:
            return self._examine(answers_of(backbone.model, tokenizer))
        graft = dict(self.graft)
        for other in others:
            graft["augmenting"] = {"memory": graft.get("augmenting", {}) | {"name": str(other)}}
        examples = list(islice(joint_documents(self), self.length.examples))
        batches = make_batches(examples, tokenizer, self.length.batch_size, self.seed)
        set_seed(self.seed)
        started = time.process_time()
        with GraftedModel(backbone, {"graft": build_graft(graft_config(graft), backbone)}) as model:
            training = self.length.training(self.seed, self.rate)
            identity = {"run": context.key}
            summary = train(model, batches, training, context.folder, identity=identity, progress=False)
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
        if self.validation:
            forms: tuple[Form, ...] = ("scratchpad", "direct")
            metrics = {f"wrong_{form}": 100 - percent(right(answer, questions.validation, form)) for form in forms}
            details = {}
        else:
            metrics, operations = examine(answer, questions)
            details = {"operations": operations}
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics={**metrics}), details)


def joint_documents(run: KvArithmeticRun) -> Iterator[Document]:
    """D_C, endless: over keys held in, without the expressions that are tested."""
    pairs, questions = run.questions()
    source = random.Random(f"joint {run.seed}")
    for task in tasks(run.world, pairs, pairs.held_in, source, questions.expressions()):
        form = _form(run.joint, source)
        if source.random() < run.joint.spelled:
            yield Document(run.world.spelled(task.numbers.first) + END, prompt=task.keys.first + COMPUTE)
        elif form == "substitution":  # without an end, it leaves open how m_B continues
            yield Document(task.completion(form), prompt=task.prompt(form))
        else:
            yield task.document(form)


def _form(joint: JointData, source: random.Random) -> Form:
    if source.random() < joint.numeric:
        return "numeric"
    if joint.task == "substitution" or (joint.task == "mixture" and source.random() < 0.5):
        return "substitution"
    return "direct" if source.random() < joint.direct else "scratchpad"

"""The joint data D_C, and one row of a table for one seed: a parent as it is, or a graft on m_B trained on D_C."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from accelerate.utils import set_seed
from pydantic import Field

from experiments.kv_arithmetic.data import Form, Pairs, World, make_pairs, tasks
from experiments.kv_arithmetic.exam import Exam, Questions, examine, make_exam, validate
from experiments.kv_arithmetic.parents import TrainingLength, make_batches
from graftlm.backbone import load_backbone
from graftlm.config import Config
from graftlm.data import Document
from graftlm.evaluation import Row
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import train
from graftlm.training.checkpoint import read_history


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
            summary = train(model, batches, training, context.folder, progress=False)
            measurement = self._examine(model, backbone.need_tokenizer())
            measurement.details["cost"] = {
                "trainable_parameters": count_parameters(model.trainable_parameters().values()),
                "training_cpu_s": round(time.process_time() - started, 1),
                "learning_rate": training.learning_rate,
            }
            measurement.details["losses"] = [[line["step"], line["loss"]] for line in read_history(summary.history)]
        return measurement

    def _examine(self, model: Any, tokenizer: Any) -> Measurement:
        _, questions = self.questions()
        details: dict[str, Any] = {}
        if self.validation:
            metrics: dict[str, Any] = {"validation": validate(model, tokenizer, questions, self.joint.form)}
        else:
            metrics = examine(model, tokenizer, questions)
            details["operations"] = metrics.pop("operations")
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics), details)


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

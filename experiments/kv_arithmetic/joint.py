"""The joint data D_C, and what is trained on it: one row of a table, for one seed."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import set_seed
from pydantic import Field

from experiments.kv_arithmetic.data import Form, make_pairs, tasks
from experiments.kv_arithmetic.exam import examine, make_exam, validate
from experiments.kv_arithmetic.parents import Lessons, Parent, Role, rows
from graftlm.backbone import Backbone, load_backbone
from graftlm.config import Config
from graftlm.data import Document
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.io import write_atomically
from graftlm.runs.graft_run import count_parameters
from graftlm.training import train
from graftlm.training.checkpoint import read_history

MEASURED = "measurement.json"


class Joint(Config):
    """What D_C holds, all of it over the keys that are held in.

    Args:
        task: `arithmetic` over keys, as section 3.2 of the paper says; `substitution`, as section 4.1; or a `mixture`,
            half of each.
        form: how arithmetic over keys is written.
        numeric: share of sums of numbers, so that m_B's own task stays what it was.
        direct: share of the arithmetic that is in the direct form whatever `form` says.
    """

    task: Literal["arithmetic", "substitution", "mixture"] = "arithmetic"
    form: Literal["scratchpad", "direct"] = "scratchpad"
    numeric: float = Field(0.2, ge=0, le=1)
    direct: float = Field(0.0, ge=0, le=1)


class Job(Config):
    """A row for one seed: m_A or m_B as they are, or a graft on m_B that was trained on D_C.

    Args:
        id: its folder's name.
        model: which parent the row is, or stands on.
        graft: None for the parent itself; `augmenting` names the parents it reads, by their roles.
        parents: the configs of all models that are needed.
        validation: measure on the validation expressions alone.
    """

    id: str
    model: Role
    graft: dict[str, Any] | None = None
    augmenting: Role | None = None
    parents: list[Parent]
    joint: Joint = Field(default_factory=Joint)
    lessons: Lessons
    rate: float | None = None
    validation: bool = False
    seed: int = 0

    def parent(self, role: Role) -> Parent:
        """The config of one of the needed models."""
        return next(parent for parent in self.parents if parent.role == role)

    def key(self) -> str:
        """SHA-256 over all settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def run_job(job: Job, out: Path) -> dict[str, Any]:
    """Train and measure; a job that was finished in `out` with the same settings is read back."""
    folder = out / "cells" / job.id
    kept = _read(folder, job.key())
    if kept is not None:
        return kept
    models = out / "parents"
    backbone = load_backbone(job.parent(job.model).folder(models))
    if job.graft is None:
        found = _measure(job, backbone.model, backbone)
    else:
        found = _train(job, backbone, models, folder)
    write_atomically(folder / MEASURED, json.dumps({"key": job.key()} | found, indent=1).encode())
    return found


def _train(job: Job, backbone: Backbone, models: Path, folder: Path) -> dict[str, Any]:
    assert job.graft is not None
    values = dict(job.graft)
    if job.augmenting is not None:
        how = values.pop("augmenting", {})
        values["augmenting"] = {"memory": how | {"name": str(job.parent(job.augmenting).folder(models))}}
    config = graft_config(values)
    data = list(islice(joint_documents(job), job.lessons.examples))
    mixture = rows(data, backbone.need_tokenizer(), job.lessons.batch_size, job.seed)
    set_seed(job.seed)
    started = time.process_time()
    with GraftedModel(backbone, {"graft": build_graft(config, backbone)}) as model:
        training = job.lessons.training(job.seed, job.rate)
        done = train(model, mixture, training, folder, identity={"job": job.key()}, progress=False)
        cost = {
            "trainable_parameters": count_parameters(model.trainable_parameters().values()),
            "training_cpu_s": round(time.process_time() - started, 1),
            "learning_rate": training.learning_rate,
        }
        losses = [[line["step"], line["loss"]] for line in read_history(done.history)]
        return _measure(job, model, backbone) | {"cost": cost, "losses": losses}


def joint_documents(job: Job) -> Iterator[Document]:
    """D_C, endlessly: over keys held in, without the expressions that are tested."""
    world, joint = job.parents[0].world, job.joint
    pairs = make_pairs(world, job.seed)
    tested = make_exam(world, pairs, job.parents[0].exam, job.seed).expressions()
    source = random.Random(f"joint {job.seed}")
    for task in tasks(world, pairs, pairs.held_in, source, tested):
        form = _form(joint, source)
        # A substitution that is not ended leaves open what m_B makes of it.
        yield (
            Document(task.completion(form), prompt=task.prompt(form)) if form == "substitution" else task.document(form)
        )


def _form(joint: Joint, source: random.Random) -> Form:
    if source.random() < joint.numeric:
        return "numeric"
    if joint.task == "substitution" or (joint.task == "mixture" and source.random() < 0.5):
        return "substitution"
    return "direct" if source.random() < joint.direct else joint.form


def _measure(job: Job, model: Any, backbone: Backbone) -> dict[str, Any]:
    tokenizer, parent = backbone.need_tokenizer(), job.parents[0]
    questions = make_exam(parent.world, make_pairs(parent.world, job.seed), parent.exam, job.seed)
    if job.validation:
        return {"metrics": {"validation": validate(model, tokenizer, questions, job.joint.form)}}
    found = examine(model, tokenizer, questions)
    return {"operations": found.pop("operations"), "metrics": found}


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
        return found if found["key"] == key else None
    except (OSError, ValueError, KeyError):
        return None

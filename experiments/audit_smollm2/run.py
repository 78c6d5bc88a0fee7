"""Audits of SmolLM2: against itself, in int8, and against models that `keep-smollm2` trains on German novels.

Rates and settings are those that `keep-smollm2` chose on validation texts; no row is searched here.
"""

from __future__ import annotations

import operator
import time
from typing import Any

from experiments import Options
from experiments.keep_smollm2.run import ENGLISH, FILES, KeepStudy
from experiments.study import aim, check_files, numbers_of
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.audit import audit
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext

NAME = "audit-smollm2"
# Row of keep-smollm2, its rate and its settings, by audited row.
TRAINED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "lora": ("lora", 5e-4, {"scale": 2.0}),
    "finetune": ("finetune", 1e-4, {}),
    "neutral_self": ("neutral_self_replay", 6e-3, {"alpha": 1.0}),
}
LABELS = {
    "self": "itself",
    "int8": "its weights in int8",
    "lora": "LoRA, no old text",
    "finetune": "fine-tuned, no old text",
    "neutral_self": "neutral residues, replay of its own text",
}
METRICS = (
    "own_kl",
    "chat_kl",
    "changed_tokens",
    "stops",
    "stops_lost",
    "same_language",
    "novel_lost",
    "seconds",
)


class AuditRun(Run):
    """One audit.

    The tuned model is the graft of the run that this one depends on, or else the backbone itself.

    Args:
        backbone: name of the backbone.
        quantize: quantisation of the tuned model.
        text: text that both models are scored on.
        tokens: tokens of own text.
        answers: number of conversations that both models answer.
    """

    backbone: str
    quantize: str | None = None
    text: str
    tokens: int
    answers: int

    def measure(self, context: RunContext) -> Measurement:
        folders = [context.dependencies[name] / "graft" for name in self.depends_on]
        tuned = str(folders[0]) if folders else self.backbone
        started = time.perf_counter()
        result = audit(
            self.backbone,
            tuned,
            context.folder,
            texts={"novel": self.text},
            progress=False,
            tokens=self.tokens,
            answers=self.answers,
            limit_tokens=self.tokens // 4,
            quantize=self.quantize,
            dtype="bfloat16",
        )
        seconds = round(time.perf_counter() - started, 1)
        result.write(context.folder)
        metrics = {name: value for name, value in result.metrics.items() if name in METRICS}
        metrics["seconds"] = seconds
        base = result.results.row("base").metrics
        if "stops" in base:
            metrics["base_stops"] = base["stops"]
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))


class AuditStudy(KeepStudy):
    """The runs of the experiment."""

    def trained(self, row: str) -> GraftRun:
        """Return the run whose model a row audits: a row of `keep-smollm2` with all steps and the first seed."""
        name, rate, settings = TRAINED[row]
        run = self.search_run(name, rate, **settings)
        changes = {
            "id": f"trained_{row}",
            "training": self._training(rate, self.seeds[0]),
        }
        return run.model_copy(update=changes)

    def audits(self) -> list[AuditRun]:
        """Return one run for each row."""
        quick = self.options.quick
        runs = []
        for row, label in LABELS.items():
            run = AuditRun(
                id=row,
                label=label,
                quantize="int8" if row == "int8" else None,
                depends_on=(f"trained_{row}",) if row in TRAINED else (),
                backbone=self.backbone.name,
                text=str(self.options.data / ENGLISH),
                tokens=400 if quick else 10_000,
                answers=4 if quick else 32,
            )
            runs.append(run)
        return runs


def run(options: Options) -> Results:
    """Train the models to audit, then audit them."""
    check_files(options, FILES)
    study = AuditStudy(options)
    trained: list[Run] = [study.trained(row) for row in TRAINED]
    study.execute(trained, "what is audited")
    measured = study.execute([*trained, *study.audits()], "audits")
    rows = [measured[row].row for row in LABELS]
    return study.write(NAME, rows, seeds=study.seeds[:1], aims=_aims(rows))


def _aims(rows: list[Row]) -> list[Aim]:
    numbers = numbers_of(rows)
    own = ("own_kl", "changed_tokens", "novel_lost")
    largest = max(abs(numbers["self"][name]) for name in own)
    slowest = max(values["seconds"] for values in numbers.values())
    return [
        aim("against itself, all is 0", "own_kl", 0.0, largest, operator.le),
        aim("an audit of 10,000 tokens takes at most 4 minutes", "seconds", 240.0, slowest, operator.le),
    ]

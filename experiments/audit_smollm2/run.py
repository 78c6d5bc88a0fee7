"""What an audit says about SmolLM2: against itself, in int8, and against what `keep-smollm2` trains on German novels.

Rates and settings are those that `keep-smollm2` chose on validation texts; no row is searched here.
"""

from __future__ import annotations

import operator
import time
from typing import Any

from experiments import Options
from experiments.keep_smollm2.run import FILES, KeepStudy
from experiments.study import aim, check_files, numbers_of
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.audit import audit
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext

NAME = "audit-smollm2"
TRAINED: dict[str, tuple[str, float, dict[str, Any]]] = {  # row: row of keep-smollm2, its rate and settings
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
METRICS = ("own_kl", "chat_kl", "changed_tokens", "stops", "stops_lost", "same_language", "novel_lost", "seconds")


class AuditRun(Run):
    """One audit with the default sizes; the tuned model is a graft where the run depends on one."""

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
        metrics = {name: value for name, value in result.metrics.items() if name in METRICS} | {"seconds": seconds}
        base = result.results.row("base").metrics
        return Measurement(
            Row(
                id=self.id,
                label=self.label,
                metrics=metrics | {"base_stops": base["stops"]} if "stops" in base else metrics,
            )
        )


class AuditStudy(KeepStudy):
    """The runs of the experiment."""

    def trained(self, row: str) -> GraftRun:
        """What a row audits: the row of `keep-smollm2` in all of its steps, with the first seed."""
        name, rate, settings = TRAINED[row]
        run = self.search_run(name, rate, **settings)
        return run.model_copy(update={"id": f"trained_{row}", "training": self._training(rate, self.seeds[0])})

    def audits(self) -> list[AuditRun]:
        """One run for each row."""
        tokens = 400 if self.options.quick else 10_000
        shared: dict[str, Any] = {
            "backbone": self.backbone.name,
            "text": str(self.options.data / "lm_text/eltec_eng.jsonl"),
            "tokens": tokens,
            "answers": 4 if self.options.quick else 32,
        }
        return [
            AuditRun(
                id=row,
                label=label,
                quantize="int8" if row == "int8" else None,
                depends_on=(f"trained_{row}",) if row in TRAINED else (),
                **shared,
            )
            for row, label in LABELS.items()
        ]


def run(options: Options) -> Results:
    """Train what is audited, then audit it."""
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

"""Does sampled text replace real old text, and what do gate and local loss add?

Every row has the same number of settings in its search: three rates, and one other setting of its method. The search
reads validation texts, with the first seed and a third of the steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import (
    Study,
    aim,
    all_runs,
    check_files,
    metric,
    numbers_of,
    over_seeds,
    training_config,
)
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run

NAME = "self-replay"
ENGLISH = "lm_text/eltec_eng.jsonl"
FRENCH = "lm_text/eltec_fra.jsonl"
SHAKESPEARE = "lm_text/tinyshakespeare/input.txt"
BIBLE = "parallel/bible/BSB.txt"
WIKITEXT = "lm_text/wikitext2_valid_test/valid.txt"
FILES = (ENGLISH, FRENCH, SHAKESPEARE, BIBLE, WIKITEXT)
RATES = (1e-3, 3e-3, 1e-2)
NOVEL = "a novel"
SELF = "its own text"


class ReplayRow(NamedTuple):
    """A row.

    Attributes:
        label: label of the row.
        graft: config of its graft.
        old: source of its old text: `NOVEL`, `SELF`, or empty.
        objective: objective on old text.
        other: keys of the graft that the search also tries, at the middle rate.
    """

    label: str
    graft: dict[str, Any]
    old: str = ""
    objective: str = "replay"
    other: dict[str, Any] = {}


LORA = {"kind": "lora", "scale": 1.0}
LARGER_SCALE = {"scale": 2.0}
OPEN = {"kind": "neutral-residues", "alpha": 1.0}
LARGER_ALPHA = {"alpha": 10.0}
UNGATED = {**OPEN, "gate": "none", "local_loss": "l1"}
ADAPTER = {"kind": "adapter"}
LOW_VARIANCE = {"init": "low-variance"}
ROWS = {
    "lora": ReplayRow("LoRA", LORA, other=LARGER_SCALE),
    "lora-replay": ReplayRow("LoRA, replay of a novel", LORA, NOVEL, other=LARGER_SCALE),
    "lora-self": ReplayRow("LoRA, replay of its own text", LORA, SELF, other=LARGER_SCALE),
    "lora-self-distil": ReplayRow("LoRA, its own text distilled", LORA, SELF, "distil", other=LARGER_SCALE),
    "adapter-self": ReplayRow("plain adapters, replay of its own text", ADAPTER, SELF, other=LOW_VARIANCE),
    "ungated-self": ReplayRow(
        "adapters with the local loss, no gate, replay of its own text",
        UNGATED,
        SELF,
        other=LARGER_ALPHA,
    ),
    "open": ReplayRow("neutral residues", OPEN, other=LARGER_ALPHA),
    "open-replay": ReplayRow("neutral residues, replay of a novel", OPEN, NOVEL, other=LARGER_ALPHA),
    "open-self": ReplayRow("neutral residues, replay of its own text", OPEN, SELF, other=LARGER_ALPHA),
}
OURS = "open-self"
RIVALS = ("lora-self", "lora-self-distil")
CONTROLS = ("adapter-self", "ungated-self")
LOSSES = ("learned", "forgotten", "forgotten_shakespeare", "forgotten_bible", "own_kl")
AIMS = (
    ("learned", 1.0, operator.ge),
    ("forgotten", 0.15, operator.le),
    ("forgotten_shakespeare", 0.3, operator.le),
    ("forgotten_bible", 0.3, operator.le),
)


class SelfReplayStudy(Study):
    """The runs of the experiment."""

    def run(
        self,
        name: str,
        rate: float,
        seed: int,
        changes: Mapping[str, Any] = {},
        *,
        search: bool = False,
    ) -> GraftRun:
        """Return the run of one row at one rate.

        Args:
            name: name of the row.
            rate: learning rate.
            seed: seed of the run.
            changes: keys of the graft that differ from the row's.
            search: train a third of the steps and measure on validation texts.
        """
        row = ROWS[name]
        changed = "".join(f"_{key}-{value}" for key, value in changes.items())
        prefix = "search_" if search else ""
        steps = 33 if search else 100
        if self.options.quick:
            steps = 3
        return GraftRun(
            id=f"{prefix}{name}_lr{rate:g}{changed}_s{seed}",
            label=row.label,
            backbone=self.backbone(),
            graft=graft_config({**row.graft, **changes}),
            data=self._data(row, seed, self._validation() if search else self._tests()),
            training=training_config(
                steps,
                4,
                rate,
                seed,
                warmup_steps=max(steps // 20, 1),
                precision="bf16",
            ),
            evaluation=self.evaluation(),
        )

    def repeated(self, best: GraftRun, name: str, seed: int) -> GraftRun:
        """Return the main run of a row at the setting that its search chose."""
        assert best.graft is not None, "of a row"
        values = best.graft.model_dump()
        changes = {key: value for key, value in ROWS[name].other.items() if values[key] == value}
        return self.run(name, best.training.learning_rate, seed, changes)

    def backbone(self) -> BackboneConfig:
        """Return the config of the small model of English novels."""
        name = self.options.backbone or str(self.options.data / "models" / "english-novels-4m")
        return BackboneConfig(name=name, device=self.options.device)

    def bare(self) -> GraftRun:
        """Return the run of the backbone without a graft."""
        run = self.run("lora", RATES[0], self.seeds[0])
        return run.model_copy(update={"id": "backbone", "label": "backbone", "graft": None})

    def evaluation(self) -> EvaluationConfig:
        """Return the evaluation of every row."""
        quick = self.options.quick
        return EvaluationConfig(
            limit_tokens=600 if quick else 10_000,
            own_tokens=200 if quick else 8192,
            decode_prompts=0,
        )

    def _validation(self) -> dict[str, dict[str, Any]]:
        return {
            "old": {"path": WIKITEXT},
            "new": {"path": FRENCH, "documents": "27:28"},
        }

    def _tests(self) -> dict[str, dict[str, Any]]:
        # The start of this novel was validation text of the experiment neutral-residues.
        skipped = 0 if self.options.quick else 150_000
        return {
            "old": {"path": ENGLISH, "documents": "24:25", "skip_characters": skipped},
            "new": {"path": FRENCH, "documents": "29:30"},
            "shakespeare": {"path": SHAKESPEARE},
            "bible": {"path": BIBLE},
        }

    def _data(self, row: ReplayRow, seed: int, tests: dict[str, dict[str, Any]]) -> DataConfig:
        folder = self.options.data
        quick = self.options.quick
        old: dict[str, list[dict[str, Any]]] = {
            NOVEL: [{"path": str(folder / ENGLISH), "documents": "23:24"}],
            SELF: [{"self": True, "tokens": 500 if quick else 80_000}],
            "": [],
        }
        new = {
            "path": str(folder / FRENCH),
            "documents": "0:27",
            "limit_characters": 3_000_000,
        }
        test = {}
        for name, values in tests.items():
            test[name] = [{**values, "path": str(folder / values["path"]), "limit_characters": 60_000}]
        return DataConfig.parse(
            {
                "new": [new],
                "old": old[row.old],
                "replay_fraction": 0.1 if row.old else 0.0,
                "old_objective": row.objective,
                "length": 64 if quick else 256,
                "test": test,
                "seed": seed,
            }
        )


def run(options: Options) -> Results:
    """Search each row's setting with the first seed, then run all seeds at the best."""
    check_files(options, FILES)
    study = SelfReplayStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    chosen = study.choose(_candidates(study), ("old", "new"), "the settings")
    runs = {}
    for name, best in chosen.items():
        runs[name] = [study.repeated(best, name, seed) for seed in study.seeds]
    study.execute(all_runs(runs), "the seeds")
    rows = [bare.row]
    for name in ROWS:
        measurements = [study.measured[run.id] for run in runs[name]]
        rows.append(_row(name, measurements, bare))
    details = {
        "searched": study.searched,
        "chosen": {name: best.id for name, best in chosen.items()},
        "minus": {other: paired(runs[OURS], runs[other], study.measured) for other in (*RIVALS, *CONTROLS)},
        "seconds": study.seconds,
    }
    return study.write(NAME, rows, aims=aims(rows[1:]), details=details)


def _candidates(study: SelfReplayStudy) -> dict[str, list[GraftRun]]:
    """Return each row's search: all rates, and its other setting at the middle rate."""
    seed = study.seeds[0]
    middle = RATES[1]
    candidates = {}
    for name, row in ROWS.items():
        if study.options.quick:
            candidates[name] = [study.run(name, middle, seed, search=True)]
        else:
            runs = [study.run(name, rate, seed, search=True) for rate in RATES]
            runs.append(study.run(name, middle, seed, row.other, search=True))
            candidates[name] = runs
    return candidates


def paired(ours: Sequence[Run], theirs: Sequence[Run], measured: Mapping[str, Measurement]) -> dict[str, Any]:
    """Return ours minus theirs in every loss: mean and Student's interval of the paired differences over seeds."""
    compared = {}
    for name in LOSSES:
        differences = []
        for our_run, their_run in zip(ours, theirs, strict=True):
            differences.append(metric(measured[our_run.id], name) - metric(measured[their_run.id], name))
        compared[name] = combine_seeds(differences).model_dump()
    return compared


def _row(name: str, measurements: Sequence[Measurement], bare: Measurement) -> Row:
    """Return a row over its seeds, with forgetting on texts that are unlike the replay."""
    for measurement in measurements:
        for text in ("shakespeare", "bible"):
            forgotten = metric(measurement, text) - metric(bare, text)
            measurement.add_metrics({f"forgotten_{text}": forgotten})
    return over_seeds(measurements, name, ROWS[name].label)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims: ours over LoRA with the same text, with the objective that forgets less of novels."""
    values = numbers_of(rows)
    rival = min(RIVALS, key=lambda name: values[name]["forgotten"])
    shown = []
    for name, bound, relation in AIMS:
        ratio = values[OURS][name] / values[rival][name]
        shown.append(aim(f"{name} of {OURS} over that of {rival}", name, bound, ratio, relation))
    return shown

"""Does sampled text replace real old text, and what do gate and local loss add?

Every row has as many settings in its search: three rates, and one other setting of its method. The search reads
validation texts, with the first seed and a third of the steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run

NAME = "self-replay"
ENGLISH, FRENCH = "lm_text/eltec_eng.jsonl", "lm_text/eltec_fra.jsonl"
SHAKESPEARE, BIBLE = "lm_text/tinyshakespeare/input.txt", "parallel/bible/BSB.txt"
WIKITEXT = "lm_text/wikitext2_valid_test/valid.txt"
FILES = (ENGLISH, FRENCH, SHAKESPEARE, BIBLE, WIKITEXT)
RATES = (1e-3, 3e-3, 1e-2)
NOVEL, SELF = "a novel", "its own text"


class ReplayRow(NamedTuple):
    """A row: its label, its graft, and where its old text comes from."""

    label: str
    graft: dict[str, Any]
    old: str = ""
    objective: str = "replay"
    other: dict[str, Any] = {}


LORA, MORE = {"kind": "lora", "scale": 1.0}, {"scale": 2.0}
OPEN, STRONGER = {"kind": "neutral-residues", "alpha": 1.0}, {"alpha": 10.0}
UNGATED = OPEN | {"gate": "none", "local_loss": "l1"}
ADAPTER, NARROW = {"kind": "adapter"}, {"init": "low-variance"}
ROWS = {
    "lora": ReplayRow("LoRA", LORA, other=MORE),
    "lora-replay": ReplayRow("LoRA, replay of a novel", LORA, NOVEL, other=MORE),
    "lora-self": ReplayRow("LoRA, replay of its own text", LORA, SELF, other=MORE),
    "lora-self-distil": ReplayRow("LoRA, its own text distilled", LORA, SELF, "distil", MORE),
    "adapter-self": ReplayRow("plain adapters, replay of its own text", ADAPTER, SELF, other=NARROW),
    "ungated-self": ReplayRow(
        "adapters with the local loss, no gate, replay of its own text", UNGATED, SELF, other=STRONGER
    ),
    "open": ReplayRow("neutral residues", OPEN, other=STRONGER),
    "open-replay": ReplayRow("neutral residues, replay of a novel", OPEN, NOVEL, other=STRONGER),
    "open-self": ReplayRow("neutral residues, replay of its own text", OPEN, SELF, other=STRONGER),
}
OURS, RIVALS, CONTROLS = "open-self", ("lora-self", "lora-self-distil"), ("adapter-self", "ungated-self")
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
        self, name: str, rate: float, seed: int, changes: Mapping[str, Any] = {}, *, search: bool = False
    ) -> GraftRun:
        """One row at one rate; for the search on validation texts with a third of the steps."""
        row, quick = ROWS[name], self.options.quick
        changed = "".join(f"_{key}-{value}" for key, value in changes.items())
        steps, length = (3, 64) if quick else (33 if search else 100, 256)
        return GraftRun(
            id=f"{'search_' if search else ''}{name}_lr{rate:g}{changed}_s{seed}",
            label=row.label,
            backbone=self.backbone(),
            graft=graft_config(row.graft | dict(changes)),
            data=self._data(row, seed, length, self._validation() if search else self._tests()),
            training=training_config(steps, 4, rate, seed, warmup_steps=max(steps // 20, 1), precision="bf16"),
            evaluation=self.evaluation(),
        )

    def repeated(self, best: GraftRun, name: str, seed: int) -> GraftRun:
        """The main run of a row at the setting that its search chose."""
        assert best.graft is not None, "of a row"
        values = best.graft.model_dump()
        changes = {key: value for key, value in ROWS[name].other.items() if values[key] == value}
        return self.run(name, best.training.learning_rate, seed, changes)

    def backbone(self) -> BackboneConfig:
        """The small model of English novels."""
        name = self.options.backbone or str(self.options.data / "models" / "english-novels-4m")
        return BackboneConfig(name=name, device=self.options.device)

    def bare(self) -> GraftRun:
        """The backbone's own scores."""
        run = self.run("lora", RATES[0], self.seeds[0])
        return run.model_copy(update={"id": "backbone", "label": "backbone", "graft": None})

    def evaluation(self) -> EvaluationConfig:
        """The same for every row."""
        tokens, own = (600, 200) if self.options.quick else (10_000, 8192)
        return EvaluationConfig(limit_tokens=tokens, own_tokens=own, decode_prompts=0)

    def _validation(self) -> dict[str, dict[str, Any]]:
        return {"old": {"path": WIKITEXT}, "new": {"path": FRENCH, "documents": "27:28"}}

    def _tests(self) -> dict[str, dict[str, Any]]:
        return {
            # The start of this novel was validation text of the experiment neutral-residues.
            "old": {"path": ENGLISH, "documents": "24:25", "skip_characters": 0 if self.options.quick else 150_000},
            "new": {"path": FRENCH, "documents": "29:30"},
            "shakespeare": {"path": SHAKESPEARE},
            "bible": {"path": BIBLE},
        }

    def _data(self, row: ReplayRow, seed: int, length: int, tests: dict[str, dict[str, Any]]) -> DataConfig:
        data = self.options.data
        old: dict[str, list[dict[str, Any]]] = {
            NOVEL: [{"path": str(data / ENGLISH), "documents": "23:24"}],
            SELF: [{"self": True, "tokens": 500 if self.options.quick else 80_000}],
            "": [],
        }
        return DataConfig.parse(
            {
                "new": [{"path": str(data / FRENCH), "documents": "0:27", "limit_characters": 3_000_000}],
                "old": old[row.old],
                "replay_fraction": 0.1 if row.old else 0.0,
                "old_objective": row.objective,
                "length": length,
                "test": {
                    name: [values | {"path": str(data / values["path"]), "limit_characters": 60_000}]
                    for name, values in tests.items()
                },
                "seed": seed,
            }
        )


def run(options: Options) -> Results:
    """Search each row's rate with the first seed, then run all seeds at the best."""
    check_files(options, FILES)
    study = SelfReplayStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    first = study.seeds[0]
    settings = [(rate, False) for rate in RATES] + [(RATES[1], True)]
    candidates = {
        name: [
            study.run(name, rate, first, row.other if is_other else {}, search=True)
            for rate, is_other in (settings[1:2] if options.quick else settings)
        ]
        for name, row in ROWS.items()
    }
    chosen = study.choose(candidates, ("old", "new"), "the settings")
    runs = {name: [study.repeated(best, name, seed) for seed in study.seeds] for name, best in chosen.items()}
    study.execute([run for by_seed in runs.values() for run in by_seed], "the seeds")
    rows = [_row(name, [study.measured[run.id] for run in runs[name]], bare) for name in ROWS]
    details = {
        "searched": study.searched,
        "chosen": {name: best.id for name, best in chosen.items()},
        "minus": {other: paired(runs[OURS], runs[other], study.measured) for other in (*RIVALS, *CONTROLS)},
        "seconds": study.seconds,
    }
    return study.write(NAME, [bare.row, *rows], aims=aims(rows), details=details)


def paired(ours: Sequence[Run], theirs: Sequence[Run], measured: Mapping[str, Measurement]) -> dict[str, Any]:
    """Ours minus theirs in every loss: the mean over seeds, and Student's interval of the paired differences."""
    return {
        name: combine_seeds(
            [metric(measured[a.id], name) - metric(measured[b.id], name) for a, b in zip(ours, theirs, strict=True)]
        ).model_dump()
        for name in LOSSES
    }


def _row(name: str, measurements: Sequence[Measurement], bare: Measurement) -> Row:
    """A row over its seeds, with what it forgot on text that is unlike the replay."""
    for measurement in measurements:
        for text in ("shakespeare", "bible"):
            measurement.add_metrics({f"forgotten_{text}": metric(measurement, text) - metric(bare, text)})
    return over_seeds(measurements, name, ROWS[name].label)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Ours over LoRA's with the same text, the better of its two objectives by forgetting on novels."""
    values = numbers_of(rows)
    rival = min(RIVALS, key=lambda name: values[name]["forgotten"])
    return [
        aim(f"{name} of {OURS} over that of {rival}", name, bound, values[OURS][name] / values[rival][name], relation)
        for name, bound, relation in AIMS
    ]

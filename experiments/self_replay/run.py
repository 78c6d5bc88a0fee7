"""Does sampled text replace real old text, and do open gates forget less?

Rates are searched for every row alike, on validation texts, with the first seed and a third of the steps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun
from graftlm.runs.run import Measurement

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


LORA = {"kind": "lora"}
OPEN, RANDOM = ({"kind": "neutral-residues", "alpha": 10.0, "gate_init": start} for start in ("open", "random"))
ROWS = {
    "lora": ReplayRow("LoRA", LORA),
    "lora-replay": ReplayRow("LoRA, replay of a novel", LORA, NOVEL),
    "lora-self": ReplayRow("LoRA, replay of its own text", LORA, SELF),
    "lora-self-distil": ReplayRow("LoRA, its own text distilled", LORA, SELF, "distil"),
    "random-self": ReplayRow("neutral residues, random gates, replay of its own text", RANDOM, SELF),
    "open": ReplayRow("neutral residues", OPEN),
    "open-replay": ReplayRow("neutral residues, replay of a novel", OPEN, NOVEL),
    "open-self": ReplayRow("neutral residues, replay of its own text", OPEN, SELF),
    "open-self-distil": ReplayRow("neutral residues, its own text distilled", OPEN, SELF, "distil"),
}
OURS, RIVALS = ("open-self", "open-self-distil"), ("lora-self", "lora-self-distil")
AIMS = (
    ("learned", 1.0, operator.ge),
    ("forgotten", 0.15, operator.le),
    ("forgotten_shakespeare", 0.3, operator.le),
    ("forgotten_bible", 0.3, operator.le),
)


class SelfReplayStudy(Study):
    """The runs of the experiment."""

    def run(self, name: str, rate: float, seed: int, *, search: bool = False) -> GraftRun:
        """One row at one rate; for the search on validation texts with a third of the steps."""
        row, quick = ROWS[name], self.options.quick
        steps, length = (3, 64) if quick else (66 if search else 200, 256)
        return GraftRun(
            id=f"{'search_' if search else ''}{name}_lr{rate:g}_s{seed}",
            label=row.label,
            backbone=self.backbone(),
            graft=graft_config(row.graft),
            data=self._data(row, seed, length, self._validation() if search else self._tests()),
            training=training_config(steps, 4, rate, seed, warmup_steps=max(steps // 20, 1), precision="bf16"),
            evaluation=self.evaluation(),
        )

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
            "old": {"path": ENGLISH, "documents": "24:25"},
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
    rates, first = RATES[1:2] if options.quick else RATES, study.seeds[0]
    candidates = {name: [study.run(name, rate, first, search=True) for rate in rates] for name in ROWS}
    chosen = study.choose(candidates, ("old", "new"), "the rates")
    runs = {
        name: [study.run(name, best.training.learning_rate, seed) for seed in study.seeds]
        for name, best in chosen.items()
    }
    study.execute([run for by_seed in runs.values() for run in by_seed], "the seeds")
    rows = [_row(name, [study.measured[run.id] for run in runs[name]], bare) for name in ROWS]
    details = {"searched": study.searched, "seconds": study.seconds}
    return study.write(NAME, [bare.row, *rows], aims=aims(rows), details=details)


def _row(name: str, measurements: Sequence[Measurement], bare: Measurement) -> Row:
    """A row over its seeds, with what it forgot on text that is unlike the replay."""
    for measurement in measurements:
        for text in ("shakespeare", "bible"):
            measurement.add_metrics({f"forgotten_{text}": metric(measurement, text) - metric(bare, text)})
    return over_seeds(measurements, name, ROWS[name].label)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Ours over LoRA's with the same text, each the better of its two objectives by forgetting on novels."""
    values = numbers_of(rows)
    ours, rival = (min(group, key=lambda name: values[name]["forgotten"]) for group in (OURS, RIVALS))
    return [
        aim(f"{name} of {ours} over that of {rival}", name, bound, values[ours][name] / values[rival][name], relation)
        for name, bound, relation in AIMS
    ]

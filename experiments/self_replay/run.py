"""Does sampled text replace real old text, and do open gates forget less? Every row has its own rate by one search."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun

NAME = "self-replay"
ENGLISH, FRENCH = "lm_text/eltec_eng.jsonl", "lm_text/eltec_fra.jsonl"
SHAKESPEARE, BIBLE = "lm_text/tinyshakespeare/input.txt", "parallel/bible/BSB.txt"
WIKITEXT = "lm_text/wikitext2_valid_test/valid.txt"
FILES = (ENGLISH, FRENCH, SHAKESPEARE, BIBLE, WIKITEXT)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
REPLAY, SELF = "a real novel", "its own text"


class Method(NamedTuple):
    """A row: its label, its graft, and where its old text comes from."""

    label: str
    graft: dict[str, Any]
    old: str = ""
    objective: str = "replay"


def _neutral(start: str) -> dict[str, Any]:
    return {"kind": "neutral-residues", "alpha": 10.0, "gate_init": start}


METHODS = {
    "lora": Method("LoRA", {"kind": "lora"}),
    "lora-replay": Method("LoRA", {"kind": "lora"}, REPLAY),
    "lora-self": Method("LoRA", {"kind": "lora"}, SELF),
    "lora-self-distil": Method("LoRA", {"kind": "lora"}, SELF, "distil"),
    "adapter-self": Method("vanilla adapters", {"kind": "adapter"}, SELF),
    "random": Method("neutral residues, random gates", _neutral("random")),
    "random-replay": Method("neutral residues, random gates", _neutral("random"), REPLAY),
    "random-self": Method("neutral residues, random gates", _neutral("random"), SELF),
    "open": Method("neutral residues, open gates", _neutral("open")),
    "open-replay": Method("neutral residues, open gates", _neutral("open"), REPLAY),
    "open-self": Method("neutral residues, open gates", _neutral("open"), SELF),
    "open-self-distil": Method("neutral residues, open gates", _neutral("open"), SELF, "distil"),
}
# The aims of the issue that asked for this: open gates with the model's own text, beside LoRA with the same text.
AIMS = (
    ("learned", 1.0, operator.ge),
    ("forgotten", 0.15, operator.le),
    ("forgotten_shakespeare", 0.3, operator.le),
    ("forgotten_bible", 0.3, operator.le),
)


class SelfReplayStudy(Study):
    """The runs of the experiment."""

    def run(self, name: str, rate: float, seed: int) -> GraftRun:
        """One row at one rate."""
        method, quick = METHODS[name], self.options.quick
        steps, rows, length = (4, 4, 64) if quick else (300, 4, 256)
        return GraftRun(
            id=f"{name}_lr{rate:g}_s{seed}",
            label=self.label(name),
            backbone=self.backbone(),
            graft=graft_config(method.graft),
            data=self._data(method, seed, length),
            training=training_config(steps, rows, rate, seed, warmup_steps=min(10, steps // 4)),
            evaluation=self.evaluation(),
        )

    def label(self, name: str) -> str:
        """A row's name in tables."""
        method = METHODS[name]
        objective = ", distilled" if method.objective == "distil" else ""
        return f"{method.label}, {f'replay of {method.old}{objective}' if method.old else 'no old text'}"

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

    def _data(self, method: Method, seed: int, length: int) -> DataConfig:
        english, french, shakespeare, bible, wikitext = (str(self.options.data / name) for name in FILES)
        some = {"limit_characters": 60_000}
        own = {"self": True, "tokens": 500 if self.options.quick else 80_000}
        old: dict[str, list[dict[str, Any]]] = {REPLAY: [{"path": english, "documents": "23:24"}], SELF: [own], "": []}
        sets: dict[str, dict[str, Any]] = {
            "old": {"path": english, "documents": "24:25", "skip_characters": 150_000},
            "new": {"path": french, "documents": "29:30"},
            "shakespeare": {"path": shakespeare},
            "bible": {"path": bible},
            "validation_old": {"path": wikitext},
            "validation_new": {"path": french, "documents": "27:28"},
        }
        return DataConfig.parse(
            {
                "new": [{"path": french, "documents": "0:27", "limit_characters": 3_000_000}],
                "old": old[method.old],
                "replay_fraction": 0.1 if method.old else 0.0,
                "old_objective": method.objective,
                "length": length,
                "test": {name: [values | some] for name, values in sets.items()},
                "seed": seed,
            }
        )


def run(options: Options) -> Results:
    """Search each row's rate with the first seed, then run the other seeds at the best."""
    check_files(options, FILES)
    study = SelfReplayStudy(options)
    rates = RATES[1:2] if options.quick else RATES
    first = study.seeds[0]
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    searched = {name: [study.run(name, rate, first) for rate in rates] for name in METHODS}
    study.execute([run for runs in searched.values() for run in runs], "the rates")

    def loss(run: GraftRun) -> float:
        return sum(metric(study.measured[run.id], name) for name in ("validation_old", "validation_new"))

    chosen = {name: min(runs, key=loss).training.learning_rate for name, runs in searched.items()}
    runs = {name: [study.run(name, rate, seed) for seed in study.seeds] for name, rate in chosen.items()}
    study.execute([run for by_seed in runs.values() for run in by_seed], "the seeds")
    for by_seed in runs.values():
        for each in by_seed:
            _add_forgotten(study, each)
    rows = [over_seeds([study.measured[each.id] for each in runs[name]], name, study.label(name)) for name in METHODS]
    by_seed = {
        name: [{key: metric(study.measured[each.id], key) for key in _COMPARED} for each in of_row]
        for name, of_row in runs.items()
    }
    details = {"rates": chosen, "settings_per_row": len(rates), "by_seed": by_seed, "seconds": study.seconds}
    return study.write(NAME, [bare.row, *rows], aims=aims(rows), details=details)


_COMPARED = ("learned", "forgotten", "forgotten_shakespeare", "forgotten_bible", "own_kl", "new_kl")


def _add_forgotten(study: SelfReplayStudy, run: GraftRun) -> None:
    """Forgetting on text that is unlike the replay."""
    bare, measurement = study.measured["backbone"], study.measured[run.id]
    for name in ("shakespeare", "bible"):
        measurement.add_metrics({f"forgotten_{name}": metric(measurement, name) - metric(bare, name)})


def aims(rows: list[Row]) -> list[Aim]:
    """Open gates with the model's own text, over LoRA with the same text; the better objective on novels."""
    values = numbers_of(rows)
    ours = min(("open-self", "open-self-distil"), key=lambda name: values[name]["forgotten"])
    return [
        aim(f"{name} of {ours} over LoRA's", name, bound, values[ours][name] / values["lora-self"][name], relation)
        for name, bound, relation in AIMS
    ]

"""SmolLM2 learns German, French and Python one after the other: does a separate graft for each keep the earlier ones?

Rates and settings are those that `keep-smollm2` chose on validation texts for German; no row is searched here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.recipe import GrowthRecipe
from graftlm.runs.run import Run

NAME = "grow-smollm2"
MODEL = "smollm2-135m-instruct"
WIKITEXT = "lm_text/wikitext2_valid_test/test.txt"
ENGLISH = "lm_text/eltec_eng.jsonl"


class Text(NamedTuple):
    """New text of one stage.

    Attributes:
        file: file of the data folder.
        trained: documents of training.
        tested: documents of the test.
    """

    file: str
    trained: str
    tested: str


TEXTS = {
    "de": Text("lm_text/eltec_deu.jsonl", "0:20", "21:22"),
    "fr": Text("lm_text/eltec_fra.jsonl", "0:20", "29:30"),
    "py": Text("routing/code/thealgorithms_py.jsonl", "0:900", "1000:1100"),
}
FILES = (WIKITEXT, ENGLISH, *(text.file for text in TEXTS.values()))
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 1.0, "init": "he"}
LORA = {"kind": "lora", "capacity": 0.1, "scale": 2.0}
WIDE_LORA = {**LORA, "capacity": 0.3}  # as many weights as three grafts
RATES = {"neutral-residues": 6e-3, "lora": 1e-3}
ALL = tuple(TEXTS)


class GrowRow(NamedTuple):
    """A row.

    Attributes:
        label: label of the row.
        languages: its stages in order.
        graft: config of its graft.
        replay: share of old text, which the model samples itself.
    """

    label: str
    languages: tuple[str, ...]
    graft: dict[str, Any]
    replay: float


ROWS = {
    "alone_de": GrowRow("German alone", ("de",), NEUTRAL, 0.25),
    "alone_fr": GrowRow("French alone", ("fr",), NEUTRAL, 0.25),
    "alone_py": GrowRow("Python alone", ("py",), NEUTRAL, 0.25),
    "together": GrowRow("three grafts together", ALL, NEUTRAL, 0.25),
    "lora_sequential": GrowRow("one LoRA, one after the other", ALL, LORA, 0.25),
    "lora_sequential_wide": GrowRow("one LoRA of three times the size", ALL, WIDE_LORA, 0.25),
    "lora_sequential_plain": GrowRow("one LoRA, without old text", ALL, LORA, 0.0),
}


class GrowStudy(Study):
    """The runs of the experiment."""

    def recipe(self, row: GrowRow, seed: int) -> GrowthRecipe:
        """Return the recipe of a row: its languages in order, with one graft for all of them if it is a LoRA."""
        quick = self.options.quick
        stages = {}
        for name in row.languages:
            text = TEXTS[name]
            stages[name] = {"data": {"new": self._source(text.file, text.trained, 2_000_000)}}
        backbone = {"name": self.options.backbone or MODEL, "dtype": "bfloat16"}
        if self.options.device:
            backbone["device"] = self.options.device
        kind = row.graft["kind"]
        steps = 3 if quick else 40
        tokens = 200 if quick else 2048
        return GrowthRecipe.parse(
            {
                "backbone": backbone,
                "graft": dict(row.graft),
                "one_graft": kind == "lora",
                "stages": stages,
                "data": self._data(row.replay, seed),
                "training": {
                    "steps": steps,
                    "batch_size": 2,
                    "learning_rate": RATES[kind],
                    "warmup_steps": steps // 10,
                    "seed": seed,
                    "precision": "bf16",
                    "checkpoint_every": steps,
                    "keep_checkpoints": 1,
                },
                "evaluation": {
                    "limit_tokens": tokens,
                    "own_tokens": tokens,
                    "precision": "bf16",
                    "decode_prompts": 0,
                    "batch_size": 8,
                },
            }
        )

    def _data(self, replay: float, seed: int) -> dict[str, Any]:
        quick = self.options.quick
        tests = {
            "old": self._source(WIKITEXT, "0:", 60_000),
            "novels": self._source(ENGLISH, "20:21", 60_000),
        }
        for name, text in TEXTS.items():
            tests[name] = self._source(text.file, text.tested, 60_000)
        return {
            "old": [{"self": True, "tokens": 300 if quick else 24_000}] if replay else [],
            "replay_fraction": replay,
            "length": 128 if quick else 256,
            "test": tests,
            "seed": seed,
        }

    def _source(self, name: str, documents: str, characters: int) -> list[dict[str, Any]]:
        source = {
            "path": str(self.options.data / name),
            "documents": documents,
            "limit_characters": characters,
        }
        return [source]

    def grown(self, name: str, seed: int) -> list[Run]:
        """Return the backbone's run and the stages of a row in order."""
        runs = self.recipe(ROWS[name], seed).runs()
        ids = {run.id: stage_id(name, run.id, seed) for run in runs}
        renamed = []
        for run in runs:
            depends_on = tuple(ids[dependency] for dependency in run.depends_on)
            renamed.append(run.model_copy(update={"id": ids[run.id], "depends_on": depends_on}))
        return renamed


def stage_id(row: str, stage: str, seed: int) -> str:
    """Return the id of a run. The first stage of `together` is `alone_de`, which is trained once."""
    if stage == "backbone":
        return stage
    if row.startswith("alone") or (row == "together" and stage == "de"):
        return f"alone_{stage}_s{seed}"
    return f"{row}_{stage}_s{seed}"


def run(options: Options) -> Results:
    """Train all rows' stages, seed by seed."""
    check_files(options, FILES)
    study = GrowStudy(options)
    for seed in study.seeds:
        runs = {run.id: run for row in ROWS for run in study.grown(row, seed)}
        study.execute(list(runs.values()), f"seed {seed}")
    rows = [study.measured["backbone"].row]
    for name, row in ROWS.items():
        last_stages = [add_change(study, name, row.languages, seed) for seed in study.seeds]
        rows.append(over_seeds(last_stages, name, row.label))
    return study.write(NAME, rows, aims=aims(rows), details={"seconds": study.seconds})


def add_change(study: GrowStudy, row: str, languages: Sequence[str], seed: int) -> Measurement:
    """Return a row's last stage with its learning of each language, and its loss since the stage of that language."""
    bare = study.measured["backbone"]
    last = study.measured[stage_id(row, languages[-1], seed)]
    change = {"forgotten_novels": metric(last, "novels") - metric(bare, "novels")}
    for language in languages:
        change[f"learned_{language}"] = metric(bare, language) - metric(last, language)
    for language in languages[:-1]:
        taught = study.measured[stage_id(row, language, seed)]
        change[f"lost_{language}"] = metric(last, language) - metric(taught, language)
    if row == "together":
        for language in languages:
            alone = study.measured[stage_id(f"alone_{language}", language, seed)]
            change[f"over_alone_{language}"] = metric(last, language) / metric(alone, language) - 1
    last.add_metrics(change)
    return last


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims: each language within 3% of training alone, and English forgotten by at most 0.02 nats."""
    together = numbers_of(rows)["together"]
    shown = []
    for language in TEXTS:
        name = f"over_alone_{language}"
        text = f"loss on {language} of together over alone, minus 1"
        shown.append(aim(text, name, 0.03, together[name], operator.le))
    forgotten = [
        aim(f"{name} of together", name, 0.02, together[name], operator.le)
        for name in ("forgotten", "forgotten_novels")
    ]
    return [*shown, *forgotten]

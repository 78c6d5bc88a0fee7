"""SmolLM2 composed with three specialists at once: copies of it that were trained on German, on French and on code.

Every trained row takes as many steps on the same data, at the rate that its own search on validation text chose. No
document of a test is in training or validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.composed import LABELS as SHARED_LABELS
from experiments.composed import ComposedRow, ComposedStudy, PromptTask, better_parent, composed_rows
from experiments.keep_smollm2.run import CODE, ENGLISH, GERMAN, MODEL
from experiments.parents import FRENCH, spaced, write_examples
from experiments.study import check_files, training_config
from graftlm.artifact import load_graft
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Results
from graftlm.export import export_graft
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun

NTREX = {name: f"parallel/ntrex/newstest2019-{file}.txt" for name, file in
         {"english": "src.eng", "german": "ref.deu", "french": "ref.fra"}.items()}  # fmt: skip
SOURCES = {"german": GERMAN, "french": FRENCH, "python": CODE, "old": ENGLISH}
FILES = (*SOURCES.values(), *NTREX.values())
# Documents of each source: of specialists and of rows, of validation, of the test.
DOCUMENTS = {
    "german": ("0:20", "20:21", "21:22"),
    "french": ("0:27", "27:28", "29:30"),
    "python": ("0:900", "900:1000", "1000:1163"),
    "old": ("0:20", "20:21", "24:25"),
}
SPECIALISTS = ("german", "french", "python")
TABLES = {"main": ("mixture", "both", "lora"), "controls": ("cross", "skyline", "vanilla_m_a")}
LABELS = SHARED_LABELS | {
    "m_b": "SmolLM2",
    **{name: f"specialist, {name}" for name in SPECIALISTS},
    "vanilla_m_a": "both, with three copies of SmolLM2",
}
TEXTS = {"german_bpb": "German", "french_bpb": "French", "python_bpb": "Python", "old_bpb": "English"}
LENGTH, TRAINED, TESTED = 128, 400_000, 4_000  # tokens of a row; characters of each source


def run(options: Options) -> Results:
    """Train the specialists, then search and run the chosen tables."""
    options.chosen(tuple(TABLES))
    check_files(options, FILES)
    anchor = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
    study = ComposedStudy(options, TABLES, LABELS, anchor, steps=18, batch_size=2)
    tokens = 100 if options.quick else 800
    study.evaluation = EvaluationConfig(
        limit_tokens=tokens, decode_prompts=0, own_tokens=0, precision="bf16", batch_size=8
    )
    study.tasks = write_tasks(options)
    backbone = anchor.load()
    folders = make_specialists(study, backbone)
    rows = composed_rows(folders, backbone, **({"stride": 1} if options.quick else {"stride": 15}))
    copies = {name: {"name": anchor.name, "dtype": anchor.dtype} for name in SPECIALISTS}
    rows["vanilla_m_a"] = rows["both"] | {"augmenting": copies}
    models = {name: anchor.model_copy(update={"name": str(folder)}) for name, folder in folders.items()}
    data = data_of(options)
    trained = [ComposedRow(name, graft, data) for name, graft in rows.items()]
    results, details = study.measure({"m_b": anchor, **models}, trained)
    details["setting"] = {"steps": study.steps, "batch_size": study.batch_size, "length": LENGTH, "tested": tokens}
    return study.report(__file__, results, better_parent(TEXTS, ("m_b", *SPECIALISTS)), TEXTS, details)


def make_specialists(study: ComposedStudy, backbone: Backbone) -> dict[str, Path]:
    """The folders of SmolLM2 with a merged LoRA of each specialist's text."""
    steps = 3 if study.options.quick else 20
    runs = [
        GraftRun(
            id=f"specialist_{name}",
            backbone=study.anchor,
            graft=graft_config({"kind": "lora", "capacity": 0.1}),
            data=DataConfig.parse(
                {
                    "new": [source(study.options, name, 0)],
                    "replay_fraction": 0.0,
                    "length": LENGTH,
                    "test": {"new": [source(study.options, name, 1)]},
                }
            ),
            training=training_config(steps, 4, 1e-3, 0, warmup_steps=2, precision="bf16"),
            evaluation=study.evaluation,
        )
        for name in SPECIALISTS
    ]
    study.execute(runs, "the specialists")
    folders = {name: study.options.out / "specialists" / name for name in SPECIALISTS}
    for name, folder in folders.items():
        if not (folder / "config.json").exists():
            export_graft(load_graft(study.runs / f"specialist_{name}" / "graft", backbone), backbone, folder)
    return folders


def source(options: Options, name: str, part: int) -> dict[str, Any]:
    """A source's documents for training (0), validation (1) or test (2)."""
    limit = TESTED if part else TRAINED
    return {
        "path": str(options.data / SOURCES[name]),
        "documents": None if options.quick else DOCUMENTS[name][part],
        "limit_characters": limit,
    }


def data_of(options: Options) -> DataConfig:
    """What every row is trained and measured on."""
    tests = {name: [source(options, name, 2)] for name in SOURCES}
    tests |= {f"validation_{name}": [source(options, name, 1)] for name in SOURCES}
    return DataConfig.parse(
        {
            "new": [source(options, name, 0) for name in SPECIALISTS],
            "old": [source(options, "old", 0)],
            "replay_fraction": 0.25,
            "length": LENGTH,
            "test": tests,
        }
    )


def write_tasks(options: Options) -> list[PromptTask]:
    """Sentences of NTREX, into English and from it; no row is trained on pairs."""
    sides: Mapping[str, list[str]] = {
        name: (options.data / file).read_text(encoding="utf-8").splitlines() for name, file in NTREX.items()
    }
    tasks = []
    for name in ("german", "french"):
        pairs = [pair for pair in zip(sides[name], sides["english"], strict=True) if max(map(len, pair)) <= 140]
        chosen, label = spaced(pairs, 3 if options.quick else 10), name.capitalize()
        into = [(f"{label}: {text}\nEnglish:", f" {english}\n") for text, english in chosen]
        out = [(f"English: {english}\n{label}:", f" {text}\n") for text, english in chosen]
        for task, examples in ((f"ntrex_{name}_english", into), (f"ntrex_english_{name}", out)):
            path = options.out / "tasks" / f"{task}.jsonl"
            write_examples(path, examples)
            tasks.append(PromptTask(name=task, path=str(path)))
    return tasks

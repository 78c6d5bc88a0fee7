"""SmolLM2 composed with three specialists at once: copies of it that were trained on German, on French and on code.

Every trained row takes as many steps on the same data, at the rate that its own search on validation text chose. No
document of a test is in training or validation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from experiments import Options
from experiments.composed import LABELS as SHARED_LABELS
from experiments.composed import (
    SHARES,
    ComposedRow,
    ComposedStudy,
    PromptTask,
    Ratios,
    better_parent,
    composed_rows,
    named,
    over_controls,
)
from experiments.composition_language.run import BIBLE, into_english, read_verses
from experiments.keep_smollm2.run import CODE, ENGLISH, GERMAN, MODEL
from experiments.parents import FRENCH, cut_texts, fitting, read_examples, read_texts, spaced, write_examples
from experiments.study import check_files, training_config
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.demo.corpus import write_documents
from graftlm.evaluation import Results, Row
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.examples import Example, chrf
from graftlm.export import export_graft
from graftlm.files.digests import digest
from graftlm.files.writing import fill_once
from graftlm.grafts import graft_config
from graftlm.grafts.composition.augmenting import AugmentingModel
from graftlm.runs.graft_run import GraftRun
from graftlm.store.artifact import load_graft

NTREX = {name: f"parallel/ntrex/newstest2019-{file}.txt" for name, file in
         {"english": "src.eng", "german": "ref.deu", "french": "ref.fra"}.items()}  # fmt: skip
SOURCES = {"german": GERMAN, "french": FRENCH, "python": CODE, "old": ENGLISH}
FILES = (*SOURCES.values(), *NTREX.values(), *BIBLE)
PARTS = ("train", "validation", "test")
# Documents of each part. No author of novels is in two parts.
DOCUMENTS = {
    "german": {"train": range(19), "validation": range(19, 21), "test": range(21, 24)},
    "french": {"train": range(24), "validation": range(24, 27), "test": range(27, 31)},
    "python": {"train": range(900), "validation": range(900, 1000), "test": range(1000, 1163)},
    "old": {"train": range(18), "validation": range(18, 21), "test": range(21, 25)},
}
CHARACTERS = {"train": 400_000, "validation": 1_800, "test": 2_000}  # of each source
LANGUAGES, SPECIALISTS = ("german", "french"), ("german", "french", "python")
PARENTS = ("m_b", *SPECIALISTS)
RATES = {"composition": (3e-4, 1e-3, 3e-3), "lora": (3e-4, 1e-3, 3e-3), "finetune": (3e-5, 1e-4, 3e-4)}
TABLES = {"main": ("both", "mixture", "lora"), "controls": ("vanilla_m_a", "random_m_a", "cross", "skyline")}
CONTROLS = ("fixed_mixture", "mixture", "cross", "lora", "skyline", "vanilla_m_a", "random_m_a")
LABELS = SHARED_LABELS | {
    "m_b": "SmolLM2",
    **{name: f"specialist, {name.capitalize()}" for name in SPECIALISTS},
    "vanilla_m_a": "both, with three copies of SmolLM2",
    "random_m_a": "both, with one random model three times",
    "copied": "the source, not translated",
    "constant": "one English sentence for every source",
}
TEXTS = {"german_bpb": "German", "french_bpb": "French", "python_bpb": "Python", "old_bpb": "English"}
INTO_ENGLISH = {f"ntrex_{name}_english_bpb": f"NTREX, {name.capitalize()} into English" for name in LANGUAGES}
INTO_ENGLISH["verses_french_english_bpb"] = "verses, French into English"
LENGTH = 128  # tokens of a row
LONGEST = 140  # characters of a sentence of a pair


def run(options: Options) -> Results:
    """Train the specialists, then search and run the chosen tables."""
    options.chosen(tuple(TABLES))
    check_files(options, FILES)
    anchor = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
    study = ComposedStudy(options, TABLES, LABELS, anchor, steps=24, batch_size=4)
    study.rates, study.shares, study.search_steps = RATES, (*SHARES, 0.9), study.steps
    study.evaluation = EvaluationConfig(decode_prompts=0, own_tokens=0, precision="bf16", batch_size=8)
    backbone = anchor.load()
    study.tasks = write_texts(options, backbone)
    folders = make_specialists(study, backbone)
    trained = trained_rows(options, folders, backbone)
    models = {name: anchor.model_copy(update={"name": str(folders[name])}) for name in SPECIALISTS}
    with frozen_states_kept():
        results, details = study.measure({"m_b": anchor, **models}, trained)
    results += trivial_rows(study.tasks, options.out / "texts" / "pairs-prompts.jsonl")
    setting: dict[str, Any] = {"steps": study.steps, "batch_size": study.batch_size, "length": LENGTH}
    setting |= {"characters": CHARACTERS, "rates": {kind: list(rates) for kind, rates in RATES.items()}}
    details["setting"] = setting
    return study.report(__file__, results, ratios(), TEXTS, details)


def make_specialists(study: ComposedStudy, backbone: Backbone) -> dict[str, Path]:
    """The folders of SmolLM2 with a merged LoRA of each specialist's text, of SmolLM2 as it is, and random.

    The rate of each is chosen on its validation text, by a quarter of the steps.
    """
    quick = study.options.quick
    steps = 4 if quick else 36
    candidates = {
        f"specialist_{name}": [
            _specialist(study, name, rate, steps // 4) for rate in RATES["lora"][: 1 if quick else 3]
        ]
        for name in SPECIALISTS
    }
    chosen = study.choose(candidates, ["new"], "the specialists' search")
    runs = {
        name: _specialist(study, name, chosen[f"specialist_{name}"].training.learning_rate, steps)
        for name in SPECIALISTS
    }
    study.execute(list(runs.values()), "the specialists")
    torch.manual_seed(0)
    model: Any = backbone.model
    untrained = {"vanilla": model, "random": type(model)(model.config)}
    folders = {name: study.options.out / "specialists" / name for name in untrained}
    for name, other in untrained.items():
        other.to(dtype=model.dtype).save_pretrained(folders[name])
        backbone.need_tokenizer().save_pretrained(folders[name])
    return folders | {name: _merged(study, run, backbone) for name, run in runs.items()}


def _merged(study: ComposedStudy, run: GraftRun, backbone: Backbone) -> Path:
    def fill(folder: Path) -> None:
        shutil.rmtree(folder / "model", ignore_errors=True)  # what a killed export has left
        export_graft(load_graft(study.runs / run.id / "graft", backbone), backbone, folder / "model")

    return fill_once(study.options.out / "specialists" / run.id, {"id": run.id, "run": run.settings()}, fill) / "model"


def _specialist(study: ComposedStudy, name: str, rate: float, steps: int) -> GraftRun:
    data = {
        "new": [source(study.options, name, "train")],
        "replay_fraction": 0.0,
        "length": LENGTH,
        "boundaries": "whole",
        "test": {"new": [source(study.options, name, "validation")]},
    }
    return GraftRun(
        id=f"specialist_{name}_lr{rate:g}_{steps}",
        backbone=study.anchor,
        graft=graft_config({"kind": "lora", "capacity": 0.1}),
        data=DataConfig.parse(data),
        training=training_config(steps, study.batch_size, rate, 0, warmup_steps=min(5, steps // 3), precision="bf16"),
        evaluation=study.evaluation,
    )


def trained_rows(options: Options, folders: Mapping[str, Path], backbone: Backbone) -> list[ComposedRow]:
    """Every trained row, those first whose frozen states also serve others."""
    tests = {name: [source(options, name, "test")] for name in SOURCES}
    tests |= {f"validation_{name}": [source(options, name, "validation")] for name in SOURCES}
    data = DataConfig.parse(
        {
            "new": [source(options, name, "train") for name in SPECIALISTS]
            + [{"path": str(options.out / "texts" / "pairs-prompts.jsonl"), "prompt_column": "prompt"}],
            "old": [source(options, "old", "train")],
            "replay_fraction": 0.25,
            "length": LENGTH,
            "boundaries": "whole",
            "test": tests,
        }
    )
    rows = composed_rows({name: folders[name] for name in SPECIALISTS}, backbone, stride=1 if options.quick else 15)
    for name in ("vanilla", "random"):
        rows[f"{name}_m_a"] = rows["both"] | {"augmenting": named(dict.fromkeys(SPECIALISTS, folders[name]))}
    order = [name for table in TABLES.values() for name in table]
    return [ComposedRow(name, rows[name], data) for name in order]


def source(options: Options, name: str, part: str) -> dict[str, Any]:
    """The file of one part of a source."""
    return {"path": str(options.out / "texts" / f"{name}-{part}.jsonl")}


def write_texts(options: Options, backbone: Backbone) -> list[PromptTask]:
    """Write an excerpt of every document, and pairs of NTREX; gives the tasks: its last quarter, and verses.

    Training has the first seven tenths of NTREX's sentences: other documents of it. No choice is made on them.
    """
    folder, tokenizer = options.out / "texts", backbone.need_tokenizer()
    for name, file in SOURCES.items():
        for part, texts in excerpts(read_texts(options.data / file), name, quick=options.quick).items():
            cut = cut_texts(texts, tokenizer, LENGTH) if part == "train" else texts
            write_documents(folder / f"{name}-{part}.jsonl", cut)
    trained: list[tuple[str, str]] = []
    verses = read_verses(options.data, LONGEST)
    tested = {"verses_french_english": [into_english(pair) for pair in verses[3 * len(verses) // 4 :]]}
    for name, pairs in read_pairs(options.data).items():
        trained += fitting(spaced(pairs[: 7 * len(pairs) // 10], 300), tokenizer, LENGTH)
        tested[f"ntrex_{name}"] = pairs[3 * len(pairs) // 4 :]
    write_examples(folder / "pairs-prompts.jsonl", trained)
    tasks = []
    for name, pairs in tested.items():
        into = name.endswith("english")
        write_examples(path := folder / f"{name}.jsonl", spaced(pairs, 2 if options.quick else 24 if into else 8))
        tasks.append(PromptTask(name=name, path=str(path), answers=12 if into else 0))
    return tasks


def trivial_rows(tasks: Sequence[PromptTask], trained: Path) -> list[Row]:
    """chrF of answers that no model gives: the source itself, and one sentence of the pairs that are trained on."""
    into = (text for prompt, text in read_examples(trained) if prompt.endswith("English:"))
    rows = {name: Row(id=name, label=LABELS[name], metrics={}) for name in ("copied", "constant")}
    constant = next(into).strip()
    for task in (task for task in tasks if task.answers):
        examples = read_examples(Path(task.path))[: task.answers]
        right = [Example(prompt=prompt, answer=answer) for prompt, answer in examples]
        sources = [prompt.partition(": ")[2].rpartition("\n")[0] for prompt, _ in examples]
        for name, answers in {"copied": sources, "constant": [constant] * len(examples)}.items():
            rows[name].metrics[f"{task.name}_chrf"] = chrf(answers, right, beta=1)
    return list(rows.values())


def excerpts(texts: Sequence[str], name: str, *, quick: bool = False) -> dict[str, list[str]]:
    """By part, the text behind the first quarter of its documents: of all together as much as `CHARACTERS` says."""
    parts: dict[str, list[str]] = {}
    for part, characters in CHARACTERS.items():
        documents = texts if quick else [texts[index] for index in DOCUMENTS[name][part]]
        chosen = spaced(documents, 200 if part == "train" else 6)
        size = characters // len(chosen)
        parts[part] = [text[len(text) // 4 :][:size] for text in chosen]
    return parts


def read_pairs(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Prompts and answers of NTREX's sentences of at most `LONGEST` characters, in order, into English and from it."""
    sides = {name: (data / file).read_text(encoding="utf-8").splitlines() for name, file in NTREX.items()}
    pairs: dict[str, list[tuple[str, str]]] = {}
    for name in LANGUAGES:
        both = [pair for pair in zip(sides[name], sides["english"], strict=True) if max(map(len, pair)) <= LONGEST]
        label = name.capitalize()
        pairs[f"{name}_english"] = [(f"{label}: {text}\nEnglish:", f" {english}\n") for text, english in both]
        pairs[f"english_{name}"] = [(f"English: {english}\n{label}:", f" {text}\n") for text, english in both]
    return pairs


def ratios() -> Ratios:
    """The aims: near the better parent on each text, better into English; and below each control."""
    aims = better_parent(TEXTS, PARENTS) | over_controls(TEXTS | INTO_ENGLISH, CONTROLS)
    for name, text in INTO_ENGLISH.items():
        aims[name, "both", PARENTS, 0.97] = f"{text}: both, over the best parent"
    return aims


@contextmanager
def frozen_states_kept() -> Iterator[None]:
    """What frozen models gave for a batch is kept for other rows of this process, which read the same batches."""
    kept: dict[str, tuple[dict[int, Tensor], Tensor]] = {}
    run = AugmentingModel._run

    def read(model: AugmentingModel, aligned: Any, cache: Any) -> Any:
        if cache is not None or aligned.inputs is None:
            return run(model, aligned, cache)
        inputs = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in aligned.inputs.items()}
        key = digest([model.backbone.fingerprint.id, inputs])
        if key not in kept or not kept[key][0].keys() >= set(model._layers):
            states, last = run(model, aligned, cache)
            assert states is not None, "there are inputs"
            assert last is not None, "there are inputs"
            kept[key] = dict(zip(model._layers, states, strict=True)), last
        states, last = kept[key]
        return [states[layer] for layer in model._layers], last

    with mock.patch.object(AugmentingModel, "_run", read):
        yield

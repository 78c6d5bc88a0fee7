"""SmolLM2 composed with three specialists at once: copies of it that were trained on German, on French and on code.

Every trained row takes the same number of steps on the same data, at the learning rate that its own search on
validation text chose. No document of a test is in training or validation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from experiments.python_texts import write_documents
from experiments.study import check_files, training_config
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
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

NTREX = {
    "english": "parallel/ntrex/newstest2019-src.eng.txt",
    "german": "parallel/ntrex/newstest2019-ref.deu.txt",
    "french": "parallel/ntrex/newstest2019-ref.fra.txt",
}
SOURCES = {
    "german": GERMAN,
    "french": FRENCH,
    "python": CODE,
    "old": ENGLISH,
}
FILES = (*SOURCES.values(), *NTREX.values(), *BIBLE)
PARTS = ("train", "validation", "test")
# Documents of each part. No author of novels is in two parts.
DOCUMENTS = {
    "german": {"train": range(19), "validation": range(19, 21), "test": range(21, 24)},
    "french": {"train": range(24), "validation": range(24, 27), "test": range(27, 31)},
    "python": {"train": range(900), "validation": range(900, 1000), "test": range(1000, 1163)},
    "old": {"train": range(18), "validation": range(18, 21), "test": range(21, 25)},
}
# Characters of each source, by part.
CHARACTERS = {"train": 400_000, "validation": 1_800, "test": 2_000}
LANGUAGES = ("german", "french")
SPECIALISTS = ("german", "french", "python")
PARENTS = ("m_b", *SPECIALISTS)
RATES = {
    "composition": (3e-4, 1e-3, 3e-3),
    "lora": (3e-4, 1e-3, 3e-3),
    "finetune": (3e-5, 1e-4, 3e-4),
}
TABLES = {
    "main": ("both", "mixture", "lora"),
    "controls": ("vanilla_m_a", "random_m_a", "cross", "skyline"),
}
CONTROLS = ("fixed_mixture", "mixture", "cross", "lora", "skyline", "vanilla_m_a", "random_m_a")
LABELS = SHARED_LABELS | {
    "m_b": "SmolLM2",
    "german": "specialist, German",
    "french": "specialist, French",
    "python": "specialist, Python",
    "vanilla_m_a": "both, with three copies of SmolLM2",
    "random_m_a": "both, with one random model three times",
    "copied": "the source, not translated",
    "constant": "one English sentence for every source",
}
TEXTS = {
    "german_bpb": "German",
    "french_bpb": "French",
    "python_bpb": "Python",
    "old_bpb": "English",
}
INTO_ENGLISH = {
    "ntrex_german_english_bpb": "NTREX, German into English",
    "ntrex_french_english_bpb": "NTREX, French into English",
    "verses_french_english_bpb": "verses, French into English",
}
LENGTH = 128  # tokens of a row
LONGEST = 140  # characters of a sentence of a pair

Pair = tuple[str, str]
States = tuple[dict[int, Tensor], Tensor]


def run(options: Options) -> Results:
    """Train the specialists, then search and run the chosen tables."""
    options.chosen(tuple(TABLES))
    check_files(options, FILES)
    anchor = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
    study = ComposedStudy(options, TABLES, LABELS, anchor, steps=24, batch_size=4)
    study.rates = RATES
    study.shares = (*SHARES, 0.9)
    study.search_steps = study.steps
    study.evaluation = EvaluationConfig(
        decode_prompts=0,
        own_tokens=0,
        precision="bf16",
        batch_size=8,
    )
    backbone = anchor.load()
    study.tasks = write_texts(options, backbone)
    folders = make_specialists(study, backbone)
    rows = trained_rows(options, folders, backbone)
    models = {"m_b": anchor}
    for name in SPECIALISTS:
        models[name] = anchor.model_copy(update={"name": str(folders[name])})
    with frozen_states_kept():
        results, details = study.measure(models, rows)
    results += trivial_rows(study.tasks, options.out / "texts" / "pairs-prompts.jsonl")
    details["setting"] = {
        "steps": study.steps,
        "batch_size": study.batch_size,
        "length": LENGTH,
        "characters": CHARACTERS,
        "rates": {kind: list(rates) for kind, rates in RATES.items()},
    }
    return study.report(__file__, results, ratios(), TEXTS, details)


def make_specialists(study: ComposedStudy, backbone: Backbone) -> dict[str, Path]:
    """Return folders of the specialists, of SmolLM2 itself (`vanilla`) and of a random model of its shape.

    A specialist is SmolLM2 with a merged LoRA. The learning rate of each is chosen on its validation text with a
    quarter of the steps.
    """
    quick = study.options.quick
    steps = 4 if quick else 36
    rates = RATES["lora"][:1] if quick else RATES["lora"]
    candidates = {}
    for name in SPECIALISTS:
        candidates[f"specialist_{name}"] = [_specialist(study, name, rate, steps // 4) for rate in rates]
    chosen = study.choose(candidates, ["new"], "the specialists' search")
    runs = {}
    for name in SPECIALISTS:
        rate = chosen[f"specialist_{name}"].training.learning_rate
        runs[name] = _specialist(study, name, rate, steps)
    study.execute(list(runs.values()), "the specialists")
    folders = _untrained(study, backbone)
    for name, run in runs.items():
        folders[name] = _merged(study, run, backbone)
    return folders


def _untrained(study: ComposedStudy, backbone: Backbone) -> dict[str, Path]:
    """Write SmolLM2 itself and a model of its shape with random weights."""
    torch.manual_seed(0)
    model: Any = backbone.model
    models = {
        "vanilla": model,
        "random": type(model)(model.config),
    }
    folders = {}
    for name, other in models.items():
        folder = study.options.out / "specialists" / name
        other.to(dtype=model.dtype).save_pretrained(folder)
        backbone.need_tokenizer().save_pretrained(folder)
        folders[name] = folder
    return folders


def _merged(study: ComposedStudy, run: GraftRun, backbone: Backbone) -> Path:
    """Export the model of a run with its LoRA merged, unless it exists."""

    def fill(folder: Path) -> None:
        shutil.rmtree(folder / "model", ignore_errors=True)  # remains of a killed export
        graft = load_graft(study.runs / run.id / "graft", backbone)
        export_graft(graft, backbone, folder / "model")

    folder = study.options.out / "specialists" / run.id
    settings = {"id": run.id, "run": run.settings()}
    return fill_once(folder, settings, fill) / "model"


def _specialist(study: ComposedStudy, name: str, rate: float, steps: int) -> GraftRun:
    data = {
        "new": [source(study.options, name, "train")],
        "replay_fraction": 0.0,
        "length": LENGTH,
        "boundaries": "whole",
        "test": {"new": [source(study.options, name, "validation")]},
    }
    training = training_config(
        steps,
        study.batch_size,
        rate,
        seed=0,
        warmup_steps=min(5, steps // 3),
        precision="bf16",
    )
    return GraftRun(
        id=f"specialist_{name}_lr{rate:g}_{steps}",
        backbone=study.anchor,
        graft=graft_config({"kind": "lora", "capacity": 0.1}),
        data=DataConfig.parse(data),
        training=training,
        evaluation=study.evaluation,
    )


def trained_rows(options: Options, folders: Mapping[str, Path], backbone: Backbone) -> list[ComposedRow]:
    """Return every trained row; rows whose frozen states also serve others come first."""
    tests = {}
    for name in SOURCES:
        tests[name] = [source(options, name, "test")]
    for name in SOURCES:
        tests[f"validation_{name}"] = [source(options, name, "validation")]
    pairs = {
        "path": str(options.out / "texts" / "pairs-prompts.jsonl"),
        "prompt_column": "prompt",
    }
    data = DataConfig.parse(
        {
            "new": [*(source(options, name, "train") for name in SPECIALISTS), pairs],
            "old": [source(options, "old", "train")],
            "replay_fraction": 0.25,
            "length": LENGTH,
            "boundaries": "whole",
            "test": tests,
        }
    )
    specialists = {name: folders[name] for name in SPECIALISTS}
    grafts = composed_rows(specialists, backbone, stride=1 if options.quick else 15)
    for name in ("vanilla", "random"):
        augmenting: dict[str, Path] = dict.fromkeys(SPECIALISTS, folders[name])
        grafts[f"{name}_m_a"] = {**grafts["both"], "augmenting": named(augmenting)}
    return [ComposedRow(name, grafts[name], data) for names in TABLES.values() for name in names]


def source(options: Options, name: str, part: str) -> dict[str, Any]:
    """Return the source config of one part of a text."""
    return {"path": str(options.out / "texts" / f"{name}-{part}.jsonl")}


def write_texts(options: Options, backbone: Backbone) -> list[PromptTask]:
    """Write an excerpt of every document and pairs of sentences, and return the tasks.

    Training takes the first seven tenths of NTREX's sentences, and the tasks the last quarter, from other documents.
    No setting is chosen on them.
    """
    folder = options.out / "texts"
    tokenizer = backbone.need_tokenizer()
    for name, file in SOURCES.items():
        texts_of_source = read_texts(options.data / file)
        for part, texts in excerpts(texts_of_source, name, quick=options.quick).items():
            cut = cut_texts(texts, tokenizer, LENGTH) if part == "train" else texts
            write_documents(folder / f"{name}-{part}.jsonl", cut)
    trained: list[Pair] = []
    verses = read_verses(options.data, LONGEST)
    tested = {"verses_french_english": [into_english(pair) for pair in _last_quarter(verses)]}
    for name, pairs in read_pairs(options.data).items():
        first = spaced(pairs[: 7 * len(pairs) // 10], 300)
        trained += fitting(first, tokenizer, LENGTH)
        tested[f"ntrex_{name}"] = _last_quarter(pairs)
    write_examples(folder / "pairs-prompts.jsonl", trained)
    tasks = []
    for name, pairs in tested.items():
        task = _task(folder, name)
        count = 24 if task.answers else 8
        write_examples(Path(task.path), spaced(pairs, 2 if options.quick else count))
        tasks.append(task)
    return tasks


def _last_quarter(pairs: Sequence[Pair]) -> list[Pair]:
    return list(pairs[3 * len(pairs) // 4 :])


def _task(folder: Path, name: str) -> PromptTask:
    """Return a task; only translations into English are answered."""
    return PromptTask(
        name=name,
        path=str(folder / f"{name}.jsonl"),
        answers=12 if name.endswith("english") else 0,
    )


def trivial_rows(tasks: Sequence[PromptTask], trained: Path) -> list[Row]:
    """Return the chrF of answers without a model: the source itself, and one sentence of the training pairs."""
    into_english_texts = [text for prompt, text in read_examples(trained) if prompt.endswith("English:")]
    constant = into_english_texts[0].strip()
    metrics: dict[str, dict[str, Any]] = {"copied": {}, "constant": {}}
    for task in tasks:
        if not task.answers:
            continue
        examples = read_examples(Path(task.path))[: task.answers]
        right = [Example(prompt=prompt, answer=answer) for prompt, answer in examples]
        sources = [prompt.partition(": ")[2].rpartition("\n")[0] for prompt, _ in examples]
        name = f"{task.name}_chrf"
        metrics["copied"][name] = chrf(sources, right, beta=1)
        metrics["constant"][name] = chrf([constant] * len(examples), right, beta=1)
    return [Row(id=name, label=LABELS[name], metrics=values) for name, values in metrics.items()]


def excerpts(texts: Sequence[str], name: str, *, quick: bool = False) -> dict[str, list[str]]:
    """Return, by part, an excerpt of each document after its first quarter, in all as long as `CHARACTERS`."""
    parts: dict[str, list[str]] = {}
    for part, characters in CHARACTERS.items():
        documents = texts if quick else [texts[index] for index in DOCUMENTS[name][part]]
        chosen = spaced(documents, 200 if part == "train" else 6)
        size = characters // len(chosen)
        parts[part] = [text[len(text) // 4 :][:size] for text in chosen]
    return parts


def read_pairs(data: Path) -> dict[str, list[Pair]]:
    """Return examples of NTREX's sentences of at most `LONGEST` characters, in order, into English and from it."""
    sides = {}
    for name, file in NTREX.items():
        sides[name] = (data / file).read_text(encoding="utf-8").splitlines()
    pairs: dict[str, list[Pair]] = {}
    for name in LANGUAGES:
        label = name.capitalize()
        into_english: list[Pair] = []
        from_english: list[Pair] = []
        for text, english in zip(sides[name], sides["english"], strict=True):
            if max(len(text), len(english)) > LONGEST:
                continue
            into_english.append((f"{label}: {text}\nEnglish:", f" {english}\n"))
            from_english.append((f"English: {english}\n{label}:", f" {text}\n"))
        pairs[f"{name}_english"] = into_english
        pairs[f"english_{name}"] = from_english
    return pairs


def ratios() -> Ratios:
    """Return the aims: close to the best parent on each text, better into English, and below each control."""
    aims = better_parent(TEXTS, PARENTS) | over_controls(TEXTS | INTO_ENGLISH, CONTROLS)
    for name, text in INTO_ENGLISH.items():
        aims[name, "both", PARENTS, 0.97] = f"{text}: both, over the best parent"
    return aims


@contextmanager
def frozen_states_kept() -> Iterator[None]:
    """Keep the states of frozen models for each batch, for other rows in this process that read the same batches."""
    kept: dict[str, States] = {}
    original = AugmentingModel._run

    def cached_run(model: AugmentingModel, aligned: Any, cache: Any) -> Any:
        if cache is not None or aligned.inputs is None:
            return original(model, aligned, cache)
        inputs = {}
        for name, value in aligned.inputs.items():
            inputs[name] = value.tolist() if isinstance(value, Tensor) else value
        key = digest([model.backbone.fingerprint.id, inputs])
        if key not in kept or not kept[key][0].keys() >= set(model._layers):
            states, last = original(model, aligned, cache)
            assert states is not None, "there are inputs"
            assert last is not None, "there are inputs"
            kept[key] = (dict(zip(model._layers, states, strict=True)), last)
        states_by_layer, last = kept[key]
        return [states_by_layer[layer] for layer in model._layers], last

    AugmentingModel._run = cached_run  # type: ignore[method-assign]
    try:
        yield
    finally:
        AugmentingModel._run = original

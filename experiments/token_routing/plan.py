"""What every table stands on: the backbone, the texts, the experts, and how cells are run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoTokenizer

from experiments import Options
from experiments.cells import workers
from experiments.pretrain import DONE
from experiments.study import mini_lm
from experiments.token_routing.lessons import Lesson, read_expert, train_expert
from experiments.token_routing.measure import Cell, run_cell
from experiments.token_routing.setting import FULL, QUICK, Setting, corpus_of, make_backbone
from experiments.token_routing.texts import DOMAINS, write_texts
from graftlm.errors import MissingExtraError

# Chosen by `--table choices`.
TARGETS = ("attention", "ffn")
EXPERT_RATE, XLORA_RATE = 1e-2, 3e-2
# The paper's embedder: a folder of the data, or a package that carries it.


class Plan:
    """The backbone, the texts, and what stands on them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.setting: Setting = QUICK if options.quick else FULL
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.cells = options.out / "cells"
        folder = options.out / "backbone"
        self.backbone = str(options.backbone or make_backbone(options.data, folder, self.setting))
        self.texts = options.out / "texts"
        tokenizer = AutoTokenizer.from_pretrained(self.backbone)
        made = [corpus_of(folder)] if options.backbone is None else []
        self.left_out = write_texts(
            options.data, made, self.texts, self.setting.amounts, tokenizer, self.setting.length
        )

    def lesson(self, domains: Sequence[str], seed: int, rate: float, **more: Any) -> Lesson:
        """The training of an expert, or of a router."""
        said = {"backbone": self.backbone, "texts": str(self.texts), "setting": self.setting, "targets": TARGETS}
        return Lesson(domains=tuple(domains), seed=seed, rate=rate, device=self.options.device, **{**said, **more})

    def experts(self, seed: int, **more: Any) -> dict[str, Lesson]:
        """All experts of a seed, by domain."""
        return {domain: self.lesson([domain], seed, **{"rate": EXPERT_RATE, **more}) for domain in DOMAINS}

    def cell(self, name: str, adapters: Mapping[str, Path], seed: int, **more: Any) -> Cell:
        """A row for one seed."""
        lesson = self.lesson(DOMAINS, seed, more.pop("rate", XLORA_RATE), **_only(more, Lesson))
        paths = {domain: str(path) for domain, path in adapters.items()}
        return Cell(id=f"{name}_s{seed}", adapters=paths, **dict(lesson), **_only(more, Cell, Lesson))

    def train(self, lessons: Mapping[str, Lesson]) -> dict[str, Path]:
        """The folders of trained experts, by the lessons' names."""
        said = {name: lesson.model_dump_json() for name, lesson in lessons.items()}
        folders = {name: str(self.cells / name) for name in lessons}
        spread_out(_train, {name: (said[name], folders[name]) for name in lessons}, self.options.jobs, "experts")
        return {name: Path(folder) for name, folder in folders.items()}

    def run(self, cells: Iterable[Cell], title: str) -> dict[str, dict[str, Any]]:
        """What was measured, by cell id."""
        said = {cell.id: (cell.model_dump_json(), str(self.cells)) for cell in cells}
        found = spread_out(_measure, said, self.options.jobs, title)
        return {name: json.loads(text) for name, text in found.items()}


def embedder_folder(options: Options) -> str:
    """The folder of the paper's sentence embedder.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        DataError: the model is not at hand.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError("sentence-transformers", "routing", "The paper's embedder")
    return mini_lm(options.data, "The paper's embedder")


def spread_out(
    work: Callable[..., str], arguments: Mapping[str, tuple[str, ...]], jobs: int, title: str
) -> dict[str, str]:
    """What `work` gives for each of some arguments, `jobs` processes at a time with one core each."""
    if jobs == 1:  # a process of its own takes longer to start than a small cell to run
        return {name: work(*given) for name, given in arguments.items()}
    found: dict[str, str] = {}
    with Progress() as progress, workers(jobs) as pool:
        bar = progress.add_task(title, total=len(arguments))
        futures = {pool.submit(work, *given): name for name, given in arguments.items()}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            progress.advance(bar)
    return {name: found[name] for name in arguments}


def _train(lesson: str, folder: str) -> str:
    torch.set_num_threads(1)
    return str(train_expert(Lesson.model_validate_json(lesson), Path(folder)))


def _measure(cell: str, out: str) -> str:
    torch.set_num_threads(1)
    return json.dumps(run_cell(Cell.model_validate_json(cell), Path(out)))


def _only(values: Mapping[str, Any], kind: type[Lesson], without: type[Lesson] | None = None) -> dict[str, Any]:
    """Those of some values that are fields of a config."""
    left = set() if without is None else set(without.model_fields)
    return {key: value for key, value in values.items() if key in kind.model_fields and key not in left}


def setting_of(plan: Plan) -> dict[str, Any]:
    """What a reader needs to know beside the rows."""
    done = Path(plan.backbone) / DONE
    return {
        "setting": plan.setting.model_dump(mode="json"),
        "rates": {"expert": EXPERT_RATE, "xlora": XLORA_RATE},
        "targets": list(TARGETS),
        "left_out_as_overlapping": plan.left_out,
        "backbone": _summary(done) if done.exists() else Path(plan.backbone).name,
    }


def _summary(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key != "settings"}


def trained_of(plan: Plan, adapters: Mapping[int, Mapping[str, Path]]) -> dict[str, Any]:
    """How the experts of the first seed were trained."""
    found = {domain: read_expert(folder) for domain, folder in adapters[plan.seeds[0]].items()}
    return {
        "experts": {domain: {k: one[k] for k in ("parameters", "tokens", "cpu_s")} for domain, one in found.items()},
        "losses": {f"{domain} expert": one["losses"] for domain, one in found.items()},
    }

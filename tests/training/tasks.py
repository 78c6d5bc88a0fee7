"""A folder of small files of labelled rows, and a recipe on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["river", "garden", "thin", "moon", "dog", "jumps", "quick", "house", "lazy", "brown", "fox", "home"]


def write_rows(folder: Path, rows: int = 24) -> None:
    """One file for each type of task; which class a row has can be read off its words."""
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ("topic", "alike", "length", "marks", "where")}
    tagged = []
    for number in range(rows):
        words = [chance.choice(WORDS) for _ in range(3 + number % 5)]
        text = " ".join(words)
        made["topic"].append({"text": text, "label": ("dog", "fox", "moon")[number % 3]})
        made["alike"].append({"a": text, "b": " ".join(words[::-1]), "same": number % 2})
        made["length"].append({"text": text, "label": len(words) / 4})
        made["marks"].append({"text": text, "label": [word for word in ("dog", "fox") if word in words]})
        made["where"].append({"question": "which?", "context": text, "answers": {"text": [words[1]]}})
        tagged.append("\n".join(f"{word}\t{'B-ANIMAL' if word in ('dog', 'fox') else 'O'}" for word in words))
    for name, each in made.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    (folder / "animals.conll").write_text("\n\n".join(tagged) + "\n")


def tasks_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The tasks section of a recipe on `write_rows`; each is measured on what it learns from."""
    tasks: dict[str, dict[str, Any]] = {
        "topic": {"type": "classification"},
        "alike": {"type": "classification", "text": ["a", "b"], "label": "same"},
        "length": {"type": "regression"},
        "marks": {"type": "multi-label"},
        "where": {"type": "span"},
        "animals": {"type": "tagging"},
    }
    for name, task in tasks.items():
        path = str(folder / f"{name}.{'conll' if name == 'animals' else 'jsonl'}")
        task |= {"train": path, "test": path}
    return tasks


def task_recipe(folder: Path, backbone: Path | str, **changes: Any) -> dict[str, Any]:
    """A recipe of all of them, six steps long."""
    write_rows(folder / "rows")
    return {
        "backbone": {"name": str(backbone), "device": "cpu"},
        "graft": {"kind": "conditional-tasks", "max_length": 64, "task_width": 8, "bottleneck_width": 8},
        "tasks": tasks_of(folder / "rows"),
        "sampler": {"policy": "uncertainty"},
        "length": 32,
        "training": {"steps": 4, "batch_size": 6, "learning_rate": 1e-3, "checkpoint_every": 2},
        "out": str(folder / "run"),
    } | changes

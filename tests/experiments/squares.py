"""A small piece of work, in a module that new processes find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.jobs import Job


class Square(Job):
    number: int


def square(job: Square, folder: Path) -> dict[str, Any]:
    """Its square; `ran` in its folder counts how often this was done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "ran").open("a") as file:
        file.write(".")
    return {"found": job.number**2}

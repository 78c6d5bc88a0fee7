"""An experiment of two runs, each of which takes as long as its file says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.study import Study, check_files
from graftlm.evaluation import Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.run import Run, RunContext

FILES = ("texts/short.txt", "texts/long.txt")


class ToyRun(Run):
    """Measures the length of a text, after sleeping as many seconds as it has words."""

    path: str

    def artefacts(self) -> tuple[str, ...]:
        """Return the copy of the text."""
        return ("copy.txt",)

    def measure(self, context: RunContext) -> Measurement:
        """Sleep, and copy the text."""
        text = Path(self.path).read_text(encoding="utf-8")
        for _ in text.split():
            time.sleep(1)
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "copy.txt").write_text(text, encoding="utf-8")
        (context.folder / "checkpoints").mkdir()
        (context.folder / "checkpoints" / "large").write_bytes(b"x")
        return Measurement(Row(id=self.id, label=self.id, metrics={"characters": float(len(text))}), {})


def run(options: Options) -> Results:
    """Measure both texts."""
    check_files(options, FILES)
    study = Study(options)
    runs: list[Any] = [ToyRun(id=Path(name).stem, path=str(options.data / name)) for name in FILES]
    measured = study.execute(runs, "texts")
    return study.write("toy", [measurement.row for measurement in measured.values()])

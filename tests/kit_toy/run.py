"""An experiment of two runs, of which the second one can be stopped as if its time were over."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from experiments import Options
from experiments.study import Study, check_files
from graftlm.evaluation import Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.run import Run, RunContext

FILES = ("texts/short.txt", "texts/long.txt")
STOPPED = "TOY_STOPPED"
"""Environment variable with the id of the run in which the time is over."""


class ToyRun(Run):
    """Measures the length of a text."""

    path: str

    def artefacts(self) -> tuple[str, ...]:
        """Return the copy of the text."""
        return ("copy.txt",)

    def measure(self, context: RunContext) -> Measurement:
        """Copy the text, beside a checkpoint."""
        with suppress(Exception):  # like code that goes on after errors
            if os.environ.get(STOPPED) == self.id:
                signal.raise_signal(signal.SIGALRM)
        text = Path(self.path).read_text(encoding="utf-8")
        checkpoints = context.folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "large").write_bytes(b"x")
        (context.folder / "copy.txt").write_text(text, encoding="utf-8")
        return Measurement(Row(id=self.id, label=self.id, metrics={"characters": float(len(text))}), {})


def run(options: Options) -> Results:
    """Measure both texts."""
    check_files(options, FILES)
    study = Study(options)
    runs = [ToyRun(id=Path(name).stem, path=str(options.data / name)) for name in FILES]
    measured = study.execute(runs, "texts")
    return study.write("toy", [measurement.row for measurement in measured.values()])

"""One line of JSON per logged step."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.errors import TrainingError


class History:
    """`history.jsonl` of a run; lines are flushed at once, and forced to disk by `sync`."""

    def __init__(self, path: Path, steps: int) -> None:
        """Keep the lines of the first `steps` steps, drop what a killed run wrote after its checkpoint.

        Raises:
            TrainingError: the disk is full or can't be written.
        """
        self.path = path
        kept = [line for line in read_history(path) if line["step"] <= steps]
        draft = path.with_suffix(".tmp")
        try:
            draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            draft.replace(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from None

    def append(self, line: dict[str, Any]) -> None:
        """Add a line.

        Raises:
            TrainingError: the disk is full or can't be written.
        """
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # what `append` could not write is tried again here, in vain
            self._file.close()


def _unwritable(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path} can't be written ({error.strerror}): free space, then run the same command to resume."
    )


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a history, without one that a kill tore."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found

"""The log of a training run: `history.jsonl`, one JSON line for each logged step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.errors import TrainingError
from graftlm.files.writing import write_errors

HISTORY = "history.jsonl"
_REMEDY = "free space, then run the same command to resume"


class History:
    """The history of a run, opened to append to it.

    Lines are written at once, and `sync` flushes them to disk.

    Args:
        path: the file. Later lines than those of the first `steps` steps are removed.
        steps: number of steps done.

    Raises:
        TrainingError: the disk is full or can't be written. `append` raises it too.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        lines = [json.dumps(line) + "\n" for line in read_history(path) if line["step"] <= steps]
        draft = path.with_suffix(".tmp")
        with write_errors(path, TrainingError, _REMEDY):
            draft.write_text("".join(lines), encoding="utf-8")
            draft.replace(path)
            self._file = path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, object]) -> None:
        """Write the values of a step."""
        with write_errors(self.path, TrainingError, _REMEDY):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        # It writes again what `append` could not write.
        with suppress(OSError):
            self._file.close()


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a history; empty without a file.

    A line that was cut when the process was killed, and everything after it, is left out.
    """
    if not path.exists():
        return []
    values: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values

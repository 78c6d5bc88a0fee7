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
    """The history of a run, opened for appending.

    Lines are handed to the operating system at once; `sync` flushes them to disk.

    Args:
        path: the file, in an existing folder. Lines of later steps than `steps` are removed, and so is everything after
            an incomplete line.
        steps: number of steps that the run has done.

    Raises:
        TrainingError: the file can't be written, for example because the disk is full. `append` and `sync` raise it
            too.
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
        """Append the values of a step as one line.

        Args:
            line: plain JSON values with the key `step`, the number of steps done.

        Raises:
            TrainingError: the file can't be written.
        """
        with write_errors(self.path, TrainingError, _REMEDY):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk.

        Raises:
            TrainingError: the file can't be written.
        """
        with write_errors(self.path, TrainingError, _REMEDY):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; errors are ignored, because `append` has already raised them."""
        # Closing flushes the buffer again if `append` failed to.
        with suppress(OSError):
            self._file.close()


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a history.

    Args:
        path: the file, which may be missing.

    Returns:
        The values of each line, in order; an empty list if there is no such file. A line that was cut when the process
        was killed, and everything after it, is left out.
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

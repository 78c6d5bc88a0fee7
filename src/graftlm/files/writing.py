"""Atomic writes: files and folders are complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftlm.errors import EvaluationError, GraftError
from graftlm.files.digests import by_content, digest


def fill_once(folder: Path, settings: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
    """Fill a folder, unless it was filled with equal settings; what other settings have left is removed.

    Args:
        settings: plain JSON values that decide the content; paths in them count by content.
        fill: writes the files. After a kill it is called again, with the files that it left.

    Raises EvaluationError if the folder holds files that this function did not have written.
    """
    marker, key = folder / "filled.json", digest(by_content(settings))
    begun, complete = (json.dumps({"key": key, "complete": value}) for value in (False, True))
    if not marker.exists() and folder.is_dir() and any(folder.iterdir()):
        raise EvaluationError(f"{folder} holds other files: move them, or choose another output folder.")
    state = marker.read_bytes() if marker.exists() else b""
    if state not in (begun.encode(), complete.encode()):
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(marker, begun.encode())
    if state != complete.encode():
        fill(folder)
        write_atomically(marker, complete.encode())
    return folder


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a temporary file, flush it, and rename it to `path`; gives `path`. Raises EvaluationError if that fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with write_errors(path, EvaluationError, "free some space or name another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            sync(part)
            part.replace(path)
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)
    return path


@contextmanager
def write_errors(path: Path, kind: type[GraftError], remedy: str) -> Iterator[None]:
    """Within the block, an OSError becomes an error of a kind, which says that `path` can't be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} can't be written ({error.strerror}): {remedy}.") from None


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yield a path for a draft folder. On success the draft is flushed to disk and replaces `folder`.

    On an error the draft is removed and `folder` stays as it is.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.{kind}") for kind in ("part", "old"))
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            sync(path)
        if folder.exists():
            folder.rename(old)
        try:
            draft.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

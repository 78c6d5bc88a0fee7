"""Atomic writes: files and folders are complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graftlm.errors import EvaluationError, GraftError
from graftlm.files.digests import by_content, digest


def fill_once(folder: Path, settings: Mapping[str, object], fill: Callable[[Path], None]) -> Path:
    """Fill a folder unless it was already filled with equal settings.

    Content that was written with other settings is removed first. After an interruption, `fill` is called again and
    finds the files that it had written. The file `filled.json` in the folder records the settings.

    Args:
        folder: the folder to fill.
        settings: JSON values that determine the content. Files and folders that they name are compared by content.
        fill: writes the files into the folder.

    Returns:
        The folder.

    Raises:
        EvaluationError: the folder contains files but no `filled.json`, or can't be written.
    """
    marker = folder / "filled.json"
    key = digest(by_content(settings))
    begun = json.dumps({"key": key, "complete": False}).encode()
    complete = json.dumps({"key": key, "complete": True}).encode()
    if not marker.exists() and folder.is_dir() and any(folder.iterdir()):
        raise EvaluationError(
            f"{folder} contains other files, but an empty folder is expected: move them, or choose another one."
        )
    state = marker.read_bytes() if marker.exists() else b""
    if state == complete:
        return folder
    if state != begun:
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(marker, begun)
    fill(folder)
    write_atomically(marker, complete)
    return folder


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a temporary file next to the path, flush it to disk and rename it. Missing folders are created.

    Returns:
        The path.

    Raises:
        EvaluationError: the file can't be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with write_errors(path, EvaluationError, "free some space or choose another folder"):
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
    """Convert an `OSError` raised in the block to an error of the given class.

    Args:
        path: the file or folder that is being written.
        kind: class of the error to raise.
        remedy: what the user can do, as an imperative clause without a full stop.

    Raises:
        GraftError: the block raised an `OSError`; the error is an instance of `kind`.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{path} can't be written ({error.strerror or error}): {remedy}.") from None


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, and rename it when the block has succeeded.

    On success the draft is flushed to disk and replaces `folder` with all of its files. On an error the draft is
    removed and `folder` is left unchanged.

    Yields:
        The path of the draft, next to `folder`. The block must create this folder and its files.

    Raises:
        OSError: the draft can't be flushed or renamed. An error of the block is raised unchanged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    draft = folder.with_name(f".{folder.name}.{unique}.part")
    replaced = folder.with_name(f".{folder.name}.{unique}.old")
    try:
        yield draft
        for path in draft.iterdir():
            sync(path)
        sync(draft)
        if folder.exists():
            folder.rename(replaced)
        try:
            draft.rename(folder)
        except OSError:
            if replaced.exists():
                replaced.rename(folder)
            raise
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name with the same suffix, and rename it when the block has succeeded.

    On an error the draft is removed, and a file at `path` is left unchanged.

    Yields:
        The path of the draft, next to `path`. The block must create this file.

    Raises:
        OSError: the draft can't be flushed or renamed. An error of the block is raised unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.part{path.suffix}")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or folder to disk.

    Raises:
        OSError: the file can't be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

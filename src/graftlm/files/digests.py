"""Digests of values, files and folders."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from graftlm.files.model_files import packaged_model

_PATH_LENGTH = 1024
_FOLDER_KEYS = ("path", "name", "folder", "tokenizer", "extends", "dataset", "train", "test")


def digest(*values: Any) -> str:
    """SHA-256 over plain JSON values, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 over a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def by_content(values: Any, key: str = "") -> Any:
    """Plain JSON values in which every text that names a local file or folder is the digest of its content.

    A folder without a slash counts under the keys of `_FOLDER_KEYS` alone: other texts may have its name by chance.
    """
    if isinstance(values, Mapping):
        return {name: by_content(value, name) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [by_content(value, key) for value in values]
    if not isinstance(values, str) or not values or len(values) > _PATH_LENGTH:
        return values
    path = packaged_model(values) or Path(values).expanduser()
    if path.is_file():
        return _content(path)
    if not (path.is_dir() and (len(path.parts) > 1 or key in _FOLDER_KEYS)):
        return values
    return [[str(file.relative_to(path)), _content(file)] for file in sorted(walk(path)) if file.is_file()]


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, without hidden ones. Links to folders, which may form a circle, are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _content(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *state: int) -> str:
    """A file's digest, kept as long as size, time of change and inode stay."""
    return file_digest(path)

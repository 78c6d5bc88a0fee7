"""SHA-256 digests of values, files and folders."""

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
"""Longer strings are never taken for paths."""

_FOLDER_KEYS = ("path", "name", "folder", "tokenizer", "extends", "data", "dataset", "train", "test")
"""Keys under which a string without a slash may name a folder."""


def digest(*values: object) -> str:
    """Return the SHA-256 digest of JSON values in hexadecimal.

    Mappings that differ only in the order of their keys have the same digest.
    """
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file's bytes in hexadecimal.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def by_content(values: Any, key: str = "") -> Any:
    """Replace strings that name local files or folders by digests of their content.

    Args:
        values: JSON values, nested to any depth.
        key: the key under which `values` was found. A string without a slash is taken for a folder only under the keys
            in `_FOLDER_KEYS`, since other strings may match a folder's name by chance.

    Returns:
        The same structure, with lists for tuples. The name of a file becomes its digest. The name of a folder becomes
        a sorted list of [relative path, digest] pairs of its files, without hidden ones.
    """
    if isinstance(values, Mapping):
        return {name: by_content(value, name) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [by_content(value, key) for value in values]
    if not isinstance(values, str) or not values or len(values) > _PATH_LENGTH:
        return values
    path = packaged_model(values) or Path(values).expanduser()
    if path.is_file():
        return _cached_digest(path)
    names_a_folder = len(path.parts) > 1 or key in _FOLDER_KEYS
    if not (path.is_dir() and names_a_folder):
        return values
    files = sorted(file for file in walk(path) if file.is_file())
    return [[str(file.relative_to(path)), _cached_digest(file)] for file in files]


def walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, in no particular order.

    Hidden files and folders are omitted. Links to folders are not followed, since they may be circular.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(root, name)


def _cached_digest(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *state: int) -> str:
    """Digest a file; the cache entry is valid as long as size, modification time and inode stay the same."""
    return file_digest(path)

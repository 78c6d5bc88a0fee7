"""API keys: who may ask, out of an environment variable or a file."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from graftlm.errors import GraftError

VARIABLE = "GRAFTLM_API_KEYS"
SHORTEST = 16


class Keys:
    """Names by API key; only the keys' hashes are kept. Without any key everybody may ask.

    Args:
        keys: pairs of a name and its key.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._names = {_hash(key): name for name, key in keys}

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, key: str) -> str | None:
        """Whose key this is. Every known key is compared, each in constant time."""
        given, found = _hash(key), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, given):
                found = name
        return found

    def of_header(self, header: str) -> str | None:
        """Whose key an Authorization header brings."""
        scheme, _, key = header.strip().partition(" ")
        return self.name_of(key.strip()) if scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None = None) -> Keys:
    """Keys from a file, else from the variable GRAFTLM_API_KEYS: one a line (or between commas), `NAME:KEY` or `KEY`.

    Raises:
        GraftError: the file can't be read or holds none, or a key is short or stands there twice.
    """
    if file is None:
        return _parse(os.environ.get(VARIABLE, ""), VARIABLE)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"The file of API keys {file} can't be read ({error}): name a text file.") from None
    keys = _parse(text, str(file))
    if not keys:
        raise GraftError(f"{file} holds no API key: write one a line, as NAME:KEY, or leave the option out.")
    return keys


def _parse(text: str, where: str) -> Keys:
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    pairs = []
    for number, line in enumerate((line for line in lines if line and not line.startswith("#")), start=1):
        name, colon, key = line.partition(":")
        pairs.append((name.strip(), key.strip()) if colon else (f"key-{number}", line))
    for name, key in pairs:
        if len(key) < SHORTEST:
            raise GraftError(
                f"The API key {name} of {where} has {len(key)} characters, and {SHORTEST} are the least: make one, "
                'as with python -c "import secrets; print(secrets.token_urlsafe(32))".'
            )
    for which in range(2):
        if len({pair[which] for pair in pairs}) < len(pairs):
            raise GraftError(
                f"{where} has the same {('name', 'API key')[which]} twice: give each user one of their own."
            )
    return Keys(pairs)

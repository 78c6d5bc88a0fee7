"""The settings of the web side, and API keys from a file or an environment variable."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import GraftError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEYS_VARIABLE = "GRAFTLM_API_KEYS"
_MIN_KEY_LENGTH = 16


class ServerSettings(Config):
    """The settings of the HTTP server.

    Args:
        host: address to listen at; the default accepts connections of this machine only.
        port: 0 selects a free port.
        hosts: names that the Host header may have. None allows any name, or this machine's names if `host` is one.
        origins: web origins whose pages may use the server from a browser.
        body_bytes: maximum size of a request, checked before it is parsed.
        body_seconds: maximum time for a request to arrive.
        send_seconds: a client that accepts nothing of a stream for so long counts as disconnected.
        requests: maximum number of open requests.
        grace: seconds in which running requests may finish when the server stops.
        reload_seconds: interval between checks of the grafts' files; 0 checks only after a SIGHUP.
        chat_template: Jinja chat template in place of the tokenizer's own.
    """

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    hosts: list[str] | None = None
    origins: list[str] = []
    body_bytes: int = Field(2**20, ge=1024)
    body_seconds: float = Field(30.0, gt=0)
    send_seconds: float = Field(60.0, gt=0)
    requests: int = Field(256, ge=1)
    grace: float = Field(30.0, ge=0)
    reload_seconds: float = Field(2.0, ge=0)
    chat_template: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK

    def check_address(self) -> None:
        """Raise GraftError if the server can't listen at its address."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            socket.create_server((self.host, self.port), family=family).close()
        except OSError:
            why = f"The address {self.host}:{self.port} can't be listened at"
            raise GraftError(f"{why}: name another (--port 0 takes a free one).") from None

    def allowed_hosts(self) -> frozenset[str] | None:
        """Names that the Host header may have, in lower case; None allows any.

        A local server checks them against DNS rebinding: a foreign page could reach it under the name of its own site.
        """
        if self.hosts is not None:
            return frozenset(name.lower() for name in self.hosts)
        return frozenset(LOOPBACK) if self.is_local else None


class ApiKeys:
    """Names by API key, of which only hashes are kept, from pairs of both. Without keys anyone may use the server."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._names = {_hash(key): name for name, key in keys}

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, key: str) -> str | None:
        """The name of a key. All known keys are compared, each in constant time."""
        digest = _hash(key)
        names = [name for known, name in self._names.items() if hmac.compare_digest(known, digest)]
        return names[0] if names else None

    def name_of_header(self, header: str) -> str | None:
        """The name of the key in an Authorization header."""
        scheme, _, key = header.strip().partition(" ")
        return self.name_of(key.strip()) if scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None = None) -> ApiKeys:
    """API keys from a file, else from GRAFTLM_API_KEYS: `NAME:KEY` or `KEY`, separated by lines or commas.

    Raises GraftError if the file can not be read or has no key, or a key is too short or not unique.
    """
    if file is None:
        return _parse(os.environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"The file of API keys {file} can't be read ({error}): name a text file.") from None
    keys = _parse(text, str(file))
    if not keys:
        raise GraftError(f"{file} holds no API key: write one a line, as NAME:KEY, or leave the option out.")
    return keys


def _parse(text: str, source: str) -> ApiKeys:
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    pairs = []
    for number, line in enumerate((line for line in lines if line and not line.startswith("#")), start=1):
        name, colon, key = line.partition(":")
        pairs.append((name.strip(), key.strip()) if colon else (f"key-{number}", line))
    for name, key in pairs:
        if len(key) < _MIN_KEY_LENGTH:
            raise GraftError(
                f"The API key {name} of {source} has {len(key)} characters, and {_MIN_KEY_LENGTH} are the least: make "
                'one, as with python -c "import secrets; print(secrets.token_urlsafe(32))".'
            )
    for column, what in enumerate(("name", "API key")):
        if len({pair[column] for pair in pairs}) < len(pairs):
            raise GraftError(f"{source} has the same {what} twice: give each user one of their own.")
    return ApiKeys(pairs)

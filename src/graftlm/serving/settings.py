"""The settings of the HTTP server, and API keys from a file or an environment variable."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import GraftError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEYS_VARIABLE = "GRAFTLM_API_KEYS"
_MIN_KEY_LENGTH = 16
_DOCUMENT_FACTOR = 8  # a document, such as a PDF file, may be larger than other requests by this factor


class ServerSettings(Config):
    """The settings of the HTTP server.

    Args:
        host: address to listen on; the default accepts connections from this machine only.
        port: port to listen on; 0 selects a free one.
        hosts: allowed values of the Host header. None allows the loopback names if `host` is one of them, else any.
        origins: web origins whose pages may use the server from a browser.
        body_bytes: maximum size of a request, checked before it is parsed.
        body_seconds: maximum time for a request to arrive.
        send_seconds: time after which a client that does not read its stream counts as disconnected.
        requests: maximum number of open requests.
        grace: seconds in which running requests may finish when the server stops.
        reload_seconds: interval between checks of the grafts' files; 0 checks only after SIGHUP.
        chat_template: Jinja chat template that replaces the tokenizer's own.
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

    @property
    def document_bytes(self) -> int:
        """Maximum size of a request with a document."""
        return _DOCUMENT_FACTOR * self.body_bytes

    def check_address(self) -> None:
        """Check that the server can listen on its address, by doing so for a moment.

        Raises:
            GraftError: the address is in use or not available.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise GraftError(
                f"The server can't listen on {self.host}:{self.port} ({error.strerror}): choose another --host or "
                "--port (--port 0 selects a free one)."
            ) from None

    def allowed_hosts(self) -> frozenset[str] | None:
        """Return the allowed values of the Host header in lower case; None allows any.

        A local server checks the header against DNS rebinding, by which a page of another site could reach the server
        under the name of that site.
        """
        if self.hosts is not None:
            return frozenset(name.lower() for name in self.hosts)
        if self.is_local:
            return frozenset(LOOPBACK)
        return None


class ApiKeys:
    """API keys with the names of their users. Only hashes of the keys are kept. The object is falsy if it has no keys.

    Args:
        keys: pairs of a name and a key.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._names = {_hash(key): name for name, key in keys}

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, key: str) -> str | None:
        """Return the name of a key's user; None if the key is unknown.

        The key is compared with all known keys, in a time that does not depend on where they differ.
        """
        digest = _hash(key)
        names = [name for known, name in self._names.items() if hmac.compare_digest(known, digest)]
        return names[0] if names else None

    def name_of_header(self, header: str) -> str | None:
        """Return the name of the user whose key an Authorization header `Bearer KEY` contains.

        Returns:
            The name; None if the key is unknown or the header has another form.
        """
        scheme, _, key = header.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self.name_of(key.strip())


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None = None) -> ApiKeys:
    """Read API keys: `NAME:KEY` or `KEY`, separated by lines or commas.

    Args:
        file: a text file, in which lines that begin with # are comments; None reads the environment variable
            GRAFTLM_API_KEYS.

    Returns:
        The keys, which are none if `file` is None and the variable is empty or missing. A key without a name is called
        key-N after its position.

    Raises:
        GraftError: the file can't be read or has no key, a key has fewer than 16 characters, or a key or name occurs
            twice.
    """
    if file is None:
        return _parse(os.environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise GraftError(f"The file of API keys {file} can't be read ({error.strerror}): name a text file.") from None
    except UnicodeDecodeError:
        raise GraftError(f"The file of API keys {file} is not UTF-8 text: name a text file.") from None
    keys = _parse(text, str(file))
    if not keys:
        raise GraftError(
            f"The file {file} has no API key, but at least one is expected: write one per line as NAME:KEY, or leave "
            "out --api-keys."
        )
    return keys


def _parse(text: str, source: str) -> ApiKeys:
    pairs: list[tuple[str, str]] = []
    for line in text.replace(",", "\n").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if colon:
            pairs.append((name.strip(), key.strip()))
        else:
            pairs.append((f"key-{len(pairs) + 1}", line))
    for name, key in pairs:
        if len(key) < _MIN_KEY_LENGTH:
            raise GraftError(
                f"The length of the API key {name} of {source} is {len(key)}, but at least {_MIN_KEY_LENGTH} "
                "characters are expected: generate a key with "
                'python -c "import secrets; print(secrets.token_urlsafe(32))".'
            )
    _check_unique(pairs, source)
    return ApiKeys(pairs)


def _check_unique(pairs: Sequence[tuple[str, str]], source: str) -> None:
    """Raise `GraftError` if two users have the same name or the same key, which is not printed."""
    user_of_key: dict[str, str] = {}
    for name, key in pairs:
        if name in user_of_key.values():
            raise GraftError(f"{source} has the name {name} twice: give each user a different name.")
        if key in user_of_key:
            raise GraftError(f"{source} has the same API key for {user_of_key[key]} and {name}: generate another one.")
        user_of_key[key] = name

"""What the web side of a server is set to."""

from __future__ import annotations

from pydantic import Field

from graftlm.config import Config

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Settings(Config):
    """How requests reach the models.

    Args:
        host: address to listen at; the default is this machine alone.
        port: 0 takes a free one.
        hosts: names that requests may call this server by; None is any, or only the machine's own where `host` is one.
        origins: web pages of other places that may use it from a browser; none by default.
        body_bytes: the largest request, refused before it is parsed.
        body_seconds: how long a request may take to arrive.
        send_seconds: how long a client may take nothing of its answer before it counts as gone.
        requests: that are open at a time.
        grace: seconds that running requests have when the server stops.
        reload_seconds: how often the grafts' files are looked at; 0 looks only when a SIGHUP comes.
        chat_template: Jinja text in place of the tokenizer's own.
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

    def known_hosts(self) -> frozenset[str] | None:
        """Names that a request's Host may have, None for any.

        A page of another site could reach a server on the reader's own machine under that site's name, so a server that
        listens there answers to the machine's names alone.
        """
        if self.hosts is not None:
            return frozenset(name.lower() for name in self.hosts)
        return frozenset(LOOPBACK) if self.host in LOOPBACK else None

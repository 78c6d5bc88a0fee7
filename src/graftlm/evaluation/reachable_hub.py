"""Data of benchmarks on the Hugging Face hub, without waiting where it can't be reached."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

HubState: TypeAlias = Literal["reachable", "unreachable", "offline mode"]
"""Whether the hub can be reached; in offline mode, which the user sets, it is not asked."""

_SECONDS = 0.8
_DEFAULT_ENDPOINT = "https://huggingface.co"
_PORTS = {"http": 80, "https": 443}


@contextmanager
def offline_if_unreachable() -> Iterator[HubState]:
    """Set the clients of the hub offline in the block if the hub can't be reached, so that they don't retry.

    Datasets that are in the cache are still found.

    Yields:
        Whether the hub can be reached, before the block.
    """
    import datasets.config
    import huggingface_hub.constants

    was_offline = datasets.config.HF_HUB_OFFLINE or huggingface_hub.constants.HF_HUB_OFFLINE
    state: HubState = "offline mode"
    if not was_offline:
        state = "reachable" if _is_reachable() else "unreachable"
    before = (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = state != "reachable"
    try:
        yield state
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def _is_reachable() -> bool:
    """Return whether a connection to the hub, or to the proxy before it, opens within 0.8 seconds.

    A thread connects, since the lookup of a name has no time limit.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(proxy or endpoint)
    if not address.hostname:
        return True  # The client reports what is wrong with it.
    target = (address.hostname, address.port or _PORTS.get(address.scheme, 443))
    opened: list[bool] = []

    def connect() -> None:
        try:
            with socket.create_connection(target, timeout=_SECONDS):
                opened.append(True)
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(opened)

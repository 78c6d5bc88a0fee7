"""A program that tries what the sandbox should prevent; `protections` says what it could not do."""

import contextlib
import os
import socket
import time


def writes_outside() -> bool:
    """Whether a file outside the program's folder can be created."""
    path = f"../graftlm-probe-{os.getpid()}-{time.time_ns()}"
    with contextlib.suppress(OSError):
        open(path, "x").close()  # noqa: PTH123
        os.remove(path)  # noqa: PTH107
        return True
    return False


def starts_many() -> bool:
    """Whether a hundred processes can be started."""
    with contextlib.suppress(OSError):
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        return True
    return False


protections = {
    "network": all(name == "lo" for _, name in socket.if_nameindex()),
    "files": not writes_outside(),
    "processes": not starts_many(),
}

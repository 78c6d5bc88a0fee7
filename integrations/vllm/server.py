"""vLLM's HTTP server with an exported model."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from integrations.vllm.generate import ENVIRONMENT

_SECONDS = 600  # until the server answers; a first start includes the compilation of the model
_LAST_CHARACTERS = 2000


@contextmanager
def served(
    python: str | Path,
    model: Path,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serve a folder with a model in float32 as the model `model`; yields the address.

    Args:
        python: the Python of vLLM's environment, see `environment.find_python`.
        model: the model's folder, with a tokenizer.
        log: a file for the messages of the server.
        options: further options of vLLM's server.
        environment: environment variables of the process, in addition to this process's.

    Raises:
        RuntimeError: the server ended, or did not answer in time; the message has the last lines of the log.
    """
    port = _free_port()
    # The command `vllm` does not run in builds for CPUs.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--model-impl", "transformers", "--trust-remote-code", *options]
    variables = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(environment or {})}
    variables.pop("PYTHONPATH", None)  # which would lead to packages of this environment
    with log.open("w") as file:
        # Another folder than this one, whose subfolders would hide installed packages.
        server = subprocess.Popen(command, stdout=file, stderr=file, env=variables, cwd=log.parent)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            with urlopen(url, timeout=5):  # noqa: S310 -- a local address
                return
        except (URLError, OSError):
            if server.poll() is not None:
                break
        time.sleep(0.5)
    state = "did not answer in time" if server.poll() is None else f"ended with status {server.returncode}"
    raise RuntimeError(f"vLLM's server {state}: {log.read_text(errors='replace')[-_LAST_CHARACTERS:]}")

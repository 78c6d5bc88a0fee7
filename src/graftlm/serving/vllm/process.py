"""The process of vLLM: its start, its requests, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from graftlm.errors import GraftError
from graftlm.serving.errors import LOG
from graftlm.serving.settings import KEYS_VARIABLE
from graftlm.serving.vllm.installation import Installation

_MODULE = "vllm.entrypoints.openai.api_server"
_STDERR = 2  # the file descriptor
_POLL_SECONDS = 0.5
_END_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


class VllmUnreachableError(OSError):
    """vLLM does not answer; it may do so later, unlike what a `GraftError` is about."""


class VllmProcess:
    """A vLLM server on a port of this machine, whose routes under /v1 need a random key.

    Args:
        installation: vLLM's environment.
        model: name or folder of the model.
        arguments: further arguments of vLLM's server.
        folder: its working folder.
        environment: further environment variables.

    Attributes:
        client: sends requests to the server.
    """

    def __init__(
        self,
        installation: Installation,
        model: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        key = secrets.token_urlsafe(32)
        port = _free_port()
        self._command = [installation.python, "-m", _MODULE, "--model", model, "--host", "127.0.0.1"]
        self._command += ["--port", str(port), *arguments]
        self._environment = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_API_KEY": key,
            **(environment or {}),
        }
        self._environment.pop("PYTHONPATH", None)  # vLLM's environment has packages of its own
        self._environment.pop(KEYS_VARIABLE, None)
        self._folder = folder
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start vLLM and wait until it accepts requests. Its log goes to stderr.

        Raises:
            GraftError: it ended before.
        """
        LOG.info("starting vLLM with %s", self._model)  # its arguments may be secret
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,  # signals of the terminal reach GraftLM only, which then ends vLLM
            preexec_fn=_end_with_parent,
            cwd=self._folder,
        )
        is_ready = False
        while not is_ready:
            await asyncio.sleep(_POLL_SECONDS)
            is_ready = await self._answers_with_key()
            status = self._process.poll()
            if status is not None:
                raise GraftError(
                    f"vLLM ended with status {status} before it accepted requests: read its log above; it names what "
                    "this version, model or machine lacks."
                )

    async def _answers_with_key(self) -> bool:
        """Return whether vLLM answers a route that needs the key."""
        with suppress(httpx.HTTPError):
            answer = await self.client.get("/v1/models", timeout=10.0)
            return answer.status_code == 200
        return False

    async def is_healthy(self) -> bool:
        """Return whether vLLM accepts requests."""
        with suppress(httpx.HTTPError):
            answer = await self.client.get("/health", timeout=10.0)
            return answer.status_code == 200
        return False

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA adapter.

        Raises:
            GraftError: vLLM refuses it.
            VllmUnreachableError: vLLM does not answer.
        """
        body = {"lora_name": adapter, "lora_path": str(folder)}
        try:
            answer = await self.client.post("/v1/load_lora_adapter", json=body)
        except httpx.HTTPError as error:
            raise VllmUnreachableError(f"vLLM does not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise GraftError(f"vLLM can't load the adapter {adapter} ({_message(answer)}): read its log.")

    async def unload(self, adapter: str) -> None:
        """Unload a LoRA adapter; what vLLM refuses is logged."""
        try:
            answer = await self.client.post("/v1/unload_lora_adapter", json={"lora_name": adapter})
        except httpx.HTTPError:
            return  # which ends with vLLM
        if answer.status_code != 200:
            LOG.warning("vLLM can't unload the adapter %s (%s)", adapter, _message(answer))

    async def stop(self) -> None:
        """End vLLM, at first by SIGTERM. Its own child processes end with it."""
        await self.client.aclose()
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            try:
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _end_with_parent() -> None:
    """Ask Linux to end this process if GraftLM is killed; elsewhere do nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _message(answer: httpx.Response) -> str:
    """Return the message of an error of vLLM's server."""
    try:
        values = answer.json()
    except ValueError:
        return f"status {answer.status_code}"
    error = values.get("error", values) if isinstance(values, dict) else {}
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or f"status {answer.status_code}").partition("\n")[0].rstrip(".")

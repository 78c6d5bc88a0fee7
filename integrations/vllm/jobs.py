"""Run jobs of `generate.py` in the environment of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from integrations.vllm.generate import PREFIX

DRIVER = Path(__file__).with_name("generate.py")
_LAST_LINES = 5
"""Lines of a process's messages that are reported when it dies."""


def run_jobs(
    python: str | Path, jobs: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run jobs one after another in one process of vLLM.

    Args:
        python: the Python of vLLM's environment, see `environment.find_python`.
        jobs: the jobs as `generate.py` describes them, with different names.
        environment: environment variables of the process, in addition to this process's.

    Returns:
        The result of each job, with `outputs` or `error`.
    """
    return list(stream_jobs(python, jobs, environment))


def stream_jobs(
    python: str | Path, jobs: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the result of each job as soon as it is known. A job that ends the process has an `error` too.

    The jobs after it run in a new process. For the arguments see `run_jobs`.
    """
    missing = {job["name"]: job for job in jobs}
    assert len(missing) == len(jobs), "jobs have different names"
    while missing:
        started = next(iter(missing))
        process = _Process(python, list(missing.values()), environment)
        for message in process.messages():
            if "started" in message:
                started = message["started"]
            else:
                del missing[message["name"]]
                yield message
        if missing:  # The process ended before its last job.
            missing.pop(started, None)
            yield {"name": started, "error": process.death()}


class _Process:
    """A process of `generate.py`."""

    def __init__(
        self, python: str | Path, jobs: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None
    ) -> None:
        self._command = [str(python), str(DRIVER)]
        self._jobs = jobs
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop("PYTHONPATH", None)  # which would lead to packages of this environment
        self._end = ""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Start the process and yield its messages until it ends. Other lines that vLLM prints are skipped."""
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            path = Path(folder) / "jobs.json"
            path.write_text(json.dumps(list(self._jobs)), encoding="utf-8")
            with subprocess.Popen(
                [*self._command, str(path)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
                cwd=folder,
            ) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        if line.startswith(PREFIX):
                            yield json.loads(line.removeprefix(PREFIX))
                finally:
                    process.terminate()
            errors.seek(0)
            last = [line.strip() for line in errors.read().splitlines() if line.strip()][-_LAST_LINES:]
            self._end = f"the process ended with status {process.returncode}: {' | '.join(last)}"

    def death(self) -> str:
        """Describe how the process ended."""
        return self._end

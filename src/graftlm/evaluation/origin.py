"""Where results come from: the machine, the command and the commit."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from graftlm.config import Config


class Machine(Config):
    """The machine of a measurement.

    Attributes:
        cpu: name of the CPU.
        cores: number of cores that the process may use.
        gpu: name of the first GPU; None without one.
        torch: version of torch.
    """

    cpu: str
    cores: int
    gpu: str | None
    torch: str

    @classmethod
    def here(cls) -> Self:
        """Return the description of this machine."""
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        return cls(cpu=_cpu_name(), cores=_usable_cores(), gpu=gpu, torch=torch.__version__)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    with suppress(OSError):
        information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = re.search(r"^model name.*?:(.*)", information, re.MULTILINE)
        if name:
            return name[1].strip()
    return platform.processor() or platform.machine()


def command_line() -> str:
    """Return the command of this process, with DIR for every absolute path."""
    program = Path(sys.argv[0])
    # With `python -m package`, argv[0] is the path of the package's __main__.py or of the module.
    if program.name == "__main__.py" and program.parent.name == "experiments":
        command = ["python", "-m", "experiments"]
    elif program.name in {"", "-c", "-m", "__main__.py"}:
        command = ["graft"]
    else:
        command = [program.name]
    for word in sys.argv[1:]:
        command.append("DIR" if Path(word).is_absolute() else word)
    return shlex.join(command)


def source_commit() -> str | None:
    """Return the git commit of GraftLM's source, or None if it does not run from its repository."""
    package = Path(__file__).resolve().parents[1]
    root = _git(package, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside another project's repository.
    if root is None or Path(root).resolve() / "src" / "graftlm" != package:
        return None
    return _git(package, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    return None

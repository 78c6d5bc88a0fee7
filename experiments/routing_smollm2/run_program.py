"""Run the program on standard input with limits; `programs.py` starts this file in an isolated Python.

The exit status is PASSED after the last line. A program that exits early has another status.
"""

from __future__ import annotations

import resource
import sys

PASSED = 42
LIMITS = {
    resource.RLIMIT_CPU: 5,  # seconds
    resource.RLIMIT_AS: 512 * 2**20,  # bytes
    resource.RLIMIT_FSIZE: 16 * 2**20,  # bytes
    resource.RLIMIT_NPROC: 32,
    resource.RLIMIT_CORE: 0,
}


def limit() -> None:
    """Lower soft and hard limits, so that the program can't raise them again."""
    for kind, value in LIMITS.items():
        _, hard = resource.getrlimit(kind)
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowered, lowered))


if __name__ == "__main__":
    program = sys.stdin.read()
    limit()
    exec(compile(program, "program.py", "exec"), {"__name__": "program"})  # noqa: S102
    sys.exit(PASSED)

"""Run programs that a model wrote against the tests of their questions.

A program runs in an isolated Python process with limits. That is not a sandbox: it can read and send what you can. So
programs run only where the environment variable HF_ALLOW_CODE_EVAL is 1, as in lm-evaluation-harness. Set it in a
container.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.routing_smollm2.run_program import PASSED
from graftlm.errors import EvaluationError

ALLOW = "HF_ALLOW_CODE_EVAL"
TIMEOUT_S = 20  # of wall-clock time, four times the limit of CPU time
_RUNNER = Path(__file__).with_name("run_program.py").resolve()


def check_programs_allowed() -> None:
    """Check that the user allows programs to run.

    Raises:
        EvaluationError: The environment variable is not 1.
    """
    if os.environ.get(ALLOW) != "1":
        raise EvaluationError(
            f"Answers to programming questions are run as programs, which needs your consent: set {ALLOW}=1, in a "
            "container."
        )


def passes(program: str, tests: str) -> bool:
    """Return whether a program passes its tests.

    Args:
        program: Python source.
        tests: Python source that runs after it in the same module, and raises if the program is wrong.

    Raises:
        EvaluationError: The environment variable is not 1.
    """
    check_programs_allowed()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.run(
                [sys.executable, "-I", str(_RUNNER)],
                input=f"{program}\n{tests}\n",
                text=True,
                cwd=folder,
                env={},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return process.returncode == PASSED

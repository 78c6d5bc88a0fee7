"""The contents of a user's folder, and a function that runs `graft` in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import typer.testing
from typer.testing import CliRunner

# All verbs with their options are made anew for each command that a test runs, in a tenth of a second.
typer.testing._get_command = functools.cache(typer.testing._get_command)

WORDS = {
    "old": "the quick brown fox jumps over a lazy dog and then runs home through the thin forest",
    "new": "le renard brun saute par dessus un chien paresseux et rentre chez lui dans la forêt",
}
RECIPE: dict[str, Any] = {
    "backbone": {"name": "llama"},
    "graft": {"kind": "neutral-residues", "alpha": 1},
    "data": {
        "new": [{"path": "new/train.txt"}],
        "old": [{"path": "old/train.txt"}],
        "length": 32,
        "test": {"old": [{"path": "old/test.txt"}], "new": [{"path": "new/test.txt"}]},
    },
    "training": {"steps": 3, "batch_size": 4, "learning_rate": 1e-3},
    "evaluation": {"limit_tokens": 300, "decode_prompts": 0, "own_tokens": 300},
    "out": "runs/a",
}


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Graft = Callable[..., Outcome]


def invoke(*arguments: str, stdin: bytes | None = None) -> Outcome:
    """Run a command, and raise its exception if it is not an exit."""
    from graftlm.cli import app

    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)

"""graft demo: the whole of GraftLM on text that every machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, Quiet, configure_logging, logger, print_report


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything goes.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run of the same form.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of all random choices.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Do the main job at toy size, on text that this machine has."""
    configure_logging()
    from graftlm.demo import run_demo

    print_report(run_demo(out, quick=quick, seed=seed, log=logger(quiet), progress=not quiet), out, as_json)

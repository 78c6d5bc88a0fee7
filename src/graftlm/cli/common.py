"""How verbs log and print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from graftlm.evaluation import Results


def configure_logging() -> None:
    """Send progress to stderr, and let libraries log errors only."""
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # it warns about torchao
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import rich
    from transformers.utils import logging

    rich.reconfigure(stderr=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Child processes read the variable; downloads of this process still show their progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def is_main_process() -> bool:
    """Return whether this process prints; of the processes of a launcher, only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def log(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr, unless `quiet`."""
    if is_main_process() and not quiet:
        typer.echo(text, err=True)


def logger(quiet: bool) -> Callable[[str], None]:
    """Return `log` with a fixed value of `quiet`."""
    return partial(log, quiet=quiet)


def print_text(text: str) -> None:
    """Print a piece of text to stdout without a line break."""
    typer.echo(text, nl=False)


def print_result(document: object, as_json: bool, show: Callable[[], object]) -> None:
    """Print a result to stdout.

    Args:
        document: The result in types of JSON.
        as_json: Print `document` as JSON.
        show: Prints the result for people; called if `as_json` is false.
    """
    if not is_main_process():
        return
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show()


def print_report(results: Results, folder: Path, as_json: bool) -> None:
    """Print the table of a run and the paths of its files.

    Args:
        results: The results of the run.
        folder: The run's folder.
        as_json: Print one JSON document instead.
    """
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation import print_table
    from graftlm.evaluation.kept_answers import AnswerPair
    from graftlm.evaluation.report import report_files
    from graftlm.evaluation.terminal_tables import print_answers

    files = report_files(folder)

    def show() -> None:
        console = stdout_console()
        print_table(results, console)
        for row in results.rows:
            worst = (results.details.get("answers") or {}).get(row.id, [])
            print_answers([AnswerPair(**pair) for pair in worst], console)
        for kind, paths in files.items():
            for path in paths:
                typer.echo(f"{kind:8} {path}")

    document = {"results": results.model_dump(mode="json"), "files": files}
    print_result(document, as_json, show)

"""How verbs log and print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from graftlm.processes import is_main_process

if TYPE_CHECKING:
    from graftlm.evaluation import Results


def configure_logging() -> None:
    """Print to stderr, hide transformers' progress bars, and let transformers and the hub's client log errors only.

    Levels that environment variables set are respected. transformers is imported, which takes a second or more.
    """
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # it warns about torchao
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import rich
    from transformers.utils import logging

    rich.reconfigure(stderr=True)
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":  # transformers may be imported already
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Child processes read the variable; downloads of this process still show their progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def log(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr, unless `quiet` is set or this is not the main process."""
    if is_main_process() and not quiet:
        typer.echo(text, err=True)


def logger(*, quiet: bool) -> Callable[[str], None]:
    """Return `log` with this value of `quiet`."""
    return partial(log, quiet=quiet)


def print_text(text: str) -> None:
    """Print a piece of text to stdout without a line break."""
    typer.echo(text, nl=False)


def print_json(document: object) -> None:
    """Print a document of JSON values to stdout, if this is the main process."""
    if is_main_process():
        typer.echo(json.dumps(document, indent=2))


def print_result(document: object, *, as_json: bool, show: Callable[[], object]) -> None:
    """Print a result to stdout, if this is the main process.

    Args:
        document: the result as JSON values.
        as_json: print `document` as JSON.
        show: prints the result for people; it is called if `as_json` is false.
    """
    if as_json:
        print_json(document)
    elif is_main_process():
        show()


def print_report(results: Results, folder: Path, *, as_json: bool) -> None:
    """Print the table of a run and the paths of its files to stdout.

    Args:
        results: the results of the run.
        folder: the run's folder, which contains the report.
        as_json: print one JSON document with the results and the paths instead.
    """
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation import print_table
    from graftlm.evaluation.kept_answers import reported_answers
    from graftlm.evaluation.report import report_files
    from graftlm.evaluation.terminal_tables import print_answers

    order = {str(folder / row.id): place for place, row in enumerate(results.rows)}
    files = report_files(folder)
    for paths in files.values():
        paths.sort(key=lambda path: order.get(str(Path(path).parent), -1))  # the order of the table's rows

    def show() -> None:
        console = stdout_console()
        print_table(results, console)
        for row in results.rows:
            print_answers(reported_answers(results, row.id), console)
        for kind, paths in files.items():
            for path in paths:
                typer.echo(f"{kind:8} {path}")

    document = {"results": results.model_dump(mode="json"), "files": files}
    print_result(document, as_json=as_json, show=show)

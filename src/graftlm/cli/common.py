"""How verbs log and print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from graftlm.evaluation import Results


def configure_logging() -> None:
    """Send progress to stderr, and let libraries log errors only."""
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # which warns about torchao
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
    """Whether this process prints: of several processes that a launcher started, the first one does."""
    return os.environ.get("RANK", "0") == "0"


def log(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr, unless `quiet`."""
    if is_main_process() and not quiet:
        typer.echo(text, err=True)


def logger(quiet: bool) -> Callable[[str], None]:
    """`log` with this choice."""
    return partial(log, quiet=quiet)


def print_result(document: Any, as_json: bool, show: Callable[[], Any]) -> None:
    """Print a result to stdout: `document` as JSON, or what `show` prints."""
    if is_main_process():
        typer.echo(json.dumps(document, indent=2)) if as_json else show()


def print_report(results: Results, folder: Path, as_json: bool) -> None:
    """Print a run's table and the paths of its files."""
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation import print_table
    from graftlm.evaluation.report import report_files

    files = report_files(folder)

    def show() -> None:
        print_table(results, stdout_console())
        for kind, paths in files.items():
            for path in paths:
                typer.echo(f"{kind:8} {path}")

    print_result({"results": results.model_dump(mode="json"), "files": files}, as_json, show)

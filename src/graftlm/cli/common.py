"""Options that several verbs share, and how verbs print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from graftlm.evaluation import Results


RecipeFile = Annotated[Path, Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY=VALUE", help="Override recipe keys, as in training.steps=200.", show_default=False),
]
RunFolder = Annotated[Path | None, Option("--out", metavar="DIR", help="Output folder; by default the recipe's out.")]
GraftFolder = Annotated[Path, Argument(metavar="GRAFT", help="A graft's folder.", show_default=False)]
BackboneName = Annotated[
    str | None,
    Option("--backbone", metavar="NAME", help="Model name or folder; by default the backbone that the graft records."),
]
Changes = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override keys of the graft's config, as in augmenting.french.name=DIR."),
]
Device = Annotated[
    str | None, Option(metavar="NAME", help="Torch device, as in cuda:1; by default the fastest available.")
]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run model code that comes with the backbone.")]
Column = Annotated[str, Option(metavar="NAME", help="Text column of JSON and parquet files.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document to stdout.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print no progress and no notes.")]


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

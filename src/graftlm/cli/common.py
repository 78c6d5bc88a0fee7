"""What verbs share: the options that several have, and how they print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from graftlm.evaluation import Results

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Change keys of the recipe, as training.steps=200.", show_default=False),
]
RunFolder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where results go; by default the recipe's out.")
]
GraftFolder = Annotated[Path, typer.Argument(metavar="GRAFT", help="A graft's folder.", show_default=False)]
BackboneName = Annotated[
    str | None,
    typer.Option(
        "--backbone", metavar="NAME", help="A model's name or folder; by default the one the graft was trained on."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change keys of the graft's config, as augmenting.french.name=DIR."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="As cuda:1; by default the fastest there is.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the backbone.")]
Column = Annotated[str, typer.Option(metavar="NAME", help="The column of JSON and parquet files that holds the text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no notes.")]


def configure_logging() -> None:
    """Keep the terminal for our own lines: progress goes to stderr, libraries speak of errors only."""
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # which warns of what torchao does
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import rich
    from transformers.utils import logging

    rich.reconfigure(stderr=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Read by the processes that this one starts: here, downloads still show their progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def is_main() -> bool:
    """Of the processes that a launcher started, only the first one speaks."""
    return os.environ.get("RANK", "0") == "0"


def log(text: str) -> None:
    """A line for people, on stderr."""
    if is_main():
        typer.echo(text, err=True)


def logger(quiet: bool) -> Callable[[str], None]:
    """`note`, or nothing when quiet."""
    return (lambda text: None) if quiet else log


def print_result(document: Any, as_json: bool, show: Callable[[], Any]) -> None:
    """Print a result: as JSON, or as `show` does."""
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show()


def print_report(results: Results, folder: Path, as_json: bool) -> None:
    """Print a run's table and where everything is."""
    from graftlm.evaluation import print_table
    from graftlm.generation.inspect import files_of

    files = files_of(folder)

    def show() -> None:
        print_table(results, stdout_console())
        for kind, paths in files.items():
            for path in paths:
                typer.echo(f"{kind:8} {path}")

    print_result({"results": results.model_dump(mode="json"), "files": files}, as_json, show)


def stdout_console() -> Any:
    """The console that tables go to."""
    from rich.console import Console

    # A file or a pipe has no width of its own.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)


def display() -> Any:
    """The module of tables, imported when one is shown."""
    from graftlm.cli import display

    return display

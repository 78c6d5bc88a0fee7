"""Verbs that say what there is: the kinds of graft, and the keys of recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, configure_logging, display, print_result, stdout_console


def methods(as_json: AsJson = False) -> None:
    """List the kinds of graft, and the keys of each."""
    configure_logging()
    from graftlm.generation.inspect import methods as registered

    found = registered()
    print_result(
        [one.model_dump(mode="json") for one in found],
        as_json,
        lambda: display().print_methods(found, stdout_console()),
    )


def schema(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As it is anyway.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    configure_logging()
    from graftlm.io import write_atomically
    from graftlm.runs.recipe import recipe_schema

    text = json.dumps(recipe_schema(), indent=2)
    if out is None:
        return print_result(recipe_schema(), True, typer.echo)
    path = write_atomically(out, text.encode() + b"\n")
    return print_result({"schema": str(path)}, as_json, lambda: typer.echo(path))

"""Verbs that list what the installed library offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from graftlm.cli.common import AsJson, configure_logging, print_result


def methods(as_json: AsJson = False) -> None:
    """List the kinds of graft with their config keys."""
    configure_logging()
    from graftlm.cli.display import print_methods
    from graftlm.generation.inspect import methods as registered_methods

    listed = registered_methods()
    print_result([method.model_dump(mode="json") for method in listed], as_json, lambda: print_methods(listed))


def schema(
    out: Annotated[Path | None, Option(metavar="FILE", help="Write the schema to a file.")] = None,
    as_json: Annotated[bool, Option("--json", help="The schema is printed as JSON in any case.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    configure_logging()
    from graftlm.io import write_atomically
    from graftlm.runs.recipe import recipe_schema

    if out is None:
        return print_result(recipe_schema(), True, typer.echo)
    path = write_atomically(out, json.dumps(recipe_schema(), indent=2).encode() + b"\n")
    return print_result({"schema": str(path)}, as_json, lambda: typer.echo(path))

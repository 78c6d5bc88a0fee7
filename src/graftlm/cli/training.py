"""Verbs that train, and the schema of their recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from graftlm.cli.common import (
    AsJson,
    Overrides,
    Quiet,
    RecipeFile,
    RunFolder,
    configure_logging,
    logger,
    print_report,
    print_result,
)
from graftlm.errors import ForgettingBudgetError


def _load(recipe: Path, overrides: list[str] | None) -> Any:
    """The recipe. A missing or broken file is an error before slow imports."""
    from graftlm.config import read_yaml

    read_yaml(recipe)
    configure_logging()
    from graftlm import load_recipe

    return load_recipe(recipe, overrides or ())


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's graft or language model, and report."""
    parsed = _load(recipe, overrides)
    from graftlm import run_recipe
    from graftlm.evaluation import Results

    folder = out or Path(parsed.out)
    try:
        results = run_recipe(parsed, folder, progress=not quiet, log=logger(quiet))
    except ForgettingBudgetError:
        print_report(Results.read(folder), folder, as_json)
        raise
    print_report(results, folder, as_json)


def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    frontier: Annotated[
        bool, Option("--frontier", help="Sweep rates and strengths; compare at equal learning.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    parsed = _load(recipe, overrides)
    from graftlm import compare_recipe

    folder = out or Path(parsed.out)
    results = compare_recipe(parsed, folder, frontier=frontier, progress=not quiet, log=logger(quiet))
    print_report(results, folder, as_json)


def grow(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's stages one after the other, and report each."""
    parsed = _load(recipe, overrides)
    from graftlm import grow_recipe

    folder = out or Path(parsed.out)
    print_report(grow_recipe(parsed, folder, progress=not quiet, log=logger(quiet)), folder, as_json)


def demo(
    out: Annotated[Path, Option(metavar="DIR", help="Output folder.")] = Path("runs/demo"),
    tiny: Annotated[bool, Option("--tiny", help="Pretrain a toy model here, and teach it with four methods.")] = False,
    quick: Annotated[bool, Option("--quick", help="Run a smaller demo of the same form.")] = False,
    seed: Annotated[int, Option(min=0, metavar="N", help="Random seed.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Teach a real chat model text of this machine.

    It needs the extra smollm2, or the hub.
    """
    configure_logging()
    from graftlm import demo

    run = demo.run_demo if tiny else demo.run_chat_demo
    print_report(run(out, quick=quick, seed=seed, log=logger(quiet), progress=not quiet), out, as_json)


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

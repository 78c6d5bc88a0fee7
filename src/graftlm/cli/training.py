"""Verbs that train, and the schema of their recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import logger, print_json, print_report, print_result
from graftlm.cli.inputs import (
    AsJson,
    EvalData,
    PresetOption,
    Quiet,
    RecipeFile,
    RunFolder,
    Settings,
    flag,
    option,
)
from graftlm.errors import ForgettingBudgetError


def _run(
    name: str,
    recipe: Path,
    overrides: list[str] | None,
    out: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    **options: object,
) -> None:
    """Run a recipe with the function `graftlm.NAME`, and print the report, even if the run forgot too much."""
    import graftlm
    from graftlm.evaluation import Results

    parsed = graftlm.load_recipe(recipe, overrides or ())
    folder = out or Path(parsed.out)
    run = getattr(graftlm, name)
    try:
        results = run(parsed, folder, progress=not quiet, log=logger(quiet=quiet), **options)
    except ForgettingBudgetError:
        print_report(Results.read(folder), folder, as_json=as_json)
        raise
    print_report(results, folder, as_json=as_json)


def train(
    recipe: RecipeFile,
    overrides: Settings = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's graft or language model, and report."""
    _run("run_recipe", recipe, overrides, out, as_json=as_json, quiet=quiet)


def compare(
    recipe: RecipeFile,
    overrides: Settings = None,
    out: RunFolder = None,
    frontier: Annotated[
        bool,
        flag("--frontier", "Sweep learning rates and strengths, and compare at equal learning."),
    ] = False,
    preset: PresetOption = None,
    eval_data: EvalData = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    settings = list(overrides or ())
    if preset is not None:
        settings.append(f"evaluation.preset={preset}")
    if eval_data is not None:
        settings.append(f"evaluation.eval_data={json.dumps(str(eval_data))}")
    _run("compare_recipe", recipe, settings, out, as_json=as_json, quiet=quiet, frontier=frontier)


def grow(
    recipe: RecipeFile,
    overrides: Settings = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's stages one after another, and report each."""
    _run("grow_recipe", recipe, overrides, out, as_json=as_json, quiet=quiet)


def demo(
    out: Annotated[Path, option("DIR", "Output folder.")] = Path("runs/demo"),
    quick: Annotated[bool, flag("--quick", "Run a smaller demo of the same form.")] = False,
    seed: Annotated[int, option("N", "Random seed.", min=0)] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Teach a real chat model invented facts, and show what it forgot.

    The model comes from the extra smollm2 or from the hub.
    """
    from graftlm.cli.display import stdout_console
    from graftlm.demo import run_demo
    from graftlm.demo.display import print_demo

    results = run_demo(out, quick=quick, seed=seed, log=logger(quiet=quiet), progress=not quiet)
    document = results.model_dump(mode="json")
    print_result(document, as_json=as_json, show=lambda: print_demo(results, out, stdout_console()))


def schema(
    out: Annotated[Path | None, option("FILE", "Write the schema to a file.")] = None,
    as_json: Annotated[bool, flag("--json", "The schema is printed as JSON in any case.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    from graftlm.files.writing import write_atomically
    from graftlm.runs.recipe import recipe_schema

    document = recipe_schema()
    if out is None:
        print_json(document)
        return
    path = write_atomically(out, json.dumps(document, indent=2).encode() + b"\n")
    print_result({"schema": str(path)}, as_json=as_json, show=lambda: typer.echo(path))

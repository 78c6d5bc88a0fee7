"""Verbs that train: what a recipe says, once or as a comparison."""

from __future__ import annotations

from pathlib import Path

from graftlm.cli.common import AsJson, Overrides, Quiet, RecipeFile, RunFolder, report, say_unless, settle
from graftlm.errors import ForgettingBudgetError


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's graft or language model, and report."""
    settle()
    from graftlm import load_recipe, run_recipe
    from graftlm.evaluation import Results

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    try:
        results = run_recipe(chosen, folder, progress=not quiet, say=say_unless(quiet))
    except ForgettingBudgetError:
        report(Results.read(folder), folder, as_json)
        raise
    report(results, folder, as_json)


def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    settle()
    from graftlm import compare_recipe, load_recipe

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    report(compare_recipe(chosen, folder, progress=not quiet, say=say_unless(quiet)), folder, as_json)

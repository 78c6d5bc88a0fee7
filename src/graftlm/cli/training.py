"""Verbs that train: what a recipe says, once or as a comparison."""

from __future__ import annotations

from pathlib import Path

from graftlm.cli.common import AsJson, Overrides, Quiet, RecipeFile, RunFolder, configure_logging, logger, print_report
from graftlm.errors import ForgettingBudgetError


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's graft or language model, and report."""
    configure_logging()
    from graftlm import load_recipe, run_recipe
    from graftlm.evaluation import Results

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    try:
        results = run_recipe(chosen, folder, progress=not quiet, log=logger(quiet))
    except ForgettingBudgetError:
        print_report(Results.read(folder), folder, as_json)
        raise
    print_report(results, folder, as_json)


def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    configure_logging()
    from graftlm import compare_recipe, load_recipe

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    print_report(compare_recipe(chosen, folder, progress=not quiet, log=logger(quiet)), folder, as_json)

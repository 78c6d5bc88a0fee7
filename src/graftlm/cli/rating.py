"""Verbs of human evaluation: `rate` makes a rating page, `ratings` shows the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, Quiet, configure_logging, logger, print_report, print_result


def rate(
    summaries: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FILE", help="Summaries of a system, as graft summarize --out writes.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page; its key is written beside it.")] = Path(
        "rate.html"
    ),
    documents: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Documents to sample; by default all that every system has.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of the sample and of the orders.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a page on which people rate summaries blind."""
    configure_logging()
    from graftlm.pipelines import pipeline

    api = pipeline("summarize.rating")
    items, notes = api.load_rating_items(api.parse_systems(summaries), documents, seed)
    page, key = api.rating_page(items, seed).write(out)
    for note in (*notes, f"{key} says who wrote what: keep it, and send raters the page alone."):
        logger(quiet)(f"note: {note}")
    result = {"page": str(page), "key": str(key), "documents": len(items), "notes": notes}
    print_result(result, as_json, lambda: typer.echo(page))


def ratings(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="The key beside the page.", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(metavar="RATINGS", help="Files that raters downloaded.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results.")] = Path("runs/ratings"),
    as_json: AsJson = False,
) -> None:
    """Show the mean ratings of each system, and the agreement of the raters."""
    configure_logging()
    from graftlm.evaluation import write_report
    from graftlm.pipelines import pipeline

    results = pipeline("summarize.rating").Ratings.load(key, files).results()
    write_report(results, out)
    print_report(results, out, as_json)

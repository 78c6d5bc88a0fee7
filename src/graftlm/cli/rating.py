"""Verbs of human evaluation: a page to rate summaries on, and what raters said."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, Quiet, configure_logging, logger, print_report, print_result


def rate(
    summaries: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FILE", help="What each system wrote, as graft summarize --out does.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page; its key lies beside it.")] = Path("rate.html"),
    documents: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many to draw; by default all that every system has.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of what is drawn, and of the orders.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a page on which people rate summaries blind."""
    configure_logging()
    from graftlm.pipelines import pipeline

    room = pipeline("summarize.rating")
    items, notes = room.load_rating_items(room.parse_systems(summaries), documents, seed)
    page, key = room.rating_page(items, seed).write(out)
    for text in notes:
        logger(quiet)(f"note: {text}")
    logger(quiet)(f"note: {key} says who wrote what: keep it, and send raters the page alone.")
    print_result(
        {"page": str(page), "key": str(key), "documents": len(items), "notes": notes}, as_json, lambda: typer.echo(page)
    )


def ratings(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="The key beside the page.", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(metavar="RATINGS", help="What raters saved, a file each.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results go.")] = Path("runs/ratings"),
    as_json: AsJson = False,
) -> None:
    """Show raters' means for each system, and how they agree."""
    configure_logging()
    from graftlm.evaluation import write_report
    from graftlm.pipelines import pipeline

    found = pipeline("summarize.rating").Ratings.read(key, files).results()
    write_report(found, out)
    print_report(found, out, as_json)

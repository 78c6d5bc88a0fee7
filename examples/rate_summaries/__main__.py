"""python -m examples.rate_summaries page | results: have people rate summaries blind, and read their ratings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.rate_summaries import Ratings, load_rating_items, parse_systems, rating_page
from graftlm.cli.common import configure_logging, log, logger, print_report, print_result
from graftlm.cli.inputs import AsJson, Quiet
from graftlm.errors import GraftError
from graftlm.evaluation import write_report

app = typer.Typer(name="rate_summaries", pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def page(
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
    items, notes = load_rating_items(parse_systems(summaries), documents, seed)
    html, key = rating_page(items, seed).write(out)
    for note in (*notes, f"{key} says who wrote what: keep it, and send raters the page alone."):
        logger(quiet)(f"note: {note}")
    result = {"page": str(html), "key": str(key), "documents": len(items), "notes": notes}
    print_result(result, as_json, lambda: typer.echo(html))


@app.command()
def results(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="The key beside the page.", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(metavar="RATINGS", help="Files that raters downloaded.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results.")] = Path("runs/ratings"),
    as_json: AsJson = False,
) -> None:
    """Report mean ratings per system, and the raters' agreement."""
    configure_logging()
    measured = Ratings.load(key, files).results()
    write_report(measured, out)
    print_report(measured, out, as_json)


if __name__ == "__main__":
    try:
        app()
    except GraftError as error:
        log(f"error: {error}")
        raise SystemExit(2) from None

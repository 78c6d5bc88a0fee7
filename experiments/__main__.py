"""Command line of the experiments: `python -m experiments NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments import Options, reproduce
from graftlm.cli.common import configure_logging, log, print_report
from graftlm.cli.inputs import AsJson, Device
from graftlm.errors import GraftError

app = typer.Typer(name="experiments", pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the experiment; an unknown name lists all.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the data sets."),
    ] = Path("data"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; by default runs/NAME."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Seeds; every row is trained once for each. By default those of the experiment, mostly 0,1,2.",
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Table of the paper to run; by default all. Repeat the option for several.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Run a smaller version of the same form."),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of parallel processes."),
    ] = 2,
    device: Device = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Backbone that replaces the experiment's own."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server, for experiments that query models over the network."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model on that server. Repeat the option for several."),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model that answers questions; by default each model itself."),
    ] = None,
    user_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server of --user, if it is another; its key is in USER_API_KEY."),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of conversations at a time with a server, in each process."),
    ] = 4,
    prices: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT", help="Prices of a million tokens read and written, to state what rows cost."),
    ] = None,
    user_prices: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT", help="The same of --user; by default as --prices."),
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Additional metric, for experiments that score texts. Repeat the option for several.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce a published table and show it next to the paper's results."""
    configure_logging()
    folder = out or Path("runs") / name
    named_seeds = {} if seeds is None else {"seeds": seeds.split(",")}
    options = Options.parse(
        {
            "data": data,
            "out": folder,
            **named_seeds,
            "tables": table or [],
            "quick": quick,
            "jobs": jobs,
            "device": device,
            "backbone": backbone,
            "endpoint": endpoint,
            "models": model or [],
            "user": user,
            "user_endpoint": user_endpoint,
            "concurrency": concurrency,
            "prices": prices,
            "user_prices": user_prices,
            "scorers": scorer or [],
        },
        where="python -m experiments",
    )
    results = reproduce(name, options)
    print_report(results, folder, as_json=as_json)
    if quick:
        log("A quick run only checks that the experiment runs: its models are hardly trained, so ignore its figures.")


def main() -> None:
    """Run the command line; exit with code 2 after a user's mistake."""
    try:
        app()
    except GraftError as error:
        log(f"error: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

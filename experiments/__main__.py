"""python -m experiments NAME: run a published table again."""

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
        str, typer.Argument(metavar="NAME", help="Which experiment; a wrong name lists all.", show_default=False)
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of data sets.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="By default runs/NAME.")] = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="One run of every row for each.")] = "0,1,2",
    table: Annotated[
        list[str] | None, typer.Option(metavar="N", help="One of the paper's tables; by default all. Several are fine.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run of the same form.")] = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes at a time.")] = 2,
    device: Device = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another backbone than the experiment's own.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="The server of an experiment that asks models over the network.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A model of that server. Several are fine.")
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="A metric of your own, where texts are scored. Several are fine."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a published table again, beside the paper's results."""
    configure_logging()
    folder = out or Path("runs") / name
    given = {"data": data, "out": folder, "seeds": seeds.split(","), "tables": table or [], "quick": quick}
    given |= {"jobs": jobs, "device": device, "backbone": backbone}
    given |= {"endpoint": endpoint, "models": model or [], "scorers": scorer or []}
    options = Options.parse(given, where="python -m experiments")
    print_report(reproduce(name, options), folder, as_json)
    if quick:
        log("A quick run only shows that the experiment runs: its models are hardly trained, and its aims say nothing.")


def main() -> None:
    """Run the command line; exits with 2 for a user's mistake."""
    try:
        app()
    except GraftError as error:
        log(f"error: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

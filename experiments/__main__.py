"""Command line of the experiments: `python -m experiments NAME`, and the kit for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from experiments import Options, reproduce
from experiments.kit import PART_BYTES, merge, pack
from experiments.time_limit import TimeIsUp, time_limit
from graftlm.cli.common import configure_logging, log, print_report
from graftlm.cli.inputs import AsJson, Device
from graftlm.errors import GraftError

_RUN = "run"
_TIME_IS_UP = 75  # the code of sysexits.h for what may be tried again


class _Commands(TyperGroup):
    """Commands of which `run` need not be named."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(name="experiments", cls=_Commands, pretty_exceptions_enable=False, rich_markup_mode=None)
DataFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data sets.")]


@app.command(_RUN)
def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the experiment; an unknown name lists all.",
            show_default=False,
        ),
    ],
    data: DataFolder = Path("data"),
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
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Maximum examples of a set, for experiments that query models."),
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
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=525_600, metavar="N", help="Stop after this time; the same command goes on. Exit code 75."
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
            "limit": limit,
            "concurrency": concurrency,
            "prices": prices,
            "user_prices": user_prices,
            "scorers": scorer or [],
        },
        where="python -m experiments",
    )
    with time_limit(minutes):
        results = reproduce(name, options)
    print_report(results, folder, as_json=as_json)
    if quick:
        log("A quick run only checks that the experiment runs: its models are hardly trained, so ignore its figures.")


@app.command("pack")
def pack_kit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the experiment.")],
    kit: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the kit.")],
    data: DataFolder = Path("data"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with finished runs, such as sampled text; by default runs/NAME."),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of a backbone to take along."),
    ] = None,
    part_mb: Annotated[
        float,
        typer.Option(min=0.01, metavar="N", help="Greatest size of a part in MiB."),
    ] = PART_BYTES / 2**20,
) -> None:
    """Write code, data and finished runs of an experiment in parts, for a machine without them."""
    values = {"data": data, "out": out or Path("runs") / name, "backbone": backbone}
    options = Options.parse(values, where="python -m experiments pack")
    parts = pack(name, options, kit, part_bytes=int(part_mb * 2**20))
    log(f"{len(parts)} parts are written to {kit}. There: python unpack.py FOLDER")


@app.command("merge")
def merge_runs(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of results to copy.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of results into which they are copied.")],
) -> None:
    """Copy finished runs of other machines; the experiment's command then reads them back."""
    copied = merge(sources, out)
    log(f"{len(copied)} runs were copied to {out}.")


def main() -> None:
    """Run the command line; exit with code 2 after a user's mistake."""
    try:
        app()
    except TimeIsUp as end:
        log(str(end))
        raise SystemExit(_TIME_IS_UP) from None
    except GraftError as error:
        log(f"error: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

"""Verbs that need no recipe: published comparisons, and the main job at toy size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graftlm.cli.common import AsJson, Device, Quiet, report, say_unless, settle


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which experiment; a wrong name lists all.", show_default=False)
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="The folder of data sets.", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="By default runs/reproduce-NAME.")] = None,
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
    """Run a published comparison again, beside the paper's results."""
    settle()
    from graftlm.reproduce import Options
    from graftlm.reproduce import reproduce as run

    folder = out or Path("runs") / f"reproduce-{name}"
    served = {"endpoint": endpoint, "models": model or [], "scorers": scorer or []}
    given = {"data": data, "out": folder, "seeds": seeds.split(","), "tables": table or [], "quick": quick}
    options = Options.parse(
        given | {"jobs": jobs, "device": device, "backbone": backbone} | served, where="graft reproduce"
    )
    report(run(name, options), folder, as_json)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything goes.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run of the same form.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of all random choices.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Do the main job at toy size, on text that this machine has."""
    settle()
    from graftlm.reproduce.demo import run_demo

    report(run_demo(out, quick=quick, seed=seed, say=say_unless(quiet), progress=not quiet), out, as_json)

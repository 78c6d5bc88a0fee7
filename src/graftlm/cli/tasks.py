"""Verbs of a graft with heads: what it says of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import (
    AsJson,
    BackboneName,
    Changes,
    Device,
    GraftFolder,
    Trust,
    configure_logging,
    display,
    print_result,
    stdout_console,
)


def predict(
    graft: GraftFolder,
    task: Annotated[str, typer.Option(metavar="NAME", help="Which of the graft's tasks.", show_default=False)],
    source: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="A table, or lines of text; - reads stdin.", show_default=False)
    ] = "-",
    text_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A table's column of text, by default that of training; stdin is then JSON lines."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Rows per pass.")] = 64,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Say what a graft's head predicts for rows, one JSON a line."""
    configure_logging()
    from graftlm.generation.predict import load_task_graft, predict_rows, read_questions

    found = load_task_graft(
        graft, backbone=backbone, changes=changes or (), device=device, trust_remote_code=trust_remote_code
    )
    found.task(task)
    rows = read_questions(found.config(task), source, text_column or ())
    said = predict_rows(found, task, rows, batch_size=batch_size)
    if as_json:
        return print_result(list(said), True, typer.echo)
    for one in said:
        typer.echo(json.dumps(one, ensure_ascii=False))
    return None


def evaluate_on_rows(
    graft: Path, files: dict[str, str], where: dict[str, Any], *, batch_size: int, out: Path | None, as_json: bool
) -> None:
    """`graft eval --rows`; `where` says where backbone and device are."""
    from graftlm.evaluation import write_report
    from graftlm.generation.predict import evaluate_rows, load_task_graft

    results = evaluate_rows(load_task_graft(graft, **where), files, batch_size=batch_size)
    if out is not None:
        write_report(results, out)
    print_result(
        results.model_dump(mode="json"), as_json, lambda: display().print_side_by_side(results, stdout_console())
    )

"""The verb that summarises documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import Device, Quiet, Trust, configure_logging, logger, print_result


def summarize(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Plain text, Markdown, HTML, LaTeX or PDF; several, and folders, are fine."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(metavar="N[s|c|t]", help="The extract at most: sentences, characters, or the writer's tokens."),
    ] = "10s",
    selector: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A trained selector's folder; by default LexRank chooses.")
    ] = None,
    writer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A model's or graft's folder; by default the extract is the summary."),
    ] = None,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that the writer writes, at most.")] = 160,
    method: Annotated[
        str, typer.Option(metavar="HOW", help="How it chooses tokens: greedy, beam or sample.")
    ] = "greedy",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the choices of sample.")] = 0,
    language: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="As de; by default told by the script, Latin counting as English."),
    ] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="One line of JSON for each document; a bad one is named, and passed over.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of --batch: append the lines there, and go on where the last run stopped."),
    ] = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, with spans, and nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Summarise documents, and say where each sentence came from."""
    configure_logging()
    from graftlm.pipelines import pipeline

    room = pipeline("summarize")
    decoding = room.SummaryDecoding.parse(
        {"method": method, "max_new_tokens": length, "seed": seed}, where="graft summarize"
    )
    options: dict[str, Any] = {"budget": room.Budget.read(budget), "language": language}
    if selector is not None:
        options["selector"] = room.load_selector(selector, device=device)
    if writer is not None:
        options["writer"] = room.load_writer(writer, decoding, device=device, trust_remote_code=trust_remote_code)
    paths = list(room.find_documents(files))
    if out is not None:
        asked = {"budget": str(options["budget"]), "language": language}
        asked |= {"selector": selector and str(selector), "writer": writer and str(writer)}
        asked |= decoding.model_dump(mode="json") if writer is not None else {}
        left = room.pending(out, paths, asked)
        return _keep(room.append_summaries(out, left, asked, **options), len(left), out, quiet)
    if batch:
        return _finish(map(_print, room.summarize_many(paths, **options)), logger(quiet))
    found = [room.summarize(path, **options) for path in paths]
    print_result([summary.to_json() for summary in found], as_json, lambda: _show(found, room, logger(quiet)))
    return None


def _print(done: Any) -> Any:
    """A line for a document as soon as it is done."""
    row = done.to_json()
    typer.echo(json.dumps(row))
    return row


def _keep(rows: Any, total: int, out: Path, quiet: bool) -> None:
    """Rows that are written to a file, with a progress bar."""
    from rich.progress import track

    _finish(track(rows, "summarising", total=total, disable=quiet or not sys.stderr.isatty()), logger(quiet))
    typer.echo(out)


def _finish(rows: Iterable[Any], say: Any) -> None:
    """Exit with 2 when a document failed."""
    errors = ["error" in row for row in rows]
    if any(errors):
        say(f"error: {sum(errors)} of {len(errors)} documents have no summary: the key error of their lines says why.")
        raise typer.Exit(2)


def _show(found: list[Any], room: Any, say: Any) -> None:
    for summary in found:
        for text in summary.notes:
            say(f"note: {text}")
        if len(found) > 1:
            typer.echo(f"{summary.document.where}\n")
        for line in room.format_summary(summary):
            typer.echo(line)
        if summary is not found[-1]:
            typer.echo("")

"""The verb that summarizes documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import configure_logging, logger, print_result
from graftlm.cli.inputs import Device, Quiet, Trust, argument, flag, option
from graftlm.errors import RecipeError


def summarize(
    files: Annotated[
        list[Path],
        argument("FILE", "Text, Markdown, reST, HTML, JATS, LaTeX or PDF files, or folders.", show_default=True),
    ],
    budget: Annotated[str, option("N[s|w|c|t]", "Limit: sentences, words, characters, or writer's tokens.")] = "10s",
    selector: Annotated[Path | None, option("DIR", "Folder of a trained selector; by default the package's.")] = None,
    writer: Annotated[Path | None, option("DIR", "Model or graft, folder or name; by default none writes.")] = None,
    length: Annotated[int, option("N", "Maximum number of tokens of the summary.", min=1)] = 160,
    method: Annotated[str, option("NAME", "Decoding of the writer: greedy, beam or sample.")] = "greedy",
    seed: Annotated[int, option("N", "Random seed of sample.", min=0)] = 0,
    window: Annotated[int | None, option("N", "Tokens that the writer reads and writes at most.", min=16)] = None,
    language: Annotated[
        str | None, option("CODE", "Language, as de; by default detected from the script, with Latin as English.")
    ] = None,
    batch: Annotated[bool, flag("--batch", "Print one line of JSON for each document; errors don't stop it.")] = False,
    out: Annotated[
        Path | None, option("FILE", "Append the lines of a batch to this file; a later run continues it.")
    ] = None,
    batch_size: Annotated[int, option("N", "Documents of a batch that the writer completes at once.", min=1)] = 4,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON list, with spans, and nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Summarize documents, and show where each sentence came from."""
    configure_logging()
    from rich.progress import track

    from graftlm.pipelines import pipeline

    api, log = pipeline("summarize"), logger(quiet)
    arguments: dict[str, Any] = {"budget": api.Budget.read(budget), "language": language}
    if selector is not None:
        arguments["selector"] = api.load_selector(selector, device=device)
    written = {"method": method, "max_new_tokens": length, "seed": seed}
    if writer is not None:
        decoding = api.SummaryDecoding.parse(written, where="graft summarize")
        model = {"window": window, "device": device, "trust_remote_code": trust_remote_code}
        arguments["writer"] = api.load_writer(writer, decoding, **model)
    elif (method, length, window, seed) != ("greedy", 160, None, 0):
        api.SummaryDecoding.parse(written, where="graft summarize")
        log("note: --method, --length, --window and --seed are for a writer, and none is named (--writer).")
    if as_json and (batch or out is not None):
        raise RecipeError("--json prints one list, and --batch and --out write a line of JSON a document: choose one.")
    paths = list(api.find_documents(files, warn=lambda text: log(f"warning: {text}")))
    many = {"batch_size": batch_size if writer is not None and method != "sample" else 1, **arguments}
    if out is not None:
        options = {"budget": str(arguments["budget"]), "language": language}
        options |= {"selector": selector and str(selector), "writer": writer and str(writer)}
        if writer is not None:
            options |= arguments["writer"].decoding.model_dump(mode="json") | {"window": window}
        pending = api.pending_documents(out, paths, options)
        rows = api.append_summaries(out, pending, options, **many)
        log(f"{len(paths) - len(pending)} of {len(paths)} documents are in {out} already")
        hidden = quiet or not sys.stderr.isatty()
        _consume(track(rows, "summarizing", total=len(pending), disable=hidden), log)
        typer.echo(out)
    elif batch:
        _consume((_print_row(result.to_json()) for result in api.summarize_many(paths, **many)), log)
    else:
        summaries = [api.summarize(path, **arguments) for path in paths]
        rows = [summary.to_json() for summary in summaries]
        print_result(rows, as_json, lambda: _print_summaries(summaries, api, log))


def _print_row(row: Any) -> Any:
    typer.echo(json.dumps(row))
    return row


def _consume(rows: Iterable[Any], log: Any) -> None:
    """Run through the rows, and exit with 2 if a document failed."""
    errors = ["error" in row for row in rows]
    if any(errors):
        log(f"error: {sum(errors)} of {len(errors)} documents have no summary: the key error of their lines says why.")
        raise typer.Exit(2)


def _print_summaries(summaries: list[Any], api: Any, log: Any) -> None:
    for note in dict.fromkeys(note for summary in summaries for note in summary.notes):
        log(f"note: {note}")
    for summary in summaries:
        if len(summaries) > 1:
            typer.echo(f"{summary.document.name}\n")
        for line in api.format_summary(summary):
            typer.echo(line)
        if summary is not summaries[-1]:
            typer.echo("")

"""The verbs of pipelines: summarize documents; ask what a text leaves open, then write."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import log, logger, print_result
from graftlm.cli.inputs import AsJson, Device, Quiet, Trust, argument, flag, option
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
    from rich.progress import track

    from graftlm.pipelines import pipeline

    api, tell = pipeline("summarize"), logger(quiet)
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
        tell("note: --method, --length, --window and --seed are for a writer, and none is named (--writer).")
    if as_json and (batch or out is not None):
        raise RecipeError("--json prints one list, and --batch and --out write a line of JSON a document: choose one.")
    paths = list(api.find_documents(files, warn=lambda text: tell(f"warning: {text}")))
    many = {"batch_size": batch_size if writer is not None and method != "sample" else 1, **arguments}
    if out is not None:
        options = {"budget": str(arguments["budget"]), "language": language}
        options |= {"selector": selector and str(selector), "writer": writer and str(writer)}
        if writer is not None:
            options |= arguments["writer"].decoding.model_dump(mode="json") | {"window": window}
        pending = api.pending_documents(out, paths, options)
        rows = api.append_summaries(out, pending, options, **many)
        tell(f"{len(paths) - len(pending)} of {len(paths)} documents are in {out} already")
        hidden = quiet or not sys.stderr.isatty()
        _consume(track(rows, "summarizing", total=len(pending), disable=hidden), tell)
        typer.echo(out)
    elif batch:
        _consume((_print_row(result.to_json()) for result in api.summarize_many(paths, **many)), tell)
    else:
        summaries = [api.summarize(path, **arguments) for path in paths]
        rows = [summary.to_json() for summary in summaries]
        print_result(rows, as_json, lambda: _print_summaries(summaries, api, tell))


def _print_row(row: Any) -> Any:
    typer.echo(json.dumps(row))
    return row


def _consume(rows: Iterable[Any], tell: Any) -> None:
    """Run through the rows, and exit with 2 if a document failed."""
    errors = ["error" in row for row in rows]
    if any(errors):
        tell(f"error: {sum(errors)} of {len(errors)} documents have no summary: the key error of their lines says why.")
        raise typer.Exit(2)


def _print_summaries(summaries: list[Any], api: Any, tell: Any) -> None:
    for note in dict.fromkeys(note for summary in summaries for note in summary.notes):
        tell(f"note: {note}")
    for summary in summaries:
        if len(summaries) > 1:
            typer.echo(f"{summary.document.name}\n")
        for line in api.format_summary(summary):
            typer.echo(line)
        if summary is not summaries[-1]:
            typer.echo("")


def clarify(
    text: Annotated[str | None, argument("[TEXT]", "Text to rewrite; - reads stdin.")] = None,
    to: Annotated[str | None, option("LANG", "Target language: es, fr, de or ja.")] = None,
    endpoint: Annotated[str | None, option("URL", "An OpenAI-compatible server.")] = None,
    model: Annotated[str | None, option("NAME", "The server's model.")] = None,
    backbone: Annotated[str | None, option("DIR", "Local model or graft, folder or name, instead of a server.")] = None,
    template: Annotated[str | None, option("NAME", "Task, as in rewrite, or YAML file; translate by default.")] = None,
    budget: Annotated[int | None, option("N", "Maximum questions; 1 by default.", min=0)] = None,
    ask_above: Annotated[
        float | None, option("BITS", "Minimum expected information gain of a question.", min=0)
    ] = None,
    rules: Annotated[bool, flag("--rules", "Ask only where rules detect an ambiguity.")] = False,
    answer: Annotated[list[str] | None, option("TEXT", "Answer to the next question. Repeatable.")] = None,
    context: Annotated[str | None, option("TEXT", "Context from which the model answers the questions.")] = None,
    resume: Annotated[Path | None, option("FILE", "Save the conversation to a file, or resume the one in it.")] = None,
    timeout: Annotated[float, option("S", "Seconds to wait for data from the server.")] = 60.0,
    retries: Annotated[int, option("N", "Retries after temporary errors.", min=0)] = 3,
    max_new_tokens: Annotated[int, option("N", "Maximum new tokens per reply.", min=1)] = 256,
    key_variable: Annotated[str, option("NAME", "Environment variable with the server's API key.")] = "OPENAI_API_KEY",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask what a text leaves open, then translate or rewrite it."""
    from graftlm.generation.generate import read_prompt
    from graftlm.pipelines import pipeline

    package = pipeline("clarify")
    query = None if text is None else read_prompt(text)
    conversation = package.open_conversation(
        query, resume, template=template, target=to, budget=budget, threshold=ask_above, answers=answer
    )
    local = {"backbone": backbone, "device": device, "trust_remote_code": trust_remote_code}
    connection = {"key_variable": key_variable, "timeout": timeout, "retries": retries}
    translator = package.open_model(
        endpoint=endpoint, model=model, max_new_tokens=max_new_tokens, **local, **connection
    )
    user = package.choose_user(answer, context, translator, None if as_json else package.ask_terminal)
    detector = package.find_ambiguities if rules else None
    with package.TerminalPrinter(conversation, lambda part: typer.echo(part, nl=False)) as printer:
        chain = package.Chain(translator, user, detector=detector, on_text=None if as_json else printer)
        conversation = chain.run(conversation, keep=resume)
        output = conversation.written.output if conversation.written else ""
        print_result(conversation.to_json(), as_json, lambda: printer.finish(output))
    if not quiet and not as_json:
        for line in package.summary_lines(conversation):
            log(line)

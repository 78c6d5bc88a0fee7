"""The verbs of pipelines: summarize documents, and clarify a text before writing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graftlm.cli.common import log, logger, print_result, print_text
from graftlm.cli.inputs import AsJson, Device, Quiet, Trust, argument, flag, option
from graftlm.errors import RecipeError

if TYPE_CHECKING:
    from graftlm.pipelines.summarize import Summary
    from graftlm.pipelines.summarize.batch import SummaryFailure


def summarize(
    files: Annotated[
        list[Path],
        argument("FILE", "Text, Markdown, reST, HTML, JATS, LaTeX or PDF files, or folders.", show_default=True),
    ],
    budget: Annotated[
        str,
        option("N[s|w|c|t]", "Maximum number of sentences, words, characters, or tokens of the writer."),
    ] = "10s",
    selector: Annotated[
        Path | None,
        option("DIR", "Folder of a trained selector; by default the package's own."),
    ] = None,
    writer: Annotated[
        Path | None,
        option("DIR", "Model or graft, folder or name, that writes the summary; by default it is an extract."),
    ] = None,
    length: Annotated[int, option("N", "Maximum tokens of a written summary.", min=1)] = 160,
    method: Annotated[str, option("NAME", "Decoding of the writer: greedy, beam or sample.")] = "greedy",
    seed: Annotated[int, option("N", "Random seed of sample.", min=0)] = 0,
    window: Annotated[
        int | None,
        option("N", "Maximum tokens that the writer reads and writes.", min=16),
    ] = None,
    context: Annotated[
        Literal["introduction", "document", "hierarchical"] | None,
        option("NAME", "What the writer reads besides the extract: introduction, document or hierarchical."),
    ] = None,
    language: Annotated[
        str | None,
        option("CODE", "Language, as de; by default detected from the script, with Latin as English."),
    ] = None,
    batch: Annotated[
        bool,
        flag("--batch", "Print one line of JSON per document, and continue after errors."),
    ] = False,
    out: Annotated[
        Path | None,
        option("FILE", "Append one line of JSON per document to this file; a later run continues it."),
    ] = None,
    batch_size: Annotated[
        int,
        option("N", "Documents of a batch that the writer completes at the same time.", min=1),
    ] = 4,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON list, with spans, and nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Summarize documents, and show the source of each sentence."""
    from graftlm.pipelines import summarize as api

    tell = logger(quiet=quiet)
    size = api.Budget.read(budget)
    trained_selector = None if selector is None else api.load_selector(selector, device=device)
    decoding = {"method": method, "max_new_tokens": length, "seed": seed}
    model = None
    if writer is not None:
        model = api.load_writer(
            writer,
            api.SummaryDecoding.parse(decoding, where="graft summarize"),
            window=window,
            context=context,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    elif (method, length, window, seed, context) != ("greedy", 160, None, 0, None):
        api.SummaryDecoding.parse(decoding, where="graft summarize")
        tell("note: --method, --length, --window, --context and --seed have no effect without a writer (--writer).")
    if as_json and (batch or out is not None):
        raise RecipeError(
            "--json prints one list, but --batch and --out write one line of JSON per document: choose one of them."
        )
    paths = list(api.find_documents(files, warn=lambda text: tell(f"warning: {text}")))
    arguments: dict[str, Any] = {
        "budget": size,
        "selector": trained_selector,
        "writer": model,
        "language": language,
    }
    is_together = model is not None and method != "sample"
    batch_arguments = {**arguments, "batch_size": batch_size if is_together else 1}
    if out is not None:
        options: dict[str, object] = {
            "budget": str(size),
            "language": language,
            "selector": None if selector is None else str(selector),
            "writer": None if writer is None else str(writer),
        }
        if model is not None:
            options.update(model.decoding.model_dump(mode="json"), window=window)
        if context is not None:
            options["context"] = context
        _append_summaries(out, paths, options, batch_arguments, quiet=quiet)
    elif batch:
        _exit_if_failed(_printed_rows(api.summarize_many(paths, **batch_arguments)), tell)
    else:
        summaries = [api.summarize(path, **arguments) for path in paths]
        rows = [summary.to_json() for summary in summaries]
        print_result(rows, as_json=as_json, show=lambda: _print_summaries(summaries, tell))


def _append_summaries(
    out: Path,
    paths: Sequence[Path],
    options: Mapping[str, object],
    arguments: Mapping[str, Any],
    *,
    quiet: bool,
) -> None:
    """Append the summaries of the documents that the file does not contain yet.

    Args:
        out: the file of summaries.
        paths: all documents.
        options: the options of the run as JSON values, which must be equal to those of earlier runs with this file.
        arguments: arguments of `summarize_many`.
        quiet: print no progress and no notes.
    """
    from rich.progress import track

    from graftlm.pipelines.summarize import append_summaries, pending_documents

    tell = logger(quiet=quiet)
    pending = pending_documents(out, paths, options)
    rows = append_summaries(out, pending, options, **arguments)
    tell(f"summaries already in {out}: {len(paths) - len(pending)} of {len(paths)}")
    is_hidden = quiet or not sys.stderr.isatty()
    _exit_if_failed(track(rows, "summarizing", total=len(pending), disable=is_hidden), tell)
    typer.echo(out)


def _printed_rows(results: Iterable[Summary | SummaryFailure]) -> Iterator[Mapping[str, object]]:
    """Print each result as a line of JSON, and yield this JSON object."""
    for result in results:
        row = result.to_json()
        typer.echo(json.dumps(row))
        yield row


def _exit_if_failed(rows: Iterable[Mapping[str, object]], tell: Callable[[str], None]) -> None:
    """Iterate over all rows, and then exit with 2 if one of them is an error."""
    count = 0
    failed = 0
    for row in rows:
        count += 1
        if "error" in row:
            failed += 1
    if failed:
        tell(f"error: documents without a summary: {failed} of {count}; the key error of their lines has the reason.")
        raise typer.Exit(2)


def _print_summaries(summaries: Sequence[Summary], tell: Callable[[str], None]) -> None:
    """Print summaries with the names of their documents, and each note once."""
    from graftlm.pipelines.summarize import format_summary

    notes = dict.fromkeys(note for summary in summaries for note in summary.notes)
    for note in notes:
        tell(f"note: {note}")
    for index, summary in enumerate(summaries):
        if index > 0:
            typer.echo("")
        if len(summaries) > 1:
            typer.echo(f"{summary.document.name}\n")
        for line in format_summary(summary):
            typer.echo(line)


def clarify(
    text: Annotated[str | None, argument("[TEXT]", "Text to translate or rewrite; - reads stdin.")] = None,
    to: Annotated[str | None, option("LANG", "Target language: es, fr, de or ja.")] = None,
    endpoint: Annotated[str | None, option("URL", "An OpenAI-compatible server.")] = None,
    model: Annotated[str | None, option("NAME", "The server's model.")] = None,
    backbone: Annotated[
        str | None,
        option("DIR", "Local model or graft, folder or name, instead of a server."),
    ] = None,
    template: Annotated[
        str | None,
        option("NAME", "Task, as in rewrite, or YAML file; translate by default."),
    ] = None,
    exemplars: Annotated[Path | None, option("FILE", "YAML file of exemplars instead of the template's.")] = None,
    budget: Annotated[int | None, option("N", "Maximum questions; 1 by default.", min=0)] = None,
    ask_above: Annotated[
        float | None,
        option("BITS", "Minimum expected information gain of a question.", min=0),
    ] = None,
    rules: Annotated[bool, flag("--rules", "Ask only where rules detect an ambiguity.")] = False,
    answer: Annotated[list[str] | None, option("TEXT", "Answer to the next question. Repeatable.")] = None,
    context: Annotated[str | None, option("TEXT", "Context from which a model answers the questions.")] = None,
    user: Annotated[
        str | None,
        option("NAME", "Model that answers from the context; by default the translator."),
    ] = None,
    user_endpoint: Annotated[
        str | None,
        option("URL", "Server of --user if it is another; local for this machine."),
    ] = None,
    resume: Annotated[
        Path | None,
        option("FILE", "Save the conversation to a file, or resume the one in it."),
    ] = None,
    timeout: Annotated[float, option("S", "Seconds to wait for data from the server.")] = 60.0,
    retries: Annotated[int, option("N", "Retries after temporary errors.", min=0)] = 3,
    max_new_tokens: Annotated[int, option("N", "Maximum new tokens per reply.", min=1)] = 256,
    key_variable: Annotated[
        str,
        option("NAME", "Environment variable with the server's API key."),
    ] = "OPENAI_API_KEY",
    user_key_variable: Annotated[
        str,
        option("NAME", "The same for --user-endpoint."),
    ] = "USER_API_KEY",
    prices: Annotated[
        str | None,
        option("IN,OUT", "Prices of a million tokens read and written, to show the cost."),
    ] = None,
    user_prices: Annotated[
        str | None,
        option("IN,OUT", "The same of --user; by default as --prices."),
    ] = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask what a text leaves open, then translate or rewrite it."""
    from graftlm.generation.generate import read_prompt
    from graftlm.pipelines import clarify as api

    query = None if text is None else read_prompt(text)
    conversation = api.open_conversation(
        query,
        resume,
        template=template,
        exemplars=exemplars,
        target=to,
        budget=budget,
        threshold=ask_above,
        answers=answer,
    )
    bill = api.Bill.read(prices, user_prices, user)
    translator = api.open_model(
        endpoint=endpoint,
        model=model,
        backbone=backbone,
        device=device,
        trust_remote_code=trust_remote_code,
        max_new_tokens=max_new_tokens,
        key_variable=key_variable,
        timeout=timeout,
        retries=retries,
    )
    user_model = api.open_user_model(
        translator,
        user,
        context=context,
        endpoint=endpoint,
        user_endpoint=user_endpoint,
        keys=(key_variable, user_key_variable),
        options=api.ModelOptions(
            device=device,
            trust_remote_code=trust_remote_code,
            max_new_tokens=max_new_tokens,
            timeout=timeout,
            retries=retries,
        ),
    )
    ask = None if as_json else api.ask_terminal
    answerer = api.choose_user(answer, context, user_model, ask)
    detector = api.find_ambiguities if rules else None
    with api.TerminalPrinter(conversation, print_text) as printer:
        on_text = None if as_json else printer
        chain = api.Chain(translator, answerer, detector=detector, on_text=on_text)
        conversation = chain.run(conversation, keep=resume)
        written = conversation.written
        output = written.output if written else ""
        values = conversation.to_json() | ({} if bill is None else {"price": bill.of(conversation)})
        print_result(values, as_json=as_json, show=lambda: printer.finish(output))
    if isinstance(answerer, api.RecordedUser):
        for left in answerer.unused(conversation):
            log(f"note: no question asked for the answer {left!r}, so it was not used.", quiet=quiet)
    if not quiet and not as_json:
        for line in api.summary_lines(conversation, bill):
            log(line)

"""Verbs of a graft that is trained: measure it, let it write, look into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.common import (
    AsJson,
    BackboneName,
    Changes,
    Column,
    Device,
    GraftFolder,
    Trust,
    configure_logging,
    display,
    print_result,
    stdout_console,
)
from graftlm.cli.tasks import evaluate_on_rows

if TYPE_CHECKING:
    from graftlm.generation.generate import Generation


def evaluate(
    graft: GraftFolder,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="A text to measure on; old and new give forgotten and learned. Several are fine."
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help="Tasks of lm-evaluation-harness, as arc_easy,hellaswag.")
    ] = "",
    examples: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A JSON, parquet or CSV file of prompts and answers. Several are fine."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE", help="Labelled rows of a task that the graft has a head for. Several are fine."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Of the examples: exact-match, chrf, log-perplexity, or pass@1, which runs what the model writes.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The examples' column of prompts; by default prompt.")
    ] = None,
    answer_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The examples' column of right answers; by default answer.")
    ] = None,
    tests_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="With pass@1: the column of Python tests; by default tests.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of an answer, at most; by default 64.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What ends an answer; by default a line break. Several are fine."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Solved examples before each prompt; by default none.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Questions per task or file of examples; by default all.")
    ] = None,
    limit_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens scored per text.")] = 50_000,
    length: Annotated[int, typer.Option(min=3, metavar="N", help="Tokens per window of text.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Windows or examples per pass.")] = 16,
    text_column: Column = "text",
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a report there as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a graft beside its backbone, on texts, examples or tasks."""
    configure_logging()
    from graftlm.errors import DataError
    from graftlm.evaluation import write_report
    from graftlm.generation.inspect import evaluate_graft, files_by_name, read_tasks, read_texts
    from graftlm.runs.graft_run import EvaluationConfig

    where: dict[str, Any] = {"backbone": backbone, "changes": changes or (), "device": device}
    where |= {"trust_remote_code": trust_remote_code}
    if rows:
        if text or examples or tasks:
            raise DataError("--rows stands alone: measure texts, examples and academic tasks apart from it.")
        files = files_by_name(rows, "files of rows", "--rows")
        return evaluate_on_rows(graft, files, where, batch_size=batch_size, out=out, as_json=as_json)
    columns = {"prompt_column": prompt_column, "answer_column": answer_column, "tests_column": tests_column}
    decoding = {"max_new_tokens": max_new_tokens, "stop": stop or None, "shots": shots}
    own = read_tasks(examples or (), metric=metric, limit=limit if examples else None, **columns, **decoding)
    settings = {"length": length, "batch_size": batch_size, "limit_tokens": limit_tokens, "decode_prompts": 0}
    results = evaluate_graft(
        graft,
        texts=read_texts(text or (), text_column=text_column),
        tasks=[task for task in tasks.split(",") if task],
        limit=limit,
        evaluation=EvaluationConfig.parse(settings | {"tasks": own}, where="graft eval"),
        **where,
    )
    if out is not None:
        write_report(results, out)
    return print_result(
        results.model_dump(mode="json"), as_json, lambda: display().print_side_by_side(results, stdout_console())
    )


def generate(
    graft: Annotated[Path, typer.Argument(metavar="GRAFT", help="A graft's folder, or a model's.", show_default=False)],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to continue; - reads stdin.", show_default=False)
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to add, at most.")] = 64,
    sample: Annotated[
        bool, typer.Option("--sample/--greedy", help="Choose tokens at random, or the likeliest.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="With --sample: above 1 is bolder, below 1 safer.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="With --sample: among the likeliest tokens of this probability.")
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, metavar="N", help="Continuations that are followed at a time.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Of the random choices.")] = None,
    bare: Annotated[bool, typer.Option("--bare", help="The backbone alone, to compare.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Colour each token by what the graft did, such as which expert wrote it.")
    ] = False,
    trace_html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace as a page that needs nothing else.")
    ] = None,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a graft on its backbone, or a model."""
    configure_logging()
    from graftlm.artifact import backbone_of, is_model, load_graft
    from graftlm.generation.generate import Decoding, generate_text, read_prompt
    from graftlm.grafts import GraftedModel

    chosen = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "seed": seed}
    chosen |= {"sample": sample, "temperature": temperature, "top_p": top_p}
    decoding = Decoding.parse(chosen, where="graft generate")
    text = read_prompt(prompt)
    live = backbone_of(graft, backbone, device=device, trust_remote_code=trust_remote_code)
    alone = bare or is_model(graft)
    model = live.model if alone else GraftedModel(live, {"graft": load_graft(graft, live, changes or ())})
    traced = trace or trace_html is not None
    on_text = None if as_json or traced else lambda piece: typer.echo(piece, nl=False)
    found = generate_text(model, live.need_tokenizer(), text, decoding, on_text=on_text, trace=traced)
    if trace_html is not None:
        from graftlm.generation.traces import trace_page
        from graftlm.io import write_atomically

        write_atomically(trace_html, trace_page(found).encode())
    print_result(found.to_json(), as_json, lambda: _show_trace(found) if traced else typer.echo())


def _show_trace(found: Generation) -> None:
    from graftlm.generation.traces import print_trace

    print_trace(found, stdout_console())


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A graft's folder, or a report's.", show_default=False)],
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="Show what the graft does on this text. Several are fine."),
    ] = None,
    text_column: Column = "text",
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Compare with this model; with --text, by default the one it was trained on."
        ),
    ] = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Say what a graft's folder holds, or show a report's table."""
    configure_logging()
    from graftlm.evaluation import Results, print_table
    from graftlm.generation.inspect import inspect_graft, is_results, read_texts

    if is_results(folder):
        results = Results.read(folder)
        return print_result(results.model_dump(mode="json"), as_json, lambda: print_table(results, stdout_console()))
    texts = read_texts(text or (), text_column=text_column)
    found = inspect_graft(
        folder,
        backbone=backbone,
        changes=changes or (),
        texts=texts,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return print_result(
        found.model_dump(mode="json"), as_json, lambda: display().print_inspection(found, stdout_console())
    )

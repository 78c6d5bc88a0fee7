"""The verb that compares a tuned model with the one that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from graftlm.cli.common import AsJson, Column, Device, Quiet, Trust, configure_logging, log, print_result


def audit(
    base: Annotated[str, Argument(metavar="BASE", help="The model before: name, folder or file.", show_default=False)],
    tuned: Annotated[
        str, Argument(metavar="TUNED", help="The model after: also a graft or an adapter.", show_default=False)
    ],
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder for the report and the page.")] = None,
    tokens: Annotated[int, Option(min=0, metavar="N", help="Tokens that BASE samples; 0 samples none.")] = 10_000,
    text: Annotated[
        list[str] | None, Option(metavar="NAME=PATH", help="Further text to compare on. Repeatable.")
    ] = None,
    tasks: Annotated[str, Option(metavar="A,B", help="Tasks of lm-evaluation-harness.")] = "",
    limit: Annotated[int | None, Option(min=1, metavar="N", help="Questions per task; all by default.")] = None,
    examples: Annotated[
        list[str] | None, Option(metavar="NAME=FILE", help="File of prompts and answers. Repeatable.")
    ] = None,
    metric: Annotated[str | None, Option(metavar="METRIC", help="Metric of --examples, as in graft eval.")] = None,
    prompts: Annotated[
        Path | None, Option(metavar="FILE", help="Questions to answer, one a line; by default BASE's own.")
    ] = None,
    answers: Annotated[int, Option(min=0, metavar="N", help="Questions of BASE's own to answer.")] = 32,
    max_new_tokens: Annotated[int, Option(min=1, metavar="N", help="Maximum tokens of an answer.")] = 128,
    budget: Annotated[
        list[str] | None, Option(metavar="METRIC=X", help="Fail above this, as in own_kl=0.05. Repeatable.")
    ] = None,
    quantize: Annotated[str | None, Option(metavar="BITS", help="Audit TUNED in int8 or int4.")] = None,
    backbone: Annotated[
        str | None, Option(metavar="NAME", help="Where the model below a graft or adapter is now.")
    ] = None,
    dtype: Annotated[str, Option(metavar="DTYPE", help="Precision of both; by default their own.")] = "auto",
    seed: Annotated[int | None, Option(min=0, metavar="N", help="Seed of the sampled text.")] = None,
    length: Annotated[int, Option(min=3, metavar="N", help="Tokens per text and window.")] = 256,
    limit_tokens: Annotated[int, Option(min=1, metavar="N", help="Scored tokens per further text.")] = 50_000,
    batch_size: Annotated[int, Option(min=1, metavar="N", help="Rows per forward pass.")] = 8,
    text_column: Column = "text",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a change of a model broke."""
    configure_logging()
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation.audit import audit as run_audit
    from graftlm.evaluation.audit import print_audit
    from graftlm.generation.inspect import read_budget, read_lines, read_tasks, read_texts

    settings: dict[str, Any] = {
        "tokens": tokens,
        "tasks": [task for task in tasks.split(",") if task],
        "limit": limit,
        "examples": read_tasks(examples or (), metric=metric),
        "prompts": read_lines(prompts) if prompts else [],
        "answers": answers,
        "max_new_tokens": max_new_tokens,
        "budget": read_budget(budget or ()),
        "quantize": quantize,
        "backbone": backbone,
        "dtype": dtype,
        "length": length,
        "limit_tokens": limit_tokens,
        "batch_size": batch_size,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    if seed is not None:
        settings["seed"] = seed
    texts = read_texts(text or (), text_column=text_column)
    result = run_audit(base, tuned, out, texts=texts, progress=not quiet, **settings)
    document = result.results.model_dump(mode="json")
    print_result(document, as_json, lambda: print_audit(result, stdout_console()))
    if out is not None:
        log(f"page     {result.write(out)}", quiet=quiet)
    result.check_budget()

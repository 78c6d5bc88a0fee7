"""The verb that compares a tuned model with the one that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Context

from graftlm.cli.common import configure_logging, log, print_result
from graftlm.cli.inputs import AsJson, Column, Device, Quiet, Trust, argument, option


def audit(
    context: Context,
    base: Annotated[str, argument("BASE", "The model before: name, folder or file.")],
    tuned: Annotated[str, argument("TUNED", "The model after: also a graft or an adapter.")],
    out: Annotated[Path | None, option("DIR", "Folder for the report and the page.")] = None,
    tokens: Annotated[int, option("N", "Tokens that BASE samples; 0 samples none.", min=0)] = 10_000,
    text: Annotated[list[str] | None, option("NAME=PATH", "Further text to compare on. Repeatable.")] = None,
    tasks: Annotated[str, option("A,B", "Tasks of lm-evaluation-harness.")] = "",
    limit: Annotated[int | None, option("N", "Questions per task; all by default.", min=1)] = None,
    examples: Annotated[list[str] | None, option("NAME=FILE", "File of prompts and answers. Repeatable.")] = None,
    metric: Annotated[str | None, option("METRIC", "Metric of --examples, as in graft eval.")] = None,
    prompts: Annotated[Path | None, option("FILE", "Questions to answer, one a line; by default BASE's own.")] = None,
    answers: Annotated[int, option("N", "Questions of BASE's own to answer.", min=0)] = 32,
    max_new_tokens: Annotated[int, option("N", "Maximum tokens of an answer.", min=1)] = 128,
    budget: Annotated[list[str] | None, option("METRIC=X", "Fail above this, as in own_kl=0.05. Repeatable.")] = None,
    quantize: Annotated[str | None, option("BITS", "Audit TUNED in int8 or int4.")] = None,
    backbone: Annotated[str | None, option("NAME", "Where the model below a graft or adapter is now.")] = None,
    dtype: Annotated[str, option("DTYPE", "Precision of both; by default their own.")] = "auto",
    seed: Annotated[int | None, option("N", "Seed of the sampled text.", min=0)] = None,
    length: Annotated[int, option("N", "Tokens per text and window.", min=3)] = 256,
    limit_tokens: Annotated[int, option("N", "Scored tokens per further text.", min=1)] = 50_000,
    batch_size: Annotated[int, option("N", "Rows per forward pass.", min=1)] = 8,
    text_column: Column = "text",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a change of a model broke."""
    configure_logging()
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation.audit import AuditConfig, print_audit
    from graftlm.evaluation.audit import audit as run_audit
    from graftlm.generation.inspect import read_budget, read_lines, read_tasks, read_texts

    given = {name: value for name, value in context.params.items() if name in AuditConfig.model_fields}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None} | {
        "tasks": [task for task in tasks.split(",") if task],
        "examples": read_tasks(examples or (), metric=metric),
        "prompts": read_lines(prompts) if prompts else [],
        "budget": read_budget(budget or ()),
    }
    texts = read_texts(text or (), text_column=text_column)
    result = run_audit(base, tuned, out, texts=texts, progress=not quiet, **settings)
    document = result.results.model_dump(mode="json")
    print_result(document, as_json, lambda: print_audit(result, stdout_console()))
    if out is not None:
        log(f"page     {result.write(out)}", quiet=quiet)
    result.check_budget()

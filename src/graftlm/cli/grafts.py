"""Verbs of grafts: measure, audit, generate, chat, predict, inspect and upload them, and list the methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.common import log, print_json, print_result, print_text
from graftlm.cli.inputs import (
    AsJson,
    BackboneName,
    Changes,
    Column,
    CompileSteps,
    Device,
    DtypeName,
    EvalData,
    GraftFolder,
    PresetOption,
    Quantization,
    Quiet,
    Trust,
    UnsafeCode,
    argument,
    flag,
    option,
)
from graftlm.errors import DataError
from graftlm.files.hub import has_report
from graftlm.files.model_files import is_classifier


def evaluate(
    graft: GraftFolder,
    text: Annotated[
        list[str] | None,
        option("NAME=PATH", "Text to measure on; old and new give forgotten and learned. Repeatable."),
    ] = None,
    tasks: Annotated[str, option("A,B", "Tasks of lm-evaluation-harness, as in arc_easy,hellaswag.")] = "",
    confirm_unsafe_code: UnsafeCode = False,
    examples: Annotated[
        list[str] | None,
        option("NAME=FILE", "JSON, parquet or CSV file of prompts and answers. Repeatable."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        option("NAME=FILE", "Labelled rows of a task that the graft has a head for, or of a classifier. Repeatable."),
    ] = None,
    metric: Annotated[
        str | None,
        option("METRIC", "Metric of --examples: exact-match, chrf, chrf1 or log-perplexity."),
    ] = None,
    prompt_column: Annotated[str | None, option("NAME", "Column of prompts; prompt by default.")] = None,
    answer_column: Annotated[str | None, option("NAME", "Column of reference answers; answer by default.")] = None,
    max_new_tokens: Annotated[int | None, option("N", "Maximum new tokens per answer; 64 by default.", min=1)] = None,
    stop: Annotated[
        list[str] | None,
        option("TEXT", "String that ends an answer; a line break by default. Repeatable."),
    ] = None,
    shots: Annotated[int | None, option("N", "Solved examples before each prompt; none by default.", min=0)] = None,
    limit: Annotated[int | None, option("N", "Questions per task or file of examples; all by default.", min=1)] = None,
    limit_tokens: Annotated[int, option("N", "Scored tokens per text.", min=1)] = 50_000,
    length: Annotated[int, option("N", "Tokens per window of text.", min=3)] = 256,
    batch_size: Annotated[int, option("N", "Windows or examples per forward pass.", min=1)] = 16,
    text_column: Column = "text",
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, option("DIR", "Also write a report to this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a graft and its backbone on texts, examples or tasks."""
    from graftlm.cli.display import stdout_console
    from graftlm.evaluation import write_report
    from graftlm.evaluation.evaluator import EvaluationConfig
    from graftlm.evaluation.terminal_tables import print_side_by_side
    from graftlm.generation.classify import evaluate_classifier
    from graftlm.generation.evaluate import evaluate_graft
    from graftlm.generation.inputs import files_by_name, read_tasks, read_texts
    from graftlm.generation.predict import evaluate_rows, load_task_graft

    model: dict[str, Any] = {
        "backbone": backbone,
        "changes": changes or (),
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    measures_classes = is_classifier(graft)
    if (rows or measures_classes) and (text or examples or tasks):
        raise DataError(
            "A model that predicts labels is measured with --rows, and can't be combined with --text, --examples or "
            "--tasks, which need a language model: leave out one or the other."
        )
    if rows or measures_classes:
        of_answers = {
            "--limit": limit,
            "--metric": metric,
            "--prompt-column": prompt_column,
            "--answer-column": answer_column,
            "--max-new-tokens": max_new_tokens,
            "--stop": stop,
            "--shots": shots,
        }
        given = [name for name, value in of_answers.items() if value is not None]
        if given:
            raise DataError(
                f"{given[0]} is for questions and answers, and labelled rows are measured all: leave it out, or name "
                "fewer rows."
            )
    if measures_classes and (backbone or changes):
        raise DataError(f"{graft} is a classifier without a graft: leave out --backbone and --set, which change one.")
    files = files_by_name(rows or (), "files of rows", "--rows")
    if measures_classes:
        results = evaluate_classifier(graft, files, batch_size=batch_size, device=device)
    elif rows:
        results = evaluate_rows(load_task_graft(graft, **model), files, batch_size=batch_size)
    else:
        own_tasks = read_tasks(
            examples or (),
            metric=metric,
            limit=limit if examples else None,
            prompt_column=prompt_column,
            answer_column=answer_column,
            max_new_tokens=max_new_tokens,
            stop=stop or None,
            shots=shots,
        )
        settings = {
            "length": length,
            "batch_size": batch_size,
            "limit_tokens": limit_tokens,
            "decode_prompts": 0,
            "tasks": own_tasks,
            "confirm_unsafe_code": confirm_unsafe_code,
        }
        results = evaluate_graft(
            graft,
            texts=read_texts(text or (), text_column=text_column),
            tasks=_split_names(tasks),
            limit=limit,
            evaluation=EvaluationConfig.parse(settings, where="graft eval"),
            **model,
        )
    notes = results.details.get("notes")
    for note in notes if isinstance(notes, list) else ():
        log(f"note: {note}")
    if out is not None:
        write_report(results, out)
    print_result(
        results.model_dump(mode="json"), as_json=as_json, show=lambda: print_side_by_side(results, stdout_console())
    )


def audit(
    context: typer.Context,
    base: Annotated[str, argument("BASE", "The original model: name, folder or file.")],
    tuned: Annotated[str, argument("TUNED", "The changed model: also a graft or an adapter.")],
    out: Annotated[Path | None, option("DIR", "Folder for the report and the page.")] = None,
    tokens: Annotated[int, option("N", "Tokens to sample from BASE; 0 samples none.", min=0)] = 10_000,
    text: Annotated[list[str] | None, option("NAME=PATH", "Further text to compare on. Repeatable.")] = None,
    tasks: Annotated[str, option("A,B", "Tasks of lm-evaluation-harness.")] = "",
    limit: Annotated[int | None, option("N", "Questions per task; all by default.", min=1)] = None,
    harness: Annotated[
        list[str] | None,
        option("TASK,KEY=VALUE", "A task that is compared item by item, as in nq_open,shots=5,data=DIR. Repeatable."),
    ] = None,
    preset: PresetOption = None,
    eval_data: EvalData = None,
    confirm_unsafe_code: UnsafeCode = False,
    examples: Annotated[list[str] | None, option("NAME=FILE", "File of prompts and answers. Repeatable.")] = None,
    metric: Annotated[str | None, option("METRIC", "Metric of --examples, as in graft eval.")] = None,
    prompts: Annotated[
        Path | None,
        option("FILE", "Questions to answer, one per line; by default sampled from BASE."),
    ] = None,
    answers: Annotated[int, option("N", "Sampled questions to answer.", min=0)] = 32,
    new: Annotated[
        list[Path] | None,
        option("PATH", "Text that TUNED learned, to find its names in answers. Repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, option("N", "Maximum tokens of an answer.", min=1)] = 128,
    budget: Annotated[
        list[str] | None,
        option("METRIC=X", "Fail if the metric exceeds this limit, as in own_kl=0.05. Repeatable."),
    ] = None,
    quantize: Annotated[Quantization | None, option("BITS", "Audit TUNED in int8 or int4.")] = None,
    backbone: Annotated[
        str | None,
        option("NAME", "Current name or folder of the backbone of a graft or adapter."),
    ] = None,
    dtype: Annotated[DtypeName, option("DTYPE", "Precision of both models; by default their own.")] = "auto",
    seed: Annotated[int | None, option("N", "Seed of the sampled text.", min=0)] = None,
    length: Annotated[int, option("N", "Tokens per sampled text and per window.", min=3)] = 256,
    limit_tokens: Annotated[int, option("N", "Scored tokens per further text.", min=1)] = 50_000,
    batch_size: Annotated[int, option("N", "Rows per forward pass.", min=1)] = 8,
    text_column: Column = "text",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a change of a model broke."""
    from graftlm.cli.display import stdout_console
    from graftlm.data.questions import read_questions
    from graftlm.evaluation.audit import AuditConfig, print_audit
    from graftlm.evaluation.audit import audit as run_audit
    from graftlm.generation.inputs import new_sources, read_harness, read_tasks, read_texts

    # Most options have the names of keys of the config; an option without a value leaves the key at its default.
    settings: dict[str, object] = {
        name: value for name, value in context.params.items() if name in AuditConfig.model_fields and value is not None
    }
    settings["tasks"] = _split_names(tasks)
    settings["harness"] = read_harness(harness or ())
    settings["eval_data"] = None if eval_data is None else str(eval_data)
    settings["examples"] = read_tasks(examples or (), metric=metric)
    settings["prompts"] = read_questions(prompts) if prompts else []
    settings["new"] = new_sources(new or (), text_column=text_column)
    settings["budget"] = _read_budget(budget or ())
    texts = read_texts(text or (), text_column=text_column)
    result = run_audit(base, tuned, out, texts=texts, progress=not quiet, **settings)
    document = result.results.model_dump(mode="json")
    print_result(document, as_json=as_json, show=lambda: print_audit(result, stdout_console()))
    if out is not None:
        log(f"page     {result.write(out)}", quiet=quiet)
    result.check_budget()


def _split_names(names: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name for name in names.split(",") if name]


def _read_budget(pairs: Sequence[str]) -> dict[str, str]:
    """Return the limits by metric, from `METRIC=X` pairs; `AuditConfig` checks that they are numbers."""
    limits = {}
    for pair in pairs:
        metric, _, limit = pair.partition("=")
        limits[metric] = limit
    return limits


def generate(
    graft: Annotated[Path, argument("GRAFT", "Folder of a graft or of a model, or a sum such as A:0.7+B:0.3.")],
    prompt: Annotated[str, argument("PROMPT", "Text to continue; - reads stdin.")],
    max_new_tokens: Annotated[int, option("N", "Maximum number of new tokens.", min=1)] = 64,
    sample: Annotated[bool, flag("--sample/--greedy", "Sample tokens, or take the most likely ones.")] = False,
    temperature: Annotated[float | None, option("X", "With --sample: temperature; 1 by default.")] = None,
    top_p: Annotated[float | None, option("P", "With --sample: nucleus sampling; 1 by default.")] = None,
    num_beams: Annotated[int, option("N", "Number of beams of beam search.", min=1)] = 1,
    seed: Annotated[int | None, option("N", "Random seed.", min=0)] = None,
    compile_steps: CompileSteps = False,
    bare: Annotated[bool, flag("--bare", "Use the backbone without the graft.")] = False,
    trace: Annotated[
        bool,
        flag("--trace", "Color each token by the graft's trace, such as its expert or gate."),
    ] = False,
    trace_html: Annotated[
        Path | None,
        option("FILE", "Write the trace as a self-contained HTML page."),
    ] = None,
    chat: Annotated[bool, flag("--chat", "Answer the prompt, in the model's chat template.")] = False,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a grafted model, or with a model."""
    from graftlm.cli.display import stdout_console
    from graftlm.files.writing import write_atomically
    from graftlm.generation.generate import Decoding, generate_text, load_model, read_prompt
    from graftlm.generation.traces import print_trace, trace_page

    options = {
        "max_new_tokens": max_new_tokens,
        "num_beams": num_beams,
        "seed": seed,
        "compile": compile_steps,
        "sample": sample,
        "temperature": temperature,
        "top_p": top_p,
    }
    decoding = Decoding.parse(options, where="graft generate")
    text = read_prompt(prompt)
    question = [{"role": "user", "content": text}] if chat else text
    model, tokenizer = load_model(
        graft,
        backbone,
        changes=changes or (),
        bare=bare,
        chat=chat,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    is_traced = trace or trace_html is not None
    on_text = None if as_json or is_traced else print_text
    result = generate_text(model, tokenizer, question, decoding, on_text=on_text, trace=is_traced)
    if trace_html is not None:
        write_atomically(trace_html, trace_page(result).encode())

    def show() -> None:
        if is_traced:
            print_trace(result, stdout_console())
        else:
            typer.echo()  # ends the line of the text, which is printed already

    print_result(result.to_json(), as_json=as_json, show=show)


def chat(
    graft: Annotated[
        Path,
        argument("[GRAFT|MODEL]", "Folder of a graft or of a model; by default SmolLM2.", show_default=True),
    ] = Path("smollm2-135m-instruct"),
    system: Annotated[str | None, option("TEXT", "The system message.")] = None,
    max_new_tokens: Annotated[int, option("N", "Maximum tokens of an answer.", min=1)] = 512,
    sample: Annotated[bool, flag("--sample/--greedy", "Sample tokens, or take the most likely ones.")] = False,
    temperature: Annotated[float | None, option("X", "With --sample: temperature; 1 by default.")] = None,
    top_p: Annotated[float | None, option("P", "With --sample: nucleus sampling; 1 by default.")] = None,
    seed: Annotated[int | None, option("N", "Random seed.", min=0)] = None,
    compile_steps: CompileSteps = False,
    bare: Annotated[bool, flag("--bare", "Use the backbone without the graft.")] = False,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk with a grafted model, or with a model, in the terminal."""
    from graftlm.generation.generate import ChatSession, Decoding, load_model, talk

    options = {
        "max_new_tokens": max_new_tokens,
        "sample": sample,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "compile": compile_steps,
    }
    decoding = Decoding.parse(options, where="graft chat")
    model, tokenizer = load_model(
        graft,
        backbone,
        changes=changes or (),
        bare=bare,
        chat=True,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    session = ChatSession(model, tokenizer, decoding, system=system)
    talk(session, print_text)


def predict(
    graft: GraftFolder,
    task: Annotated[str, option("NAME", "Name of the task.", show_default=False)],
    source: Annotated[str, argument("[FILE|-]", "A table, or lines of text; - reads stdin.")] = "-",
    text_column: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Text column, by default that of training. It makes stdin and text files JSON lines. Repeatable.",
        ),
    ] = None,
    batch_size: Annotated[int, option("N", "Rows per forward pass.", min=1)] = 64,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Print a graft's predictions, one JSON object per row."""
    from graftlm.generation.predict import load_task_graft, predict_rows, read_questions

    task_graft = load_task_graft(
        graft,
        backbone=backbone,
        changes=changes or (),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    rows = read_questions(task_graft.config(task), source, text_column or ())
    predictions = predict_rows(task_graft, task, rows, batch_size=batch_size)
    if as_json:
        print_json(list(predictions))
        return
    is_empty = True
    for prediction in predictions:
        is_empty = False
        typer.echo(json.dumps(prediction, ensure_ascii=False))
    if is_empty:
        log(f"{'stdin' if source == '-' else source} has no rows, so nothing was predicted.")


def inspect(
    folder: Annotated[Path, argument("DIR", "Folder of a graft or of a report.")],
    text: Annotated[
        list[str] | None,
        option("[NAME=]PATH", "Measure the graft's layers on this text. Repeatable."),
    ] = None,
    text_column: Column = "text",
    backbone: Annotated[
        str | None,
        option("NAME", "Compare with this model; with --text, by default the graft's backbone."),
    ] = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Describe a graft's folder, or print a report's table again."""
    # Report a folder without a graft or a report before the slow imports.
    is_report = has_report(folder)
    from graftlm.cli.display import print_inspection, stdout_console
    from graftlm.evaluation import Results, print_table
    from graftlm.generation.inputs import read_texts
    from graftlm.generation.inspect import inspect_graft

    if is_report:
        results = Results.read(folder)
        print_result(
            results.model_dump(mode="json"), as_json=as_json, show=lambda: print_table(results, stdout_console())
        )
        return
    inspection = inspect_graft(
        folder,
        backbone=backbone,
        changes=changes or (),
        texts=read_texts(text or (), text_column=text_column),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    print_result(inspection.model_dump(mode="json"), as_json=as_json, show=lambda: print_inspection(inspection))


def push(
    folder: Annotated[Path, argument("DIR", "Folder of a graft or of an exported model.", show_default=True)],
    repository: Annotated[
        str,
        argument("OWNER/NAME", "The repository; created if it does not exist.", show_default=True),
    ],
    public: Annotated[bool, flag("--public", "Make a new repository public.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a graft or an exported model to the Hugging Face hub."""
    from graftlm.store.upload import push_to_hub

    url = push_to_hub(folder, repository, private=not public)
    print_result({"url": url}, as_json=as_json, show=lambda: typer.echo(f"wrote {url}"))


def import_peft(
    adapter: Annotated[Path, argument("ADAPTER", "Folder of a PEFT adapter.")],
    as_json: AsJson = False,
) -> None:
    """Show the contents of a PEFT adapter, and how to use it."""
    from graftlm.cli.display import print_adapter
    from graftlm.generation.adapters import inspect_adapter

    inspection = inspect_adapter(adapter)
    print_result(inspection.model_dump(mode="json"), as_json=as_json, show=lambda: print_adapter(inspection))


def methods(as_json: AsJson = False) -> None:
    """List the kinds of grafts with their config keys."""
    from graftlm.cli.display import print_methods
    from graftlm.generation.methods import methods as registered_methods

    listed = registered_methods()
    document = [method.model_dump(mode="json") for method in listed]
    print_result(document, as_json=as_json, show=lambda: print_methods(listed))

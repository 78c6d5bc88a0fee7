"""The command line: one function per verb, no logic.

Results go to stdout; progress, notes and errors to stderr. What takes long to import waits until a verb needs it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graftlm.errors import ForgettingBudgetError, GraftError
from graftlm.version import __version__

if TYPE_CHECKING:
    from graftlm.evaluation import Results
    from graftlm.generation import Generation

_RESUMED = ("train", "compare", "reproduce", "demo")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG}


class _Verbs(TyperGroup):
    """Turns what the user can mend into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraftError as error:
            _note(f"error: {error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            again = ": the same command goes on where it stopped" if ctx.invoked_subcommand in _RESUMED else ""
            _note(f"interrupted{again}.")
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in _DISK:
                raise
            _note(
                f"error: {error.filename or 'A file'} can't be read or written ({error.strerror}): "
                "mend that, or name another place."
            )
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Verbs,
    name="graft",
    help="Teach a frozen language model something new, and show what it kept.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Change keys of the recipe, as training.steps=200.", show_default=False),
]
RunFolder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where results go; by default the recipe's out.")
]
GraftFolder = Annotated[Path, typer.Argument(metavar="GRAFT", help="A graft's folder.", show_default=False)]
BackboneName = Annotated[
    str | None,
    typer.Option(
        "--backbone", metavar="NAME", help="A model's name or folder; by default the one the graft was trained on."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change keys of the graft's config, as augmenting.french.name=DIR."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="As cuda:1; by default the fastest there is.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the backbone.")]
Column = Annotated[str, typer.Option(metavar="NAME", help="The column of JSON and parquet files that holds the text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no notes.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"graftlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe's graft or language model, and report."""
    _settle()
    from graftlm import load_recipe, run_recipe
    from graftlm.evaluation import Results

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    try:
        results = run_recipe(chosen, folder, progress=not quiet, say=_say(quiet))
    except ForgettingBudgetError:
        _report(Results.read(folder), folder, as_json)
        raise
    _report(results, folder, as_json)


@app.command()
def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data, and compare them."""
    _settle()
    from graftlm import compare_recipe, load_recipe

    chosen = load_recipe(recipe, overrides or ())
    folder = out or Path(chosen.out)
    _report(compare_recipe(chosen, folder, progress=not quiet, say=_say(quiet)), folder, as_json)


@app.command(name="eval")
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
    _settle()
    from graftlm.evaluation import write_report
    from graftlm.inspection import evaluate_graft, read_tasks, read_texts
    from graftlm.training.recipe import EvaluationConfig

    columns = {"prompt_column": prompt_column, "answer_column": answer_column, "tests_column": tests_column}
    decoding = {"max_new_tokens": max_new_tokens, "stop": stop or None, "shots": shots}
    own = read_tasks(examples or (), metric=metric, limit=limit if examples else None, **columns, **decoding)
    settings = {"length": length, "batch_size": batch_size, "limit_tokens": limit_tokens, "decode_prompts": 0}
    results = evaluate_graft(
        graft,
        backbone=backbone,
        changes=changes or (),
        texts=read_texts(text or (), text_column=text_column),
        tasks=[task for task in tasks.split(",") if task],
        limit=limit,
        evaluation=EvaluationConfig.parse(settings | {"tasks": own}, where="graft eval"),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if out is not None:
        write_report(results, out)
    _emit(results.model_dump(mode="json"), as_json, lambda: _display().print_side_by_side(results, _stdout()))


@app.command()
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
    _settle()
    from graftlm.artifact import backbone_of, is_model, load_graft
    from graftlm.generation import Decoding, generate_text, read_prompt
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
        from graftlm.evaluation.results import write_atomically
        from graftlm.traces import trace_page

        write_atomically(trace_html, trace_page(found).encode())
    _emit(found.to_json(), as_json, lambda: _show_trace(found) if traced else typer.echo())


@app.command()
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
    _settle()
    from graftlm.evaluation import Results, print_table
    from graftlm.inspection import inspect_graft, is_results, read_texts

    if is_results(folder):
        results = Results.read(folder)
        return _emit(results.model_dump(mode="json"), as_json, lambda: print_table(results, _stdout()))
    texts = read_texts(text or (), text_column=text_column)
    found = inspect_graft(
        folder,
        backbone=backbone,
        changes=changes or (),
        texts=texts,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return _emit(found.model_dump(mode="json"), as_json, lambda: _display().print_inspection(found, _stdout()))


@app.command()
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
    as_json: AsJson = False,
) -> None:
    """Run a published comparison again, beside the paper's results."""
    _settle()
    from graftlm.reproduce import Options
    from graftlm.reproduce import reproduce as run

    folder = out or Path("runs") / f"reproduce-{name}"
    given = {"data": data, "out": folder, "seeds": seeds.split(","), "tables": table or [], "quick": quick}
    options = Options.parse(given | {"jobs": jobs, "device": device, "backbone": backbone}, where="graft reproduce")
    _report(run(name, options), folder, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything goes.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run of the same form.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of all random choices.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Do the main job at toy size, on text that this machine has."""
    _settle()
    from graftlm.reproduce.demo import run_demo

    _report(run_demo(out, quick=quick, seed=seed, say=_say(quiet), progress=not quiet), out, as_json)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the kinds of graft, and the keys of each."""
    _settle()
    from graftlm.inspection import methods as registered

    found = registered()
    _emit([one.model_dump(mode="json") for one in found], as_json, lambda: _display().print_methods(found, _stdout()))


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As it is anyway.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    _settle()
    from graftlm.evaluation.results import write_atomically
    from graftlm.training.recipe import recipe_schema

    text = json.dumps(recipe_schema(), indent=2)
    if out is None:
        return _emit(recipe_schema(), True, typer.echo)
    path = write_atomically(out, text.encode() + b"\n")
    return _emit({"schema": str(path)}, as_json, lambda: typer.echo(path))


def main() -> None:
    """Run the command line; exits with 2 for what the user can mend, and with 130 when interrupted."""
    try:
        app()
    except KeyboardInterrupt:  # before a verb began, or again while it stopped
        raise SystemExit(130) from None


def _settle() -> None:
    """Keep the terminal for our own lines: progress goes to stderr, libraries speak of errors only."""
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # which warns of what torchao does
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import rich
    from transformers.utils import logging

    rich.reconfigure(stderr=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Read by the processes that this one starts: here, downloads still show their progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _is_main() -> bool:
    """Of the processes that a launcher started, only the first one speaks."""
    return os.environ.get("RANK", "0") == "0"


def _note(text: str) -> None:
    if _is_main():
        typer.echo(text, err=True)


def _say(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else _note


def _emit(document: Any, as_json: bool, show: Callable[[], Any]) -> None:
    """Print a result: as JSON, or as `show` does."""
    if not _is_main():
        return
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show()


def _report(results: Results, folder: Path, as_json: bool) -> None:
    """Print a run's table and where everything is."""
    from graftlm.evaluation import print_table
    from graftlm.inspection import files_of

    files = files_of(folder)

    def show() -> None:
        print_table(results, _stdout())
        for kind, paths in files.items():
            for path in paths:
                typer.echo(f"{kind:8} {path}")

    _emit({"results": results.model_dump(mode="json"), "files": files}, as_json, show)


def _show_trace(found: Generation) -> None:
    from graftlm.traces import print_trace

    print_trace(found, _stdout())


def _stdout() -> Any:
    from rich.console import Console

    # A file or a pipe has no width of its own.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)


def _display() -> Any:
    from graftlm import display

    return display


if __name__ == "__main__":
    main()

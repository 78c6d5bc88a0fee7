"""The command line: one function per verb, no logic.

Results go to stdout; progress, notes and errors to stderr. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import errno
import gc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from graftlm.cli import exporting, grafts, pipelines, serve, summarizing, training
from graftlm.cli.common import configure_logging, log
from graftlm.errors import GraftError
from graftlm.version import __version__

_RESUMABLE = ("train", "compare", "grow", "demo", "audit", "summarize train-writer")
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""The base class of wrong arguments. typer has no name for it, and recent versions have their own copy of click."""
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG}


class _Verbs(TyperGroup):
    """The group of all verbs. It reports a user's mistake as one line on stderr and exits with 2.

    The name of a verb may have two words, which go before a verb of one word with arguments.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        if name in self.commands:
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except GraftError as error:
            log(f"error: {error}")
            raise typer.Exit(2) from None
        except _UsageError as error:
            verb = ctx.invoked_subcommand if ctx.invoked_subcommand in self.commands else ""
            help_command = " ".join(["graft", *verb.split(), "--help"])
            log(f"error: {_usage_problem(error)}: `{help_command}` shows what is expected.")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            hint = ": the same command resumes the run" if ctx.invoked_subcommand in _RESUMABLE else ""
            log(f"interrupted{hint}.")
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            file = error.filename or "A file"
            problem = f"{file} can't be read or written ({error.strerror})"
            log(f"error: {problem}: free disk space, change its permissions, or name another path.")
            raise typer.Exit(2) from None
        finally:
            # A verb that failed while it loaded leaves garbage collection disabled.
            gc.enable()


def _usage_problem(error: typer.BadParameter) -> str:
    """Return what is wrong with the arguments, as part of a sentence."""
    problem = error.format_message().partition(", unable to parse")[0].strip().rstrip(".")
    return problem.replace("Input should be", "the value should be")


class _Verb(TyperCommand):
    """A verb that configures logging before it runs. Its help is shown without this, because that takes a second."""

    def invoke(self, ctx: Any) -> object:
        recipe = ctx.params.get("recipe")
        if recipe:
            from graftlm.config import read_yaml

            # Report a missing or invalid file before the slow imports.
            read_yaml(recipe)
        configure_logging()
        return super().invoke(ctx)


app = typer.Typer(
    cls=_Verbs,
    name="graft",
    help="Teach a frozen language model something new, and measure what it forgot.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"graftlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


# In the order of the help.
app.command(cls=_Verb)(training.train)
app.command(cls=_Verb)(training.compare)
app.command(cls=_Verb)(training.grow)
app.command(cls=_Verb)(grafts.audit)
app.command("eval", cls=_Verb)(grafts.evaluate)
app.command(cls=_Verb)(grafts.generate)
app.command(cls=_Verb)(grafts.chat)
app.command(cls=_Verb)(grafts.predict)
app.command(cls=_Verb)(grafts.inspect)
app.command(cls=_Verb)(exporting.export)
app.command(cls=_Verb)(grafts.push)
app.command(cls=_Verb)(grafts.import_peft)
app.command(cls=_Verb)(pipelines.summarize)
app.command("summarize train-selector", cls=_Verb)(summarizing.train_selector)
app.command("summarize train-writer", cls=_Verb)(summarizing.train_writer)
app.command(cls=_Verb)(pipelines.clarify)
# `serve` configures logging itself, since it checks its options before the slow imports of logging.
app.command()(serve.serve)
app.command(cls=_Verb)(training.demo)
app.command(cls=_Verb)(grafts.methods)
app.command(cls=_Verb)(training.schema)


def main() -> None:
    """Run the command `graft` with the arguments of the process.

    It exits with 0 after success, with 2 after a user's mistake, and with 130 after an interruption.
    """
    try:
        app()
    except KeyboardInterrupt:
        # An interruption before a verb begins, or a second one while it stops.
        raise SystemExit(130) from None

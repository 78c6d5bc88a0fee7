"""The command line: one function per verb, no logic.

Results go to stdout; progress, notes and errors to stderr. What takes long to import waits until a verb needs it.
"""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graftlm.cli import about, clarify, demo, grafts, rating, serve, summarize, tasks, training
from graftlm.cli.common import log
from graftlm.errors import GraftError
from graftlm.version import __version__

_RESUMED = ("train", "compare", "demo")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG}


class _Verbs(TyperGroup):
    """Turns what the user can mend into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraftError as error:
            log(f"error: {error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            again = ": the same command goes on where it stopped" if ctx.invoked_subcommand in _RESUMED else ""
            log(f"interrupted{again}.")
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in _DISK:
                raise
            log(
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


app.command()(training.train)
app.command()(training.compare)
app.command(name="eval")(grafts.evaluate)
app.command()(grafts.generate)
app.command()(tasks.predict)
app.command()(grafts.inspect)
app.command()(summarize.summarize)
app.command()(rating.rate)
app.command()(rating.ratings)
app.command()(clarify.clarify)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(about.methods)
app.command()(about.schema)


def main() -> None:
    """Run the command line; exits with 2 for what the user can mend, and with 130 when interrupted."""
    try:
        app()
    except KeyboardInterrupt:  # before a verb began, or again while it stopped
        raise SystemExit(130) from None

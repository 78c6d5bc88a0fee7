"""The command line: one function per verb, no logic.

Results go to stdout; progress, notes and errors to stderr. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import errno
import gc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from graftlm.cli import grafts, pipelines, serve, training
from graftlm.cli.common import configure_logging, log
from graftlm.errors import GraftError
from graftlm.version import __version__

_RESUMABLE = ("train", "compare", "grow", "demo", "audit")
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG}


class _Verbs(TyperGroup):
    """Turns a user's mistake into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraftError as error:
            log(f"error: {error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            hint = ": the same command resumes the run" if ctx.invoked_subcommand in _RESUMABLE else ""
            log(f"interrupted{hint}.")
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            log(
                f"error: {error.filename or 'A file'} can't be read or written ({error.strerror}): "
                "fix that, or name another path."
            )
            raise typer.Exit(2) from None
        finally:
            gc.enable()  # after a verb that failed as it loaded


class _Verb(TyperCommand):
    """A verb, whose logging is configured before it runs; its help needs none."""

    def invoke(self, ctx: Any) -> Any:
        if recipe := ctx.params.get("recipe"):
            from graftlm.config import read_yaml

            read_yaml(recipe)  # a missing or broken file is an error before slow imports
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_VERBS = [training.train, training.compare, training.grow, grafts.audit]
_VERBS += [grafts.evaluate, grafts.generate, grafts.chat, grafts.predict, grafts.inspect, grafts.export]
_VERBS += [grafts.push, grafts.import_peft]
_VERBS += [pipelines.summarize, pipelines.clarify, serve.serve]
_VERBS += [training.demo, grafts.methods, training.schema]
for _verb in _VERBS:
    # `serve` reads its options before the slow imports of logging
    app.command("eval" if _verb is grafts.evaluate else None, cls=None if _verb is serve.serve else _Verb)(_verb)


def main() -> None:
    """Run the command line; exits with 2 for a user's mistake and with 130 when interrupted."""
    try:
        app()
    except KeyboardInterrupt:  # before a verb begins, or again while it stops
        raise SystemExit(130) from None

"""The page on the command line names every verb and option, and every command in the documentation parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from graftlm.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "src").rglob("README.md")]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands() -> list[list[str]]:
    """What the documentation's code blocks call `graft` with."""
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    lines = [line.split(" > ")[0].split(" < ")[0] for block in blocks for line in block.splitlines()]
    calls = [re.match(r"(?:.*uv run |accelerate launch -m )?graft(?:lm\.cli)? (.*)", line) for line in lines]
    return [shlex.split(call[1], comments=True) for call in calls if call]


def test_commands_are_found() -> None:
    assert {call[0] for call in commands()} == set(VERBS)


@pytest.mark.parametrize("call", commands(), ids=shlex.join)
def test_a_command_of_the_documentation_parses(call: list[str]) -> None:
    verb, *arguments = call
    VERBS[verb].make_context(verb, arguments)


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_names_every_verb_and_option(verb: str) -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert f"\n## {verb}\n" in page
    options = {name for parameter in VERBS[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not [name for name in options if name.startswith("--") and f"`{name}" not in page and f" {name}" not in page]


def test_help_fits_its_line() -> None:
    for verb, command in VERBS.items():
        assert not command.get_short_help_str(65).endswith("..."), verb

"""Every command in the documentation parses, and the page on the command line has every verb."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from graftlm.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands() -> list[list[str]]:
    """The arguments of `graft` in the code blocks of the documentation."""
    calls = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in block.splitlines():
                without_redirection = line.split(" > ")[0].split(" < ")[0]
                call = re.match(r"(?:.*uv run |accelerate launch -m )?graft(?:lm)? (.*)", without_redirection)
                if call:
                    calls.append(with_verb(shlex.split(call[1], comments=True)))
    return calls


def with_verb(words: list[str]) -> list[str]:
    """The words of a command, with a verb of two words as one."""
    verb = " ".join(words[:2])
    return [verb, *words[2:]] if verb in VERBS else words


def test_every_verb_is_shown() -> None:
    assert {call[0] for call in commands()} == set(VERBS)


@pytest.mark.parametrize("call", commands(), ids=shlex.join)
def test_a_command_of_the_documentation_parses(call: list[str]) -> None:
    verb, *arguments = call
    VERBS[verb].make_context(verb, arguments)


def test_inline_commands_name_verbs() -> None:
    spans = [span for page in PAGES for span in re.findall(r"`graft ([a-z][\w-]*)", page.read_text("utf-8"))]
    assert spans
    assert set(spans) - set(VERBS) == set()


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_has_a_section_for_every_verb(verb: str) -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert f"\n## {verb}\n" in page


def test_help_fits_its_line() -> None:
    for verb, command in VERBS.items():
        assert not command.get_short_help_str(65).endswith("..."), verb

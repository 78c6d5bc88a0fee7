"""Streaming: in the terminal, from a server with a reasoning model, from a local model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clarify.server import FRENCH, QUESTION, FaultyHandler, serving, translator
from cli.tools import invoke
from graftlm.pipelines.clarify import (
    Conversation,
    Endpoint,
    EndpointConfig,
    LocalModel,
    TerminalPrinter,
    load_template,
    prompts,
)
from graftlm.pipelines.clarify.models import StreamPrinter, before_stop
from tiny import tiny_model, tiny_tokenizer

FRIEND, POLITE = FRENCH
TEXT = "Are you sure?"
BEGUN = Conversation.start(TEXT, "translate", "fr")
PROMPT = prompts.build_prompt(load_template("translate"), "ask", "fr", TEXT)


def chunks_of(text: str, sizes: list[int]) -> list[str]:
    """The text cut after so many characters, again and again."""
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


@given(
    st.sampled_from(["", "Translation: ", "\n Translation:", "Trans", "  "]),
    st.text("Tran slation:é\x1b\n", max_size=12).map(str.strip),
    st.lists(st.integers(0, 4), max_size=12),
)
def test_the_printed_text_is_the_output_for_any_chunks(before: str, output: str, sizes: list[int]) -> None:
    screen: list[str] = []
    shown = TerminalPrinter(BEGUN, screen.append)
    for chunk in chunks_of(f"{before}{output} \n", sizes):
        shown(chunk)
    last = f"{before}{output}".strip().removeprefix("Translation:").strip()
    early = "".join(screen)
    assert prompts.printable(last).startswith(early), "nothing is shown that has to be taken back"
    shown.finish(last)
    assert "".join(screen) == f"{prompts.printable(last)}\n"


def test_new_text_is_printed_at_once() -> None:
    screen: list[str] = []
    shown = TerminalPrinter(BEGUN, screen.append)
    for chunk in ("Transl", "ation:", " Es-tu", " sûre", "\x1b[2J ?"):
        shown(chunk)
    assert screen == ["Es-tu", " sûre", "[2J ?"]
    shown.finish("Vous.")
    assert "".join(screen[3:]) == "\nVous.\n", "another output stands on a line of its own"


def test_the_terminal_streams_and_ends_its_line_after_a_break(tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    with serving(translator, FaultyHandler) as server:
        given = (TEXT, "--to", "fr", "--answer", POLITE, "--resume", path, "--endpoint", server.url, "--retries", "0")
        broken = invoke("clarify", *given, "--model", "breaks_off_from:1")
        assert (broken.code, broken.out) == (2, "Es-tu\n")
        assert "stream" in broken.err
        done = invoke("clarify", *given, "--model", "fails:0")
        assert (done.code, done.out) == (0, f"{FRENCH[POLITE]}\n")
        assert [request.get("stream", False) for request in server.requests] == [False, True, True]


def test_json_output_is_not_streamed() -> None:
    with serving(translator, FaultyHandler) as server:
        given = ("--to", "fr", "--answer", POLITE, "--json", "--endpoint", server.url, "--model", "fails:0")
        assert invoke("clarify", TEXT, *given).out.startswith("{")
        assert not any("stream" in request for request in server.requests)


@pytest.mark.parametrize(
    ("reply", "spoken"),
    [
        (f"<think>\nWho is it?\n</think>\n\n{QUESTION}", QUESTION),
        (QUESTION, QUESTION),
        ("<thin ice>", "<thin ice>"),
        ("<", "<"),
        ("<think> without an end", "<think> without an end"),
    ],
)
def test_reasoning_is_not_streamed(reply: str, spoken: str) -> None:
    chunks: list[str] = []
    with serving(lambda body: reply) as server:
        found = Endpoint(EndpointConfig(url=server.url, model="m")).generate(PROMPT, on_text=chunks.append)
    assert "".join(chunks) == found.text == spoken


def test_a_local_model_streams() -> None:
    chunks: list[str] = []
    local = LocalModel(tiny_model("llama", max_position_embeddings=8192), tiny_tokenizer(), max_new_tokens=8)
    prompt = prompts.build_prompt(load_template("translate"), "plain", "fr", "What is it?")
    reply = local.generate(prompt, on_text=chunks.append)
    assert "".join(chunks) == reply.text == local.generate(prompt).text
    assert len(chunks) > 1


def test_text_after_the_stop_string_is_not_streamed() -> None:
    """A model without chat messages continues with the next request, which the reader must not see."""
    parts: list[str] = []
    printer = StreamPrinter(lambda received: before_stop(received[3:], "\n<text>"), parts.append)
    for part in ("abc", "Oui", ".\n", "<te", "a\n<tex", "t>\nMore", " text"):
        printer(part)
    printer.end("Oui.\n<tea")
    assert parts == ["Oui", ".", "\n<tea"]

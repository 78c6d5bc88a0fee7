"""`graft clarify`: whole conversations in the terminal, with interruption and resume, and its error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clarify.server import FRENCH, PLAIN, ChatServer, FaultyHandler, serving, translator
from clarify.test_chain_templates import own_template
from cli.tools import Outcome, invoke
from graftlm.pipelines.clarify import Conversation
from tiny import BackboneFolder

FRIEND, POLITE = FRENCH
TEXT = "Are you sure?"
PUT = f'Who is "you"?\n  1. {FRIEND}\n  2. {POLITE}\nA number, your own words, or nothing: '


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with serving(translator, FaultyHandler) as running:
        yield running


def clarify(server: ChatServer, *arguments: str, model: str = "fails:0", typed: str | None = None) -> Outcome:
    server.requests.clear()
    given = ("--endpoint", server.url, "--model", model, "--retries", "0")
    return invoke("clarify", *arguments, *given, stdin=None if typed is None else typed.encode())


@pytest.mark.parametrize(
    ("typed", "output"),
    [
        ("2\n", FRENCH[POLITE]),
        ("1\n", FRENCH[FRIEND]),
        (f"{POLITE}\n", FRENCH[POLITE]),
        ("\n", PLAIN),
        ("", PLAIN),
        ("9\n", PLAIN),
    ],
)
def test_a_whole_conversation(server: ChatServer, typed: str, output: str) -> None:
    found = clarify(server, TEXT, "--to", "fr", typed=typed)
    assert (found.code, found.out) == (0, f"{output}\n")
    assert found.err.startswith(PUT)
    answered = int(bool(typed.strip()))
    assert f"1 asked, {answered} answered, 0 saved; 2 calls, " in found.err


def test_the_threshold_skips_needless_questions(server: ChatServer) -> None:
    found = clarify(server, TEXT, "--to", "fr", "--ask-above", "0.1", "--answer", POLITE)
    assert found.out == f"{FRENCH[POLITE]}\n"
    assert "1 asked, 1 answered, 0 saved, 1.00 bits gained; 3 calls" in found.err
    with serving(lambda body: "Oui." if "None" not in body["messages"][0]["content"] else translator(body)) as other:
        found = clarify(other, TEXT, "--to", "fr", "--ask-above", "0.1")
    assert (found.code, found.out) == (0, "Oui.\n")
    assert 'not asked, since its expected gain is 0.00 bits: Who is "you"?' in found.err


def test_rules_skip_the_question(server: ChatServer) -> None:
    found = clarify(server, "It is raining.", "--to", "fr", "--rules", "--quiet")
    assert (found.code, found.out, found.err) == (0, f"{PLAIN}\n", "")
    assert len(server.requests) == 1
    assert clarify(server, TEXT, "--to", "fr", "--rules", "--answer", POLITE).out == f"{FRENCH[POLITE]}\n"


def test_a_model_that_knows_the_context_answers(server: ChatServer) -> None:
    assert clarify(server, TEXT, "--to", "fr", "--context", f"It is {FRIEND}.").out == f"{FRENCH[FRIEND]}\n"
    assert clarify(server, TEXT, "--to", "fr", "--context", "It rains.").out == f"{PLAIN}\n"


def test_json_leaves_the_question_open_for_a_later_answer(server: ChatServer, tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    waiting = json.loads(clarify(server, TEXT, "--to", "fr", "--json", "--resume", path).out)
    assert waiting["step"] == "answer"
    assert waiting["question"] == {"text": 'Who is "you"?', "answers": [FRIEND, POLITE]}
    done = clarify(server, "--json", "--resume", path, "--answer", POLITE)
    assert done.err == ""
    values = json.loads(done.out)
    assert (values["step"], values["summary"]["output"]) == ("done", FRENCH[POLITE])
    assert Conversation.parse(values["conversation"]) == Conversation.load(path)
    again = clarify(server, "--resume", path)
    assert again.out == f"{FRENCH[POLITE]}\n"
    assert server.requests == [], "what is done is not done again"
    assert again.err.endswith("the conversation is finished\n")


def test_an_answer_shows_its_question(server: ChatServer) -> None:
    found = clarify(server, TEXT, "--to", "fr", "--answer", POLITE)
    assert f'asked: Who is "you"? [{FRIEND} | {POLITE}]; recorded: {POLITE}\n' in found.err
    refused = clarify(server, TEXT, "--to", "fr", "--context", "It rains.")
    assert "; simulated by fails:0: no answer\n" in refused.err


def test_an_answer_to_a_finished_conversation_is_refused(server: ChatServer, tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    assert clarify(server, TEXT, "--to", "fr", "--resume", path, "--answer", POLITE).code == 0
    content = Path(path).read_text()
    found = clarify(server, "--resume", path, "--answer", FRIEND)
    assert (found.code, found.out, server.requests) == (2, "", [])
    assert found.err.startswith(f"error: The conversation in {path} is finished")
    assert "--answer" in found.err
    assert found.err.count("\n") == 1
    assert Path(path).read_text() == content


def test_one_question_at_most_by_default(server: ChatServer) -> None:
    count = iter(range(9))
    with serving(lambda body: f"Is it {next(count)}?") as other:
        assert "1 asked, 1 answered" in clarify(other, TEXT, "--to", "fr", "--answer", "a", "--answer", "b").err


def test_a_threshold_is_a_finite_number(server: ChatServer) -> None:
    assert clarify(server, TEXT, "--to", "fr", "--ask-above", "nan").code == 2
    found = clarify(server, TEXT, "--to", "fr", "--ask-above", "inf")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert found.err.startswith("error: ")
    assert "threshold" in found.err


@pytest.mark.parametrize(
    "content", ['{"format": 2, "template": "tran', "[1]", "graft", '{"rows": []}', '{"format": 2}']
)
def test_a_file_that_is_no_conversation(server: ChatServer, tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    found = clarify(server, "--resume", str(path))
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert found.err.startswith(f"error: {path}")
    assert path.read_text() == content


def test_a_failed_run_resumes(server: ChatServer, tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    failed = clarify(server, TEXT, "--to", "fr", "--resume", path, "--answer", POLITE, model="fails_from:1")
    assert failed.code == 2
    assert failed.err.startswith(f"error: The server {server.url} failed, at the first try (500, out of memory)")
    done = clarify(server, TEXT, "--resume", path, "--answer", POLITE)
    assert done.out == f"{FRENCH[POLITE]}\n"
    assert len(server.requests) == 1


@pytest.mark.slow
def test_an_interrupted_run_resumes(server: ChatServer, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    command = [sys.executable, "-m", "graftlm", "clarify", TEXT, "--to", "fr", "--resume", str(path)]
    command += ["--endpoint", server.url, "--model", "fails:0"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stderr is not None
        assert process.stderr.read(len(PUT)).decode() == PUT
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"interrupted" in err
    assert Conversation.load(path).step == "answer"
    found = clarify(server, TEXT, "--resume", str(path), typed="2\n")
    assert (found.out, found.err.startswith(PUT)) == (f"{FRENCH[POLITE]}\n", True)
    assert len(server.requests) == 1, "the question was kept"


def test_a_backbone_on_this_machine(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    name = own_template(tmp_path)
    given = ("--backbone", str(tiny_backbone("llama")), "--template", name, "--max-new-tokens", "4", "--json")
    one, two = (json.loads(invoke("clarify", TEXT, *given, "--answer", "a").out) for _ in range(2))
    assert one["step"] == "done"
    assert one == two
    assert one["conversation"]["turns"][-1]["author"] == str(tiny_backbone("llama"))


def test_a_prompt_that_does_not_fit_the_model(tiny_backbone: BackboneFolder) -> None:
    found = invoke("clarify", TEXT, "--to", "fr", "--backbone", str(tiny_backbone("llama")))
    assert found.code == 2
    assert "but the model has 512 positions" in found.err


def test_other_tasks(server: ChatServer) -> None:
    assert clarify(server, TEXT, "--template", "rewrite", "--answer", POLITE).out == f"{FRENCH[POLITE]}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("", "--to", "fr"), ["empty"]),
        (("Où êtes-vous, et avec qui ?", "--to", "fr"), ["French", "English"]),
        ((TEXT, "--to", "xx"), ["'xx'", "known: de, es, fr, ja", "--to"]),
        ((TEXT,), ["es, fr, de, ja", "--to"]),
        ((), ["no text", "--resume"]),
        ((TEXT, "--to", "fr", "--template", "none.yaml"), ["none.yaml"]),
        ((TEXT, "--to", "fr", "--backbone", "x"), ["Both", "--endpoint", "--backbone"]),
        ((TEXT, "--to", "fr", "--answer", "a", "--context", "b"), ["Both", "--answer", "--context"]),
        ((TEXT, "--to", "fr", "--context", " "), ["--context"]),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    server: ChatServer, arguments: tuple[str, ...], named: list[str]
) -> None:
    found = clarify(server, *arguments)
    assert found.code == 2
    assert found.err.startswith("error: ")
    for value in named:
        assert value in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("Is it you?",), ["text", "'Are you sure?'", "'Is it you?'"]),
        ((TEXT, "--to", "de"), ["target", "'fr'", "'de'"]),
        ((TEXT, "--budget", "3"), ["budget", "is 1", "3 was given"]),
    ],
)
def test_a_file_with_another_conversation(
    server: ChatServer, tmp_path: Path, arguments: tuple[str, ...], named: list[str]
) -> None:
    path = Conversation.start(TEXT, "translate", "fr").save(tmp_path / "c.json")
    found = clarify(server, *arguments, "--resume", str(path))
    assert found.code == 2
    for value in [str(path), *named]:
        assert value in found.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), ["Neither", "--endpoint", "--backbone"]),
        (("--endpoint", "http://localhost:1/v1"), ["http://localhost:1/v1", "--model"]),
        (("--endpoint", "localhost", "--model", "m"), ["url", "'localhost'"]),
        (("--backbone", "nowhere"), ["nowhere"]),
    ],
)
def test_invalid_models_are_refused(options: tuple[str, ...], named: list[str]) -> None:
    found = invoke("clarify", TEXT, "--to", "fr", *options)
    assert found.code == 2
    for value in named:
        assert value in found.err


def test_an_answer_that_nobody_asked_for_is_told(server: ChatServer) -> None:
    found = clarify(server, TEXT, "--to", "fr", "--answer", f" {POLITE} ", "--answer", "the boss", "--json")
    assert json.loads(found.out)["summary"]["answered"] == 1
    (told,) = [line for line in found.err.splitlines() if "not used" in line]
    assert "the boss" in told
    assert POLITE not in told
    unasked = clarify(server, "The sun shines.", "--to", "fr", "--budget", "0", "--answer", POLITE)
    assert any("not used" in line and POLITE in line for line in unasked.err.splitlines())
    assert "not used" not in clarify(server, TEXT, "--to", "fr", "--answer", POLITE).err

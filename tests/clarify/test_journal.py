"""Many conversations with one server: bounded concurrency, faults, and interrupted runs that repeat no request."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clarify.server import FRENCH, PLAIN, ChatHandler, ChatServer, ScriptedModel, by_chat, serving, translator
from graftlm.errors import DataError, EndpointError, EvaluationError
from graftlm.pipelines.clarify import (
    Chain,
    Conversation,
    Cost,
    Endpoint,
    EndpointConfig,
    Journal,
    SimulatedUser,
    in_order,
    load_template,
    prompts,
)

FRIEND, POLITE = FRENCH
TEXTS = [f"Are you sure of number {number}?" for number in range(6)] + ["It is raining."]
PROMPT = prompts.build_prompt(load_template("translate"), "ask", "fr", "Are you sure?")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.pipelines.clarify.endpoint._FIRST_PAUSE", 0.001)


def converse(server: ChatServer, path: Path, *, retries: int = 0, timeout: float = 30.0) -> list[Conversation]:
    """Hold the conversations about all texts, three at a time."""
    model = Endpoint(EndpointConfig(url=server.url, model="m", retries=retries, timeout=timeout))
    with Journal(path) as journal:
        own = journal.wrap(model, "translator m")
        chain = Chain(own, SimulatedUser(journal.wrap(model, "user m"), f"It is {POLITE}."))
        starts = [Conversation.start(text, "translate", "fr") for text in TEXTS]
        return list(in_order(chain.run, starts, 3))


def outputs(conversations: list[Conversation]) -> list[str]:
    return [done.written.output for done in conversations if done.written is not None]


EXPECTED = [FRENCH[POLITE]] * 6 + [PLAIN]


def distinct(server: ChatServer) -> Counter[str]:
    return Counter(json.dumps(body, sort_keys=True) for body in server.requests)


def test_an_interrupted_run_repeats_no_request(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"

    class DyingHandler(ChatHandler):
        def respond(self, body: Mapping[str, Any]) -> None:
            if len(self.server.requests) > 8:
                self.send({"error": {"message": "gone"}}, 500)
            else:
                super().respond(body)

    with serving(translator, DyingHandler) as server, pytest.raises(EndpointError):
        converse(server, path)
    kept = path.read_bytes()
    count = kept.count(b"\n")
    assert 0 < count <= 8
    path.write_bytes(kept + b'{"key": "cut o')  # what a killed process left of a line
    with serving(translator) as server:
        done = converse(server, path)
        assert outputs(done) == EXPECTED
        assert len(server.requests) == 6 * 3 + 2 - count, "three requests a conversation, two where nothing is asked"
        assert set(distinct(server).values()) == {1}
    assert path.read_bytes().startswith(kept), "lines are only appended"
    with serving(translator) as server:
        assert converse(server, path) == done
        assert server.requests == []


class FlakyHandler(ChatHandler):
    """Fails with status 500 or 429, sends broken or incomplete JSON, hangs once, and works in between."""

    def respond(self, body: Mapping[str, Any]) -> None:
        number = len(self.server.requests)
        if number == 4:
            time.sleep(3)  # longer than the client waits
            self.close_connection = True
        elif number % 7 == 1:
            self.send({"error": {"message": "out of memory"}}, 500, retry_after_ms="1")
        elif number % 7 == 2:
            self.send({"error": {"message": "slow down"}}, 429, retry_after_ms="1")
        elif number % 7 == 3:
            self.send('{"choices": [{"index": 0, "mess')
        elif number % 7 == 5:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        else:
            super().respond(body)


def test_faults_of_a_server_change_no_output(tmp_path: Path) -> None:
    with serving(translator, FlakyHandler) as server:
        done = converse(server, tmp_path / "replies.jsonl", retries=30, timeout=2.0)
    assert outputs(done) == EXPECTED
    assert [found.cost.calls for found in done] == [3] * 6 + [2], "a call that was retried counts once"


def test_damage_that_stays_is_an_error(tmp_path: Path) -> None:
    class BrokenHandler(ChatHandler):
        def respond(self, body: Mapping[str, Any]) -> None:
            self.send('{"choices": [')

    with serving(translator, BrokenHandler) as server:
        model = Endpoint(EndpointConfig(url=server.url, model="m", retries=2))
        with pytest.raises(EndpointError):
            model.generate(PROMPT)
        assert len(server.requests) == 3


def test_at_most_so_many_calls_run_at_a_time() -> None:
    guard = threading.Lock()
    running = 0
    most = 0

    def call(number: int) -> int:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with guard:
            running -= 1
        return number * number

    assert list(in_order(call, range(20), 3)) == [number * number for number in range(20)]
    assert 1 < most <= 3
    most = 0
    assert list(in_order(call, range(4), 1)) == [0, 1, 4, 9]
    assert most == 1


def test_after_an_error_no_further_call_begins() -> None:
    begun: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise EndpointError("failed")
        return number

    def numbers() -> Iterator[int]:
        yield from range(1000)

    with pytest.raises(EndpointError):
        list(in_order(call, numbers(), 2))
    assert set(begun) <= {0, 1, 2, 3}, "one other call may have been running"


def test_threads_that_ask_the_same_cause_one_request(tmp_path: Path) -> None:
    model = ScriptedModel(by_chat)
    with Journal(tmp_path / "replies.jsonl") as journal:
        own = journal.wrap(model, "m")
        replies = list(in_order(lambda _: own.generate(PROMPT), range(8), 4))
    assert len(model.prompts) == 1
    assert len(set(replies)) == 1


def test_a_reply_belongs_to_its_identity_and_prompt(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    model = ScriptedModel(by_chat)
    other = prompts.build_prompt(load_template("translate"), "ask", "de", "Are you sure?")
    parts: list[str] = []
    for _ in range(2):
        with Journal(path) as journal:
            reply = journal.wrap(model, "a 256").generate(PROMPT, on_text=parts.append)
            journal.wrap(model, "b 256").generate(PROMPT)
            journal.wrap(model, "a 256").generate(other)
    assert len(model.prompts) == 3
    assert reply.cost == Cost(calls=1, prompt_tokens=10, new_tokens=2)
    assert parts == [reply.text], "a reply of the journal is shown as well"


@pytest.mark.parametrize(
    "line", ["[1]", "{}", '{"key": "k", "text": "t", "cost": {"calls": "x"}, "truncated": false}', "x"]
)
def test_a_line_that_is_no_reply_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError) as error:
        Journal(path)
    assert f"{path}:1" in str(error.value)
    assert path.read_text() == f"{line}\n"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    with Journal(path), pytest.raises(EvaluationError):
        Journal(path)
    Journal(path).close()

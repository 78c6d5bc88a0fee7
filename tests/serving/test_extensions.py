"""The routes under /v1/graftlm/: grafts and reports, clarifying turns."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from graftlm.evaluation.results import FILE_NAME
from graftlm.pipelines.clarify import Conversation
from graftlm.serving import reports
from graftlm.serving.app import create_app
from graftlm.serving.protocol import Finish, QueueFullError
from graftlm.serving.service import Service
from serving.extending import client_of, post, refusal
from serving.scripted import ENDLESS, FRENCH, FinishedStream, ScriptedEngine, scripted_service
from serving.web import changed, running

QUERY = "Are you sure it is pretty?"
START = {"text": QUERY, "template": "translate", "target": "fr"}


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return client_of(service)


# Grafts and their reports


def test_grafts_are_told_with_what_they_learned_and_forgot(client: TestClient) -> None:
    found = client.get("/v1/graftlm/grafts").json()
    assert found["backbones"] == [{"name": "tiny", "kind": "causal-lm", "chat": False, "context": 512}]
    danish, router = found["data"]
    assert (danish["name"], danish["kind"], danish["steps"], danish["tokens"]) == (
        "danish",
        "neutral-residues",
        100,
        204800,
    )
    assert danish["learned"]["mean"] == 0.42
    assert router["forgotten"]["mean"] == 0.004


def test_limits_are_those_that_requests_are_held_to(client: TestClient, service: Service) -> None:
    limits = client.get("/v1/graftlm/grafts").json()["limits"]
    assert limits["max_tokens"] == service.limits.max_tokens == 100
    too_long = {"text": "a" * (limits["text"] + 1)}
    assert "text" in refusal(client, "summarize", **too_long)
    assert "sentences" in refusal(client, "summarize", text=QUERY, sentences=limits["sentences"] + 1)
    for name, key in {"query": "text", "questions": "budget"}.items():
        value = "a" * (limits[name] + 1) if key == "text" else limits[name] + 1
        assert key in refusal(client, "clarify", model="danish", start=START | {key: value})
    answer = {"conversation": {}, "answer": "a" * (limits["answer"] + 1)}
    assert "answer" in refusal(client, "clarify", model="danish", **answer)
    with_less = changed(service, context=40)
    assert client_of(with_less).get("/v1/graftlm/grafts").json()["limits"]["max_tokens"] == 39


def test_a_report_has_the_audit_of_the_graft_s_folder_or_its_run_s(tmp_path: Path) -> None:
    client = client_of(scripted_service(tmp_path))
    assert [one["audit"] for one in client.get("/v1/graftlm/grafts").json()["data"]] == [False, False]
    assert client.get("/v1/graftlm/grafts/danish/report").json()["audit"] is None
    run = tmp_path / "danish" / "neutral-residues"
    for folder in (run / "audit", run, run / "graft" / "audit", run / "graft"):  # from the last choice to the first
        folder.mkdir(exist_ok=True)
        (folder / "audit.html").write_text(f"<title>{folder.name}</title>")
        assert client.get("/v1/graftlm/grafts/danish/report").json()["audit"] == f"<title>{folder.name}</title>"
    assert [one["audit"] for one in client.get("/v1/graftlm/grafts").json()["data"]] == [True, False]


def test_a_report_is_the_run_s_own_with_the_graft_s_row_marked(client: TestClient) -> None:
    found = client.get("/v1/graftlm/grafts/danish/report").json()
    assert [(point["id"], point["own"]) for point in found["points"]] == [
        ("lora", False),
        ("finetune", False),
        ("neutral-residues", True),
    ]
    assert found["points"][1]["learned"]["mean"] == 1.27
    assert found["results"]["command"] == "graft compare DIR"
    assert found["training"] == {"learning_rate": 0.003, "seed": 0}


def test_without_a_run_beside_it_a_graft_tells_its_own_figures(client: TestClient) -> None:
    found = client.get("/v1/graftlm/grafts/router/report").json()
    (point,) = found["points"]
    assert point["own"]
    assert point["forgotten"]["low"] == pytest.approx(-0.016)
    assert found["results"] is None
    assert found["measured"]["trainable_parameters"] == 275456


def test_a_damaged_report_is_as_good_as_none(tmp_path: Path) -> None:
    client = TestClient(create_app(scripted_service(tmp_path)), base_url="http://localhost")
    (tmp_path / "danish" / FILE_NAME).write_text('{"name": "compare"')
    found = client.get("/v1/graftlm/grafts/danish/report").json()
    assert found["results"] is None
    assert [point["id"] for point in found["points"]] == ["neutral-residues"]


def test_a_command_does_not_tell_where_things_lie() -> None:
    assert (
        reports._without_paths("graft compare /home/ann/a.yaml --out='/tmp/x y' a/b")
        == "graft compare DIR --out='DIR y' a/b"
    )


@pytest.mark.parametrize("name", ["dansk", "..", "%2e%2e%2fdanish", "tiny"])
def test_the_report_of_an_unknown_graft_is_not_found(client: TestClient, name: str) -> None:
    answer = client.get(f"/v1/graftlm/grafts/{name}/report")
    assert answer.status_code == 404
    assert "error" in answer.json()


# Clarify


def test_the_templates_are_those_that_come_with_the_pipeline(client: TestClient) -> None:
    found = client.get("/v1/graftlm/clarify").json()["data"]
    by_name = {one["name"]: one["languages"] for one in found}
    assert by_name["translate"]["fr"] == "French"
    assert "rewrite" in by_name


@pytest.mark.parametrize("answer", FRENCH)
def test_a_conversation_asks_and_then_writes_by_the_answer(client: TestClient, answer: str) -> None:
    first = post(client, "clarify", model="danish", start=START)
    assert first["question"] == {"text": 'Who is "you"?', "answers": ["a friend", "a stranger"]}
    assert first["step"] == "answer"
    last = post(client, "clarify", model="danish", conversation=first["conversation"], answer=answer)
    assert last["step"] == "done"
    assert last["summary"]["output"] == FRENCH[answer]
    assert last["summary"]["cost"]["calls"] == 2
    assert Conversation.parse(last["conversation"]).step == "done"


def test_an_answer_left_out_or_blank_skips_the_question(client: TestClient) -> None:
    first = post(client, "clarify", model="tiny", start=START)["conversation"]
    for answer in (None, "  "):
        last = post(client, "clarify", model="tiny", conversation=first, answer=answer)
        assert last["summary"]["refused"] == 1
        assert last["summary"]["output"] == "Tu es sûr ?"


def test_with_a_threshold_a_question_comes_with_the_bits_that_it_brings(client: TestClient) -> None:
    found = post(client, "clarify", model="tiny", start=START | {"threshold": 0.5})
    gain = found["conversation"]["turns"][0]["gain"]
    assert gain["bits"] == pytest.approx(1.0)
    assert gain["outputs"] == [["Es-tu sûre ?"], ["Êtes-vous sûre ?"]]


def test_a_question_below_the_threshold_is_not_put(client: TestClient) -> None:
    found = post(client, "clarify", model="tiny", start=START | {"threshold": 1.5})
    assert found["summary"]["saved"] == 1
    assert found["step"] == "done"


def test_rules_ask_the_model_only_where_they_find_something(client: TestClient, engine: ScriptedEngine) -> None:
    found = post(client, "clarify", model="tiny", start=START | {"text": "The tea is hot."}, rules=True)
    assert found["summary"]["asked"] == 0
    assert len(engine.requests) == 1


def test_replies_stop_where_the_next_request_would_begin(client: TestClient, engine: ScriptedEngine) -> None:
    post(client, "clarify", model="router", start=START | {"text": "The tea is hot."}, max_tokens=9)
    assert {(request.model, request.max_tokens, request.stop) for request in engine.requests} == {
        ("router", 9, ("\n<text>",))
    }


@pytest.mark.parametrize("template", ["/etc/passwd", "../../x.yaml", "x.yaml", "exemplars", "nothing"])
def test_a_template_is_a_name_and_never_a_file(client: TestClient, template: str, tmp_path: Path) -> None:
    assert f"'{template}'" in refusal(client, "clarify", model="tiny", start=START | {"template": template})
    first = post(client, "clarify", model="tiny", start=START)["conversation"]
    assert "template" in refusal(client, "clarify", model="tiny", conversation=first | {"template": template})


def test_what_is_no_conversation_is_refused_in_a_sentence(client: TestClient) -> None:
    first = post(client, "clarify", model="tiny", start=START)["conversation"]
    cases: list[tuple[Any, str]] = [
        (first | {"template_sha256": "0"}, "translate"),
        (first | {"format": 1}, "format"),
        (first | {"budget": 1000}, "questions"),
        (first | {"target": "tlh"}, "'tlh'"),
        (first | {"turns": first["turns"] * 2}, "turn 2"),
        (first | {"turns": [{"kind": "told"}]}, "conversation"),
        (first | {"text": "\ud800"}, "surrogate"),
        ({}, "template"),
    ]
    for conversation, sentence in cases:
        data = json.dumps({"model": "tiny", "conversation": conversation, "answer": "yes"})
        answer = client.post("/v1/graftlm/clarify", content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "tiny"}, 400, "conversation"),
        ({"model": "tiny", "start": START, "answer": "yes"}, 400, "answer"),
        ({"model": "tiny", "start": START | {"text": " "}}, 400, "empty"),
        ({"model": "tiny", "start": START | {"text": "Où est le chat que tu as vu ?"}}, 400, "French"),
        ({"model": "tiny", "start": START | {"target": None}}, 400, "translate"),
        ({"model": "tiny", "start": START | {"budget": 99}}, 400, "budget"),
        ({"model": "tiny", "start": START | {"threshold": -1}}, 400, "threshold"),
        ({"model": "tiny", "start": START | {"text": "a" * 20_001}}, 400, "text"),
        ({"model": "dansk", "start": START}, 404, "dansk"),
        ({"model": "tiny", "start": START, "path": "/etc/passwd"}, 400, "path"),
    ],
)
def test_a_turn_that_does_not_fit_is_refused(
    client: TestClient, body: dict[str, Any], status: int, sentence: str
) -> None:
    assert sentence in refusal(client, "clarify", status, **body)


def test_what_the_engine_refuses_reaches_the_client(client: TestClient, engine: ScriptedEngine) -> None:
    def full(prompt: str, request: object) -> str:
        raise QueueFullError("64 requests are waiting already: ask again in a moment.")

    engine.say = full
    assert post(client, "clarify", 429, model="tiny", start=START)["error"]["code"] == "queue_full"


@pytest.mark.parametrize(("reason", "status"), [("time", 503), ("cancelled", 503)])
def test_a_model_that_does_not_finish_is_an_error(
    service: Service, client: TestClient, monkeypatch: Any, reason: Any, status: int
) -> None:
    stream = FinishedStream([Finish(reason, 3, 0)])
    monkeypatch.setattr(service.engine, "submit", lambda requests: stream)
    assert refusal(client, "clarify", status, model="tiny", start=START)


def test_when_the_client_leaves_the_engine_stops(service: Service, engine: ScriptedEngine) -> None:
    start = START | {"text": f"Is it {ENDLESS}?"}
    with running(changed(service, closing=threading.Event())) as address, pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/graftlm/clarify", json={"model": "tiny", "start": start}, timeout=0.5)
    assert engine.cancelled.wait(10)

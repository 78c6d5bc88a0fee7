"""The route that summarizes."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from graftlm.errors import MissingExtraError
from graftlm.pipelines import summarize
from graftlm.serving import extensions
from graftlm.serving.service import Service
from serving.extending import client_of, post, refusal
from serving.scripted import ScriptedEngine
from summarize.tools import TEA


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return client_of(service)


def test_a_summary_tells_the_characters_of_its_sentences(client: TestClient) -> None:
    text = f"🍵 {TEA}"
    found = post(client, "summarize", text=text, sentences=2)
    assert len(found["extract"]["sentences"]) == 2
    for one in found["extract"]["sentences"]:
        assert text[one["start"] : one["end"]] == one["source"]


def test_a_model_writes_the_summary_and_its_sentences_are_linked(client: TestClient, engine: ScriptedEngine) -> None:
    first = post(client, "summarize", text=TEA, sentences=1)["extract"]["sentences"][0]
    engine.say = lambda prompt, request: f" {first['text']} Zebras yawn"
    found = post(client, "summarize", text=TEA, sentences=1, model="danish", max_tokens=200)
    assert found["writer"] == "danish"
    assert found["links"][0]["nearest"] == first["index"]
    assert found["links"][0]["source"] == {name: first[name] for name in ("text", "source", "start", "end")}
    assert found["links"][1]["nearest"] is None
    assert [link["mark"] for link in found["links"]] == ["verbatim", "unsupported"]
    assert engine.requests[0].max_tokens == 200
    assert any("was not trained on this layout" in note for note in found["notes"])


def test_a_graft_s_own_layout_is_used(client: TestClient, service: Service, engine: ScriptedEngine) -> None:
    folder = service.store.entries()["danish"].folder
    (folder / "layout.json").write_text('{"summary": "\\n<sum>\\n"}')
    prompts: list[str] = []
    engine.say = lambda prompt, request: prompts.append(prompt) or "It is so."
    found = post(client, "summarize", text=TEA, sentences=1, model="danish", max_tokens=20)
    (folder / "layout.json").unlink()
    assert prompts[0].endswith("\n<sum>\n")
    assert not any("layout" in note for note in found["notes"])


def test_a_summary_that_was_cut_ends_with_a_whole_sentence(client: TestClient, engine: ScriptedEngine) -> None:
    engine.say = lambda prompt, request: "Tea is old. Then it " + "goes " * 50
    assert post(client, "summarize", text=TEA, sentences=1, model="tiny", max_tokens=40)["summary"] == "Tea is old."


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("markdown", "# Tea\n\nTea is *old*. It is hot.", "Tea is old."),
        ("html", "<p>Tea is <b>old</b>. <script>x.</script>It is hot.", "Tea is old."),
        ("latex", r"\section{Tea} Tea is \emph{old}. \input{/etc/passwd} It is hot.", "Tea is old."),
    ],
)
def test_texts_of_other_formats_are_read(client: TestClient, kind: str, text: str, sentence: str) -> None:
    found = post(client, "summarize", text=text, format=kind)
    assert found["summary"].startswith(sentence)
    assert "root:" not in json.dumps(found)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"text": ""}, 400, "no sentence"),
        ({"text": "12 34"}, 400, "no sentence to summarize"),
        ({"text": "{" * 20_000, "format": "latex"}, 400, "nested too deeply"),
        ({"text": "a" * 400_001}, 400, "text"),
        ({"text": TEA, "format": "pdf"}, 400, "format"),
        ({"text": TEA, "sentences": 0}, 400, "sentences"),
        ({"text": TEA, "language": "../x"}, 400, "language"),
        ({"text": TEA, "model": "dansk"}, 404, "dansk"),
        ({"text": TEA, "model": "tiny", "max_tokens": 600}, 400, "no room"),
        ({"path": "/etc/passwd"}, 400, "path"),
    ],
)
def test_a_text_that_can_t_be_summarized_is_refused(
    client: TestClient, body: dict[str, Any], status: int, sentence: str
) -> None:
    assert sentence in refusal(client, "summarize", status, **body)


def test_a_package_that_is_not_installed_is_not_the_client_s_mistake(client: TestClient, monkeypatch: Any) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise MissingExtraError("sumy", "summarize", "Summarizing")

    monkeypatch.setattr(summarize, "summarize", missing)
    answer = client.post("/v1/graftlm/summarize", json={"text": TEA})
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "not_installed"


def test_more_at_a_time_than_there_is_room_for_is_refused(service: Service, monkeypatch: Any) -> None:
    gate, inside = threading.Event(), threading.Event()

    def waits(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        gate.wait(20)
        raise MissingExtraError("sumy", "summarize", "Summarizing")

    monkeypatch.setattr(extensions, "MAX_SUMMARIES", 1)
    monkeypatch.setattr(summarize, "summarize", waits)
    client = client_of(service)
    first = threading.Thread(target=client.post, args=("/v1/graftlm/summarize",), kwargs={"json": {"text": TEA}})
    first.start()
    assert inside.wait(20)
    assert "under way" in refusal(client, "summarize", 429, text=TEA)
    gate.set()
    first.join()

"""The route that summarizes."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from graftlm.errors import MissingExtraError
from graftlm.pipelines import summarize
from graftlm.pipelines.summarize.readers import pdf as pdf_reader
from graftlm.serving import extensions, summarization
from graftlm.serving.service import Service
from serving.extending import client_of, post, refusal
from serving.scripted import ENDLESS, ScriptedEngine
from serving.web import changed, running, until
from summarize.tools import TEA, write_pdf


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
        ({"text": ""}, 400, "sentence"),
        ({"text": "12 34"}, 400, "sentence"),
        ({"text": "{" * 20_000, "format": "latex"}, 400, "latex"),
        ({"text": "a" * 400_001}, 400, "text"),
        ({"text": TEA, "format": "pdf"}, 400, "format"),
        ({"text": TEA, "sentences": 0}, 400, "sentences"),
        ({"text": TEA, "language": "../x"}, 400, "language"),
        ({"text": TEA, "model": "dansk"}, 404, "dansk"),
        ({"text": TEA, "model": "tiny", "max_tokens": 600}, 400, "tokens"),
        ({"path": "/etc/passwd"}, 400, "path"),
        ({"format": "text"}, 400, "pdf"),
        ({"text": TEA, "pdf": "JVBERg=="}, 400, "pdf"),
        ({"pdf": "not base64"}, 400, "pdf"),
        ({"pdf": "JVBERi0xLjQK"}, 400, "PDF"),
    ],
)
def test_a_text_that_can_t_be_summarized_is_refused(
    client: TestClient, body: dict[str, Any], status: int, sentence: str
) -> None:
    assert sentence in refusal(client, "summarize", status, **body)


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.slow
def test_a_pdf_is_read_page_by_page(client: TestClient, tmp_path: Path) -> None:
    pages = [TEA, "The second page tells more of tea. It was written by a merchant who never drank any."]
    found = post(client, "summarize", pdf=encoded(write_pdf(tmp_path / "tea.pdf", *pages)), sentences=50)
    assert found["format"] == "pdf"
    assert len(found["pages"]) == 2
    sentences = found["extract"]["sentences"]
    assert {one["page"] for one in sentences} == {1, 2}
    for one in sentences:
        assert found["pages"][one["page"] - 1][one["start"] : one["end"]] == one["source"]
    assert "never drank any" in sentences[-1]["text"]


@pytest.mark.slow
def test_a_pdf_of_too_much_text_is_refused(client: TestClient, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(summarization, "MAX_TEXT", 40)
    message = refusal(client, "summarize", pdf=encoded(write_pdf(tmp_path / "tea.pdf", TEA)))
    assert "40 characters" in message


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"RLIMIT_CPU": 0}, {"RLIMIT_DATA": 2**20}])
def test_a_pdf_that_takes_too_much_ends_its_own_process_alone(
    client: TestClient, tmp_path: Path, monkeypatch: Any, limit: dict[str, int]
) -> None:
    """The limits bind: with next to nothing of either, an ordinary file is too much."""
    path = write_pdf(tmp_path / "tea.pdf", TEA)
    program = f"pdf._CHILD_LIMITS = {limit}; pdf._main()"
    monkeypatch.setattr(pdf_reader, "_MAIN", f"from graftlm.pipelines.summarize.readers import pdf; {program}")
    message = refusal(client, "summarize", pdf=encoded(path))
    assert "512 MiB" in message


def test_a_pdf_that_waits_ends_too(client: TestClient, tmp_path: Path, monkeypatch: Any) -> None:
    """A process that uses no time of a core ends by the clock."""
    monkeypatch.setattr(pdf_reader, "_MAIN", "import time; time.sleep(600)")
    monkeypatch.setitem(pdf_reader._CHILD_LIMITS, "RLIMIT_CPU", 0.5)
    message = refusal(client, "summarize", pdf=encoded(write_pdf(tmp_path / "tea.pdf", TEA)))
    assert "512 MiB" in message


@pytest.mark.slow
def test_a_document_may_be_larger_than_other_requests(client: TestClient, service: Service) -> None:
    limit = service.settings.body_bytes
    assert "PDF" in refusal(client, "summarize", pdf="*" * (limit + 1))
    document_limit = service.settings.document_bytes
    body = {"pdf": "*" * document_limit}
    assert f"{document_limit:,} bytes" in refusal(client, "summarize", 413, **body)
    assert f"{limit:,} bytes" in refusal(client, "clarify", 413, **body)


def events_of(client: TestClient, **body: Any) -> list[Any]:
    answer = client.post("/v1/graftlm/summarize", json=body | {"stream": True})
    assert answer.status_code == 200
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(event) for event in events] + ([] if last == "[DONE]" else [json.loads(last)])


def test_a_stream_tells_the_extract_the_text_and_the_whole(client: TestClient, engine: ScriptedEngine) -> None:
    engine.say = lambda prompt, request: "Tea is old. It is drunk in Asia."
    body = {"text": TEA, "sentences": 1, "model": "danish", "max_tokens": 100}
    source, extract, *texts, whole = events_of(client, **body)
    assert source == {"format": "text"}
    assert whole == post(client, "summarize", **body)
    assert extract == {"extract": whole["extract"]}
    assert len(texts) > 3
    assert "".join(event["text"] for event in texts) == whole["summary"]
    assert events_of(client, text=TEA)[-1] == post(client, "summarize", text=TEA)  # no model writes


def test_an_error_is_the_last_event_of_a_stream(client: TestClient, tmp_path: Path) -> None:
    (found,) = events_of(client, text="12 34")
    assert "sentence" in found["error"]["message"]
    path = write_pdf(tmp_path / "tea.pdf", TEA)
    source, _, found = events_of(client, pdf=encoded(path), model="tiny", max_tokens=600)
    assert TEA.split()[0] in source["pages"][0]
    assert "tokens" in found["error"]["message"]


def test_who_leaves_a_stream_ends_its_model_and_leaves_room(service: Service, engine: ScriptedEngine) -> None:
    body = {"text": f"Tea was drunk in Asia {ENDLESS}.", "model": "danish", "stream": True, "max_tokens": 100}
    engine.say = lambda prompt, request: "Tea is old."
    with running(changed(service, closing=threading.Event())) as address:
        for _ in range(extensions.MAX_SUMMARIES + 1):
            engine.cancelled.clear()
            with httpx.stream("POST", f"{address}/v1/graftlm/summarize", json=body, timeout=20) as answer:
                assert answer.status_code == 200
                assert any(line.startswith('data: {"text"') for line in answer.iter_lines())
            assert until(engine.cancelled.is_set)


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
    assert post(client, "summarize", 429, text=TEA)["error"]["code"] == "queue_full"
    gate.set()
    first.join()

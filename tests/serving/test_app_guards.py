"""What stands before every request: keys, names, sizes, slowness, too many at once; and clients that leave."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from graftlm.errors import GraftError
from graftlm.serving.protocol import Finish, TokenOutput
from graftlm.serving.settings import ApiKeys, read_keys
from serving.web import Script, ScriptedEngine, chat, completion, outputs, post, running, until, web_service

SECRET, OTHER = "k" * 32, "o" * 32
JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def guarded(engine: ScriptedEngine) -> Iterator[str]:
    """A server with keys and small limits."""
    settings = {"body_bytes": 2000, "body_seconds": 0.3, "requests": 2, "origins": ["https://good.example"]}
    with running(web_service(engine, settings=settings, keys=ApiKeys([("ann", SECRET), ("bob", OTHER)]))) as address:
        yield address


def raw(address: str, text: str) -> str:
    """What comes back for a request that is written by hand."""
    with connect(address) as connection:
        connection.sendall(text.encode())
        return "".join(iter(lambda: connection.recv(65536).decode(), ""))


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def request(path: str, body: str, *headers: str, host: str = "localhost", method: str = "POST") -> str:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines) + "\r\n" + JSON + "\r\n" + body


def test_without_a_key_nobody_is_served(guarded: str) -> None:
    for path in ("/v1/models", "/v1/anything", "/metrics", "/v1"):
        answer = httpx.get(f"{guarded}{path}")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{guarded}/health").status_code == 200, "who watches the server needs none"


def test_openai_s_client_knows_a_wrong_key(guarded: str, engine: ScriptedEngine) -> None:
    wrong = openai.OpenAI(base_url=f"{guarded}/v1", api_key="x" * 32, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    right = openai.OpenAI(base_url=f"{guarded}/v1", api_key=OTHER, max_retries=0)
    assert right.completions.create(model="tiny", prompt="a").choices[0].text == "Hello world!"
    assert engine.requests[-1].user == "bob", "requests of one key wait for each other, not for those of others"


@pytest.mark.parametrize(
    "header", ["", "Bearer", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}"]
)
def test_other_headers_are_no_key(header: str) -> None:
    assert ApiKeys([("ann", SECRET)]).name_of_header(header) is None
    assert ApiKeys([("ann", SECRET)]).name_of_header(f"bearer  {SECRET} ") == "ann"


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFTLM_API_KEYS", raising=False)
    assert not read_keys()
    monkeypatch.setenv("GRAFTLM_API_KEYS", f"{SECRET}, bob:{OTHER}")
    assert [read_keys().name_of(key) for key in (SECRET, OTHER, "x")] == ["key-1", "bob", None]
    (tmp_path / "keys").write_text(f"# ours\nann:{SECRET}\n\n")
    assert read_keys(tmp_path / "keys").name_of(SECRET) == "ann"


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("", "keys"),
        ("ann:short", "ann"),
        (f"ann:{SECRET}\nann:{OTHER}", "name"),
        (f"ann:{SECRET}\nbob:{SECRET}", "API key"),
    ],
)
def test_a_file_of_keys_that_can_t_be_meant(tmp_path: Path, text: str, culprit: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(GraftError) as caught:
        read_keys(tmp_path / "keys")
    assert culprit in str(caught.value)
    with pytest.raises(GraftError) as caught:
        read_keys(tmp_path / "nothing")
    assert "nothing" in str(caught.value)


def test_a_large_body_is_refused_before_it_is_read(guarded: str) -> None:
    key = f"Authorization: Bearer {SECRET}"
    announced = request("/v1/completions", "{", key, "Expect: 100-continue").replace("Length: 1", "Length: 3000")
    answer = raw(guarded, announced)
    assert answer.startswith("HTTP/1.1 413")
    assert "100 Continue" not in answer
    assert "request_too_large" in answer


def test_a_large_body_of_unknown_length_is_refused_on_the_way(guarded: str) -> None:
    head = f"Transfer-Encoding: chunked\r\nAuthorization: Bearer {SECRET}\r\n{JSON}\r\n"
    start = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}"
    chunks = "".join(f"{1000:x}\r\n{'a' * 1000}\r\n" for _ in range(4)) + "0\r\n\r\n"
    assert raw(guarded, start + chunks).startswith("HTTP/1.1 413")


def test_who_has_no_key_may_not_send_much_either(guarded: str) -> None:
    answer = post(guarded, "/v1/completions", completion(prompt="a" * 100_000))
    assert answer.status_code == 401, "the answer arrives although the client was still sending"


def test_a_slow_body_is_given_up(guarded: str) -> None:
    answer = raw(guarded, request("/v1/completions", "{", f"Authorization: Bearer {SECRET}").replace(": 1", ": 9"))
    assert answer.startswith("HTTP/1.1 408")
    assert "request_timeout" in answer


def test_more_requests_than_are_taken_at_a_time(guarded: str, engine: ScriptedEngine) -> None:
    gate = threading.Event()
    engine.scripts = [Script(outputs("He"), gate) for _ in range(2)]
    client = openai.OpenAI(base_url=f"{guarded}/v1", api_key=SECRET, max_retries=0)
    count = len(engine.requests)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.completions.create, model="tiny", prompt="a") for _ in range(2)]
        assert until(lambda: len(engine.requests) == count + 2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.models.list()
        assert caught.value.response.headers["retry-after"] == "1"
        gate.set()
        assert [one.result().choices[0].text for one in waiting] == ["He", "He"]
    assert client.models.list().data, "and then there is room again"


def test_pages_of_other_sites_get_nothing(guarded: str) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    good = httpx.options(f"{guarded}/v1/completions", headers={"Origin": "https://good.example"} | ask)
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    evil = httpx.options(f"{guarded}/v1/completions", headers={"Origin": "https://evil.example"} | ask)
    assert "access-control-allow-origin" not in evil.headers


def test_by_default_no_other_site_is_good_and_the_server_is_local() -> None:
    service = web_service(ScriptedEngine())  # its own: a server that ends closes its engine
    assert (service.settings.host, service.settings.origins) == ("127.0.0.1", [])
    with running(service) as address:
        assert address.startswith("http://127.0.0.1:")
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in httpx.options(f"{address}/v1/models", headers=asked).headers
        form = httpx.post(
            f"{address}/v1/completions",
            content=json.dumps(completion()).encode(),
            headers={"Content-Type": "text/plain"},
        )
        assert form.status_code == 415, "what a page may send without asking the browser first"
        evil = raw(address, request("/v1/models", "", host="evil.example", method="GET"))
        assert evil.startswith("HTTP/1.1 421"), "a name that was bound anew to this machine"
        assert "unknown_host" in evil
        for host in ("localhost", "127.0.0.1:9999", "[::1]:80"):
            assert raw(address, request("/v1/models", "", host=host, method="GET")).startswith("HTTP/1.1 200")


def leave(address: str, body: Any, wait_for: str) -> None:
    """GenerationRequest, read until something came, and hang up."""
    with connect(address) as connection:
        connection.sendall(request("/v1/chat/completions", json.dumps(body)).encode())
        seen = ""
        while wait_for and wait_for not in seen:
            read = connection.recv(65536)
            assert read, f"the server hung up first, after {seen!r}"
            seen += read.decode()


@pytest.fixture(scope="module")
def open_address(engine: ScriptedEngine) -> Iterator[str]:
    with running(web_service(engine, settings={"send_seconds": 2.0})) as address:
        yield address


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_written_for_a_client_that_left(open_address: str, engine: ScriptedEngine, stream: bool) -> None:
    engine.scripts = [script := Script(outputs("He", "llo"), threading.Event())]
    count = len(engine.requests)
    if stream:
        leave(open_address, chat(stream=True), "llo")
    else:
        with connect(open_address) as connection:
            connection.sendall(request("/v1/chat/completions", json.dumps(chat())).encode())
            assert until(lambda: len(engine.requests) > count)
    assert script.cancelled.wait(10)
    metrics = httpx.get(f"{open_address}/metrics").text
    assert stream or until(lambda: 'status="499"' in httpx.get(f"{open_address}/metrics").text), metrics


@pytest.mark.slow
def test_a_client_that_takes_nothing_counts_as_gone(open_address: str, engine: ScriptedEngine) -> None:
    endless = [TokenOutput(5, "x" * 100_000)] * 100
    engine.scripts = [script := Script([*endless, Finish("stop", 1, 100)], threading.Event())]
    with connect(open_address) as connection:
        connection.sendall(request("/v1/chat/completions", json.dumps(chat(stream=True))).encode())
        assert script.cancelled.wait(10)


def test_no_page_tells_more_than_its_file(open_address: str) -> None:
    answer = httpx.get(f"{open_address}/..%2f..%2fapp.py")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"

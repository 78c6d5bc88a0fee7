"""The clients of the soak test: some send valid requests with known answers, the others misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import httpx

LIMIT = 50_000
"""Maximum size of a request in bytes."""

Body = dict[str, Any]
"""The body of a request or a response."""
Expected = dict[str, set[str]]
"""The correct texts of each request, by the request as JSON."""
Kind = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


@dataclass
class Tally:
    """The outcomes of all requests.

    Attributes:
        counts: number of requests by outcome: answered, failed_cleanly, vanished, wrong.
        statuses: number of refused requests by HTTP status.
        cached_tokens: prompt tokens that were taken from the prefix cache.
        wrong: descriptions of the first wrong outcomes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, outcome: str) -> None:
        """Count a request."""
        self.counts[outcome] += 1

    def add_wrong(self, description: str) -> None:
        """Count a wrong outcome."""
        self.add("wrong")
        if len(self.wrong) < 20:
            self.wrong.append(description)

    def check(self, is_right: bool, outcome: str, description: str) -> None:
        """Count a request as `outcome`, or as wrong."""
        if is_right:
            self.add(outcome)
        else:
            self.add_wrong(description)


class Clients:
    """Many concurrent clients of all kinds.

    Args:
        address: address of the server.
        expected: requests and their correct answers.
        seconds: duration of the test.
        workers: number of concurrent clients.

    Attributes:
        tally: the outcomes.
    """

    def __init__(self, address: str, expected: Expected, seconds: float, workers: int) -> None:
        self.address = address
        self.expected = expected
        self.workers = workers
        self.good: list[Body] = [json.loads(text) for text in expected]
        self.until = time.monotonic() + seconds
        self.tally = Tally()
        self.kinds: dict[Kind, int] = {  # with their relative frequency
            self.complete: 8,
            self.stream: 8,
            self.several: 2,
            self.new_grammar: 1,
            self.vanish: 4,
            self.send_nonsense: 3,
            self.send_too_much: 1,
            self.name_unknown: 2,
            self.look: 1,
        }

    async def run(self) -> None:
        """Run the clients until the end of the test."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.address, timeout=120, limits=limits) as client:
            work = [self._work(client, random.Random(seed)) for seed in range(self.workers)]
            await asyncio.gather(*work)

    async def _work(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        kinds = list(self.kinds)
        weights = list(self.kinds.values())
        while time.monotonic() < self.until:
            (kind,) = draw.choices(kinds, weights)
            try:
                await kind(client, draw)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                name = getattr(kind, "__name__", "request")
                self.tally.add_wrong(f"{name}: {type(error).__name__}: {error}")

    async def complete(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a whole text."""
        request = draw.choice(self.good)
        response = await client.post("/v1/completions", json=request)
        body = response.json()
        if self._is_refused(response.status_code, body, {429}):
            return
        self._compare(request, body["choices"][0]["text"])
        details = body["usage"].get("prompt_tokens_details") or {}
        self.tally.cached_tokens += details.get("cached_tokens", 0)

    async def new_grammar(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a text with a grammar that the server has not compiled yet; some clients disconnect meanwhile."""
        words = [f"{draw.randrange(10**6)} {number}" for number in range(3)]
        request = draw.choice(self.good) | {"structured_outputs": {"choice": words}, "max_tokens": 60}
        patience = draw.choice([0.05, 0.3, 60, 60])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                response = await client.post("/v1/completions", json=request)
                body = response.json()
                if not self._is_refused(response.status_code, body, {429}):
                    text = body["choices"][0]["text"]
                    self.tally.check(text in words, "answered", f"{words} gave {text!r}")
                return
        self.tally.add("vanished")

    async def stream(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a streamed text."""
        request = draw.choice(self.good)
        trace = draw.random() < 0.5
        streamed = request | {"stream": True, "graftlm": {"trace": trace}, "logprobs": 1}
        async with client.stream("POST", "/v1/completions", json=streamed) as response:
            if response.status_code != 200:
                self._is_refused(response.status_code, json.loads(await response.aread()), {429})
                return
            events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            self.tally.add_wrong(f"a stream ended with {events[-1][:200]}")
            return
        text = ""
        for event in events[:-1]:
            for choice in json.loads(event)["choices"]:
                text += choice["text"]
        self._compare(request, text)

    async def several(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request several choices of a greedy text."""
        request = draw.choice([request for request in self.good if "seed" not in request])
        response = await client.post("/v1/completions", json=request | {"n": 3})
        body = response.json()
        if self._is_refused(response.status_code, body, {429}):
            return
        texts = {choice["text"] for choice in body["choices"]}
        if len(texts) == 1:
            self._compare(request, texts.pop())
        else:
            self.tally.add_wrong(f"{request} gave different texts {texts}")

    async def vanish(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request, and disconnect at once or after a moment."""
        request = draw.choice(self.good) | {"stream": draw.random() < 0.5, "max_tokens": 64}
        patience = draw.choice([0.001, 0.02, 0.1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await client.post("/v1/completions", json=request)
        self.tally.add("vanished")

    async def send_nonsense(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send an invalid request."""
        content = draw.choice(_nonsense(draw.choice(self.good), draw))
        path = draw.choice(["completions", "chat/completions"])
        content_type = draw.choice(["application/json", "text/plain"])
        response = await client.post(f"/v1/{path}", content=content, headers={"Content-Type": content_type})
        if not self._is_refused(response.status_code, response.json(), {400, 415, 429}):
            self.tally.add_wrong(f"an invalid body had the status {response.status_code}: {content[:100]!r}")

    async def send_too_much(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a body above the limit."""
        response = await client.post("/v1/completions", json={"model": "base", "prompt": "a" * 2 * LIMIT})
        if not self._is_refused(response.status_code, response.json(), {413}):
            self.tally.add_wrong(f"a large body had the status {response.status_code}")

    async def name_unknown(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Name an unknown graft."""
        name = draw.choice(["dansk", "danish+dansk", "../danish", "/etc/passwd", "base ", "\u0000"])
        response = await client.post("/v1/completions", json={"model": name, "prompt": "a"})
        if not self._is_refused(response.status_code, response.json(), {404}):
            self.tally.add_wrong(f"the model {name!r} had the status {response.status_code}")

    async def look(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a route of operators, or one that does not exist."""
        path = draw.choice(["/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"])
        response = await client.get(path)
        is_right = response.status_code in (200, 404)
        self.tally.check(is_right, "answered", f"{path} had the status {response.status_code}")

    def _is_refused(self, status: int, body: Body, allowed: Collection[int]) -> bool:
        """Return whether a request was refused, and count it if so."""
        if status == 200:
            return False
        self.tally.statuses[status] += 1
        is_clean = status in allowed and bool(body["error"]["message"])
        self.tally.check(is_clean, "failed_cleanly", f"status {status}: {json.dumps(body)[:200]}")
        return True

    def _compare(self, request: Body, text: str) -> None:
        right = self.expected[json.dumps(request)]
        self.tally.check(text in right, "answered", f"{request} gave {text!r}, alone {sorted(right)}")


def _nonsense(good: Body, draw: random.Random) -> list[bytes]:
    """Return invalid bodies."""
    truncated = json.dumps(good)[: draw.randrange(1, 40)]
    return [
        b"",
        b"{",
        b"[" * 5000,
        os.urandom(200),
        truncated.encode(),
        json.dumps(good | {"temperature": "hot"}).encode(),
        json.dumps(good | {"tools": [{}]}).encode(),
        json.dumps(good | {"prompt": [10**6]}).encode(),
        json.dumps(good | {"max_tokens": 10**9}).encode(),
        json.dumps({"model": "danish+french", "prompt": 3}).encode(),
    ]

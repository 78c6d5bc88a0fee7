"""The clients of the soak test: some send valid requests and know the right answers, the others misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

LIMIT = 50_000
"""Maximum size of a request in bytes."""

Expected = dict[str, set[str]]
"""The right texts of each request, by the request as JSON."""


@dataclass
class Tally:
    """The outcomes of all requests.

    Attributes:
        counts: requests by what became of them.
        statuses: of those that were refused.
        cached_tokens: tokens of prompts that the prefix cache spared.
        wrong: the first few that went wrong, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, outcome: str, what: str = "") -> None:
        self.counts[outcome] += 1
        if outcome == "wrong" and len(self.wrong) < 20:
            self.wrong.append(what)


class Clients:
    """Many concurrent clients of all kinds.

    Args:
        address: of the server.
        expected: requests and their right answers.
        seconds: how long.
        workers: how many at a time.
    """

    def __init__(self, address: str, expected: Expected, seconds: float, workers: int) -> None:
        self.address, self.expected, self.workers = address, expected, workers
        self.good = [json.loads(text) for text in expected]
        self.until = time.monotonic() + seconds
        self.tally = Tally()
        self.kinds: list[tuple[Callable[..., Awaitable[None]], int]] = [
            (self.ask, 8),
            (self.stream, 8),
            (self.several, 2),
            (self.new_form, 1),
            (self.vanish, 4),
            (self.nonsense, 3),
            (self.too_much, 1),
            (self.unknown, 2),
            (self.look, 1),
        ]

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.address, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._work(client, random.Random(seed)) for seed in range(self.workers)))

    async def _work(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        kinds, weights = zip(*self.kinds, strict=True)
        while time.monotonic() < self.until:
            (kind,) = draw.choices(kinds, weights)
            try:
                await kind(client, draw)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.tally.add("wrong", f"{kind.__name__}: {type(error).__name__}: {error}")

    async def ask(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a whole text."""
        request = draw.choice(self.good)
        answer = await client.post("/v1/completions", json=request)
        if not self._refused(answer.status_code, answer.json(), {429}):
            self._compare(request, answer.json()["choices"][0]["text"])
            self.tally.cached_tokens += (answer.json()["usage"].get("prompt_tokens_details") or {}).get(
                "cached_tokens", 0
            )

    async def new_form(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a text of a form that the server has not compiled yet; some disconnect meanwhile."""
        words = [f"{draw.randrange(10**6)} {number}" for number in range(3)]
        request = draw.choice(self.good) | {"structured_outputs": {"choice": words}, "max_tokens": 60}
        patience = draw.choice([0.05, 0.3, 60, 60])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                answer = await client.post("/v1/completions", json=request)
                if not self._refused(answer.status_code, answer.json(), {429}):
                    text = answer.json()["choices"][0]["text"]
                    self.tally.add("answered" if text in words else "wrong", f"{words} gave {text!r}")
                return
        self.tally.add("vanished")

    async def stream(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request a streamed text."""
        request = draw.choice(self.good)
        more = {"stream": True, "graftlm": {"trace": draw.random() < 0.5}, "logprobs": 1}
        async with client.stream("POST", "/v1/completions", json=request | more) as answer:
            if answer.status_code != 200:
                self._refused(answer.status_code, json.loads(await answer.aread()), {429})
                return
            events = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            self.tally.add("wrong", f"a stream ended with {events[-1][:200]}")
            return
        chunks = [json.loads(event) for event in events[:-1]]
        self._compare(request, "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))

    async def several(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request several choices of one text."""
        request = draw.choice([request for request in self.good if "seed" not in request])
        answer = await client.post("/v1/completions", json=request | {"n": 3})
        if not self._refused(answer.status_code, answer.json(), {429}):
            texts = {choice["text"] for choice in answer.json()["choices"]}
            self._compare(request, texts.pop() if len(texts) == 1 else f"different texts {texts}")

    async def vanish(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request, wait a little or not at all, and disconnect."""
        request = draw.choice(self.good) | {"stream": draw.random() < 0.5, "max_tokens": 64}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.choice([0.001, 0.02, 0.1])):
                await client.post("/v1/completions", json=request)
        self.tally.add("vanished")

    async def nonsense(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send an invalid request."""
        good = draw.choice(self.good)
        body = draw.choice(
            [
                b"",
                b"{",
                b"[" * 5000,
                os.urandom(200),
                json.dumps(good)[: draw.randrange(1, 40)].encode(),
                json.dumps(good | {"temperature": "hot"}).encode(),
                json.dumps(good | {"tools": [{}]}).encode(),
                json.dumps(good | {"prompt": [10**6]}).encode(),
                json.dumps(good | {"max_tokens": 10**9}).encode(),
                json.dumps({"model": "danish+french", "prompt": 3}).encode(),
            ]
        )
        path, kind = draw.choice(["completions", "chat/completions"]), draw.choice(["application/json", "text/plain"])
        answer = await client.post(f"/v1/{path}", content=body, headers={"Content-Type": kind})
        if not self._refused(answer.status_code, answer.json(), {400, 415, 429}):
            self.tally.add("wrong", f"nonsense got {answer.status_code}: {body[:100]!r}")

    async def too_much(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a body over the limit."""
        answer = await client.post("/v1/completions", json={"model": "base", "prompt": "a" * 2 * LIMIT})
        if not self._refused(answer.status_code, answer.json(), {413}):
            self.tally.add("wrong", f"a large body got {answer.status_code}")

    async def unknown(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Name an unknown graft."""
        name = draw.choice(["dansk", "danish+dansk", "../danish", "/etc/passwd", "base ", "\u0000"])
        answer = await client.post("/v1/completions", json={"model": name, "prompt": "a"})
        if not self._refused(answer.status_code, answer.json(), {404}):
            self.tally.add("wrong", f"the model {name!r} got {answer.status_code}")

    async def look(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Request the routes of operators."""
        answer = await client.get(draw.choice(["/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"]))
        self.tally.add("answered" if answer.status_code in (200, 404) else "wrong", f"looking got {answer.status_code}")

    def _refused(self, status: int, body: Any, allowed: set[int]) -> bool:
        """Count a request by whether it was refused as expected."""
        if status == 200:
            return False
        self.tally.statuses[status] += 1
        clean = status in allowed and bool(body["error"]["message"])
        self.tally.add("failed_cleanly" if clean else "wrong", f"status {status}: {json.dumps(body)[:200]}")
        return True

    def _compare(self, request: dict[str, Any], text: str) -> None:
        right = self.expected[json.dumps(request)]
        self.tally.add("answered" if text in right else "wrong", f"{request} gave {text!r}, alone {sorted(right)}")

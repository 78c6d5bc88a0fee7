"""Clients of a server, in a process of their own: `python benchmarks/serving_clients.py`, a `Load` as JSON on stdin.

Each client sends the next request of a list as soon as its last one is answered. On stdout comes, as JSON, when each
request was sent, when its first text came and when it was over, in seconds of one clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, TypedDict

import httpx


class Load(TypedDict):
    """What is asked: `prompts` in turn, of `models` in turn, by so many clients, `max_tokens` each."""

    url: str
    models: list[str]
    prompts: list[str]
    clients: int
    max_tokens: int


async def answered(client: httpx.AsyncClient, load: Load, number: int) -> list[float]:
    """When one request was sent, when its first text came and when it was over."""
    body: dict[str, Any] = {
        "model": load["models"][number % len(load["models"])],
        "prompt": load["prompts"][number],
        "max_tokens": load["max_tokens"],
        "temperature": 0,
        "stream": True,
    }
    sent, first = time.monotonic(), 0.0
    async with client.stream("POST", f"{load['url']}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if not first and chunk["choices"] and chunk["choices"][0]["text"]:
                first = time.monotonic()
    return [sent, first, time.monotonic()]


async def run(load: Load) -> list[list[float]]:
    """All requests."""
    found: list[list[float]] = []
    numbers = iter(range(len(load["prompts"])))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            times = await answered(client, load, number)
            found.append(times)

    limits = httpx.Limits(max_connections=load["clients"], max_keepalive_connections=load["clients"])
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(load["clients"])))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))

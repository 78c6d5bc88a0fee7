"""Clients of a server in their own process: `python benchmarks/serving_clients.py` reads a `Load` as JSON from stdin.

Each client sends the next request of a list as soon as its last one has finished. The output is JSON: for each request
the times of its start, of its first text and of its end, in seconds of one clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, NotRequired, TypedDict

import httpx


class Load(TypedDict):
    """The requests: the prompts in order, to the models in turn, from so many clients; `extra` are further keys."""

    url: str
    models: list[str]
    prompts: list[str] | list[list[int]]
    clients: int
    max_tokens: int
    extra: NotRequired[dict[str, Any]]


async def timed_request(client: httpx.AsyncClient, load: Load, number: int) -> list[float]:
    """The times of a request's start, first text and end."""
    body: dict[str, Any] = {
        "model": load["models"][number % len(load["models"])],
        "prompt": load["prompts"][number],
        "max_tokens": load["max_tokens"],
        "temperature": 0,
        "stream": True,
        **load.get("extra", {}),
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
    end = time.monotonic()
    return [sent, first or end, end]


async def run(load: Load) -> list[list[float]]:
    """The times of all requests."""
    all_times: list[list[float]] = []
    numbers = iter(range(len(load["prompts"])))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            times = await timed_request(client, load, number)
            all_times.append(times)

    limits = httpx.Limits(max_connections=load["clients"], max_keepalive_connections=load["clients"])
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(load["clients"])))
    return all_times


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))

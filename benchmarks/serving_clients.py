"""Clients of a server in another process: `python benchmarks/serving_clients.py` reads a `Load` as JSON from stdin.

Each client sends the next request of a list as soon as its last one has finished. The output is JSON: the times of the
start, the first text and the end of each request, in seconds of the same clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, NotRequired, TypedDict

import httpx


class Load(TypedDict):
    """The requests of some clients.

    Attributes:
        url: address of the server.
        models: names of models, which the requests use in turn.
        prompts: one prompt for each request.
        clients: number of clients.
        max_tokens: number of new tokens of each request.
        extra: further keys of the requests.
    """

    url: str
    models: list[str]
    prompts: list[str] | list[list[int]]
    clients: int
    max_tokens: int
    extra: NotRequired[dict[str, object]]


async def timed_request(client: httpx.AsyncClient, load: Load, number: int) -> list[float]:
    """Return the times of a request's start, first text and end."""
    body = {
        "model": load["models"][number % len(load["models"])],
        "prompt": load["prompts"][number],
        "max_tokens": load["max_tokens"],
        "temperature": 0,
        "stream": True,
        **load.get("extra", {}),
    }
    sent = time.monotonic()
    first: float | None = None
    async with client.stream("POST", f"{load['url']}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if first is None and _has_text(chunk):
                first = time.monotonic()
    end = time.monotonic()
    return [sent, end if first is None else first, end]


def _has_text(chunk: dict[str, Any]) -> bool:
    choices = chunk["choices"]
    return bool(choices and choices[0]["text"])


async def run(load: Load) -> list[list[float]]:
    """Send all requests, and return their times."""
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
    all_times = asyncio.run(run(json.load(sys.stdin)))
    print(json.dumps(all_times))

"""Throughput of the server: concurrent clients, grafts in one batch, and `transformers serve`.

    python benchmarks/serving.py --out DIR [--quick]

SmolLM2-135M-Instruct streams its answers to clients in another process of this machine. The compared turns run in
rounds of alternating order, those of a ratio one after the other (but those of `transformers serve`), so that other
load of the machine affects both sides. A row's `ratio` is the median over rounds; its interval has the smallest and
the largest value.
"""

from __future__ import annotations

import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from serial_engine import SerialEngine
from serving_clients import Load
from turns import AT_LEAST, AT_MOST, command, interval, made_aim

from graftlm.backbone import Backbone, left_padded, load_backbone
from graftlm.evaluation import Results, Row
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.protocol import Engine, EngineLimits
from graftlm.serving.server import GraftServer
from graftlm.serving.service import Service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.testing.tiny import tiny_model, tiny_tokenizer

NAME, SEED = "bench-serving", 0
ROWS: dict[str, tuple[str, tuple[str, float] | None]] = {  # row id -> label, aim
    "clients_1": ("1 client, over one request at a time", None),
    "clients_4": ("4 clients, over one request at a time", None),
    "clients_16": ("16 clients, over one request at a time", (AT_LEAST, 3.0)),
    "clients_64": ("64 clients, over one request at a time", None),
    "mixed_grafts_4": ("4 grafts in one batch, over one graft for all", (AT_LEAST, 0.85)),
    "transformers_static_8": ("transformers' batch of 8; ratio: ours with 8 clients over it", (AT_LEAST, 1.0)),
    "transformers_static_16": ("transformers' batch of 16; ratio: ours with 16 clients over it", (AT_LEAST, 1.0)),
    "transformers_serve_16": ("transformers serve with 16 clients; ratio: ours over it", None),
    "prefix_1000": (
        "Time to the first token of a prompt whose 1,000 tokens are known, over unknown",
        (AT_MOST, 0.15),
    ),
    "json": ("8 clients' answers held to JSON, over free ones", (AT_LEAST, 0.9)),
}
SERIAL, ONE_GRAFT, THEIRS = "one_at_a_time_16", "one_graft_16", "transformers_serve_16"
GRAFTS = tuple("abcd")
_SECONDS = 900  # time limit of all rounds; a round that would exceed it is left out


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement.

    Attributes:
        model: of SmolLM2-135M-Instruct's package in bfloat16, or a family of `graftlm.testing` with random weights.
        prompt: shortest and longest prompt, in tokens.
        new: new tokens of each answer.
        prefix: tokens that two prompts have in common.
        requests: requests of each client, by the number of clients.
        rounds: number of rounds.
    """

    model: str
    prompt: tuple[int, int]
    new: int
    prefix: int
    requests: dict[int, int]
    rounds: int


FULL = Size("smollm2-135m-instruct", (8, 64), 32, 1000, {1: 3, 4: 2, 8: 2, 16: 2, 64: 1}, rounds=3)
QUICK = Size("llama", (2, 6), 3, 140, {1: 1, 4: 1, 8: 1, 16: 1, 64: 1}, rounds=1)


def save_backbone(size: Size, folder: Path) -> None:
    """Save the backbone without an end-of-text token, so that all answers have the same length."""
    if size.model == FULL.model:
        backbone = load_backbone(size.model, dtype="bfloat16")
        model, tokenizer = backbone.model, backbone.need_tokenizer()
    else:
        model, tokenizer = tiny_model(size.model, max_position_embeddings=2048), tiny_tokenizer()
    model.config.eos_token_id = tokenizer.eos_token = None
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_grafts(backbone: Backbone) -> dict[str, Graft]:
    """Gated adapters of a tenth of the backbone's weights, random, half of the gates open; in its dtype, as served."""
    torch.manual_seed(SEED)
    config = graft_config({"kind": "neutral-residues", "capacity": 0.1})
    made = {name: build_graft(config, backbone).eval() for name in GRAFTS}
    with torch.no_grad():
        for graft in made.values():
            for parameter in graft.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.02)
            graft.to(backbone.model.dtype)
    return made


def load_of(size: Size, url: str, clients: int, names: tuple[str, ...]) -> Load:
    """The requests of so many clients: random tokens, which no two prompts share."""
    chance = random.Random(SEED + clients)
    lengths = [chance.randint(*size.prompt) for _ in range(clients * size.requests[clients])]
    prompts: list[Any] = [random_ids(chance, length) for length in lengths]
    return {"url": url, "models": list(names), "prompts": prompts, "clients": clients, "max_tokens": size.new}


def random_ids(chance: random.Random, count: int) -> list[int]:
    """Ids of tokens that every model has and that are not special."""
    return [chance.randrange(100, 300) for _ in range(count)]


def timed(load: Load) -> list[list[float]]:
    """The times of all requests' start, first text and end."""
    clients = [sys.executable, str(Path(__file__).with_name("serving_clients.py"))]
    done = subprocess.run(clients, input=json.dumps(load), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return sorted(json.loads(done.stdout))


def run_load(load: Load) -> dict[str, float]:
    """Run the clients: tokens_per_s, and the seconds to the first text, ttft_p50 and ttft_p99."""
    times = timed(load)
    waits = sorted(first - sent for sent, first, _ in times)
    seconds = max(over for *_, over in times) - min(sent for sent, *_ in times)
    return {
        "tokens_per_s": len(times) * load["max_tokens"] / seconds,
        "ttft_p50": statistics.median(waits),
        "ttft_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    }


@contextmanager
def served(backbone: Backbone, make: Callable[[], Engine]) -> Iterator[str]:
    """The address of our server with an engine."""
    engine = make()
    settings = ServerSettings(port=0, grace=0.0)
    service = Service(backbone, engine, GraftStore({"backbone": backbone}), "backbone", settings=settings)
    # The model has no end token, without which no grammar can be compiled; the measured ones do not reach their end.
    service.grammars = GrammarCompiler(service.tokenizer.tokenizer, service.tokenizer.vocabulary, [0])
    ready: queue.Queue[str] = queue.Queue()
    server = GraftServer(service, ready.put)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield ready.get(timeout=60)
    finally:
        server.should_exit = True
        thread.join(30)
        engine.close(0)


@contextmanager
def transformers_server(folder: Path, name: str) -> Iterator[str]:
    """The address of `transformers serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    options = ["--device", "cpu", "--dtype", "auto", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with (folder / "transformers-serve.log").open("w") as log:
        server = subprocess.Popen([program, "serve", name, *options], stdout=log, stderr=log, env=environment)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            httpx.get(url, timeout=5)
            return
        except httpx.HTTPError:
            if server.poll() is not None:
                raise RuntimeError("transformers serve ended before it answered") from None
            time.sleep(0.2)
    raise RuntimeError("transformers serve did not answer in time")


Measured = dict[str, list[dict[str, float]]]


def measure(size: Size, folder: Path) -> Measured:
    """The measurements of each turn, one for each round."""
    save_backbone(size, folder)
    backbone = load_backbone(str(folder))
    model: Any = backbone.model
    grafts, limits = make_grafts(backbone), EngineLimits(queue=64)

    def batching() -> Engine:
        return BatchingEngine(backbone, grafts, "backbone", limits)

    def serial() -> Engine:
        return SerialEngine(backbone, grafts, "backbone", limits)

    def ours(clients: int, engine: Callable[[], Engine], names: tuple[str, ...] = ("backbone",)) -> dict[str, float]:
        with served(backbone, engine) as url:
            run_load(load_of(size, url, 1, names) | {"prompts": [[150, 151]] * len(names)})  # type: ignore[arg-type]  # warm
            return run_load(load_of(size, url, clients, names))

    def static(rows: int) -> dict[str, float]:
        prompts: Any = load_of(size, "", rows, ())["prompts"]
        start = time.perf_counter()
        for first in range(0, len(prompts), rows):
            inputs = left_padded(prompts[first : first + rows], 0, "cpu")
            model.generate(**inputs, max_new_tokens=size.new, do_sample=False)
        return {"tokens_per_s": len(prompts) * size.new / (time.perf_counter() - start)}

    def prefix() -> dict[str, float]:
        chance = random.Random(SEED)
        common = random_ids(chance, size.prefix)
        prompts: Any = [[*common, *random_ids(chance, 20)] for _ in range(2)]
        with served(backbone, batching) as url:
            load: Load = {"url": url, "models": ["backbone"], "prompts": prompts, "clients": 1, "max_tokens": 1}
            timed(load | {"prompts": [[150, 151]]})  # type: ignore[arg-type]  # warm
            first, second = (first - sent for sent, first, _ in timed(load))
        return {"first_s": first, "second_s": second}

    def constrained() -> dict[str, float]:
        numbers = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 99}
        with served(backbone, batching) as url:
            load = load_of(size, url, 8, ("backbone",))
            run_load(load | {"prompts": [[150, 151]], "extra": {"structured_outputs": {"json": numbers}}})  # type: ignore[arg-type]
            return run_load(load | {"extra": {"structured_outputs": {"json": numbers}}})  # type: ignore[arg-type]

    turns: dict[str, Callable[[], dict[str, float]]] = {  # those of a ratio follow each other, as machines change
        **{f"clients_{n}": lambda n=n: ours(n, batching) for n in (1, 4, 64)},
        SERIAL: lambda: ours(16, serial),
        "clients_16": lambda: ours(16, batching),
        "transformers_static_16": lambda: static(16),
        "mixed_grafts_4": lambda: ours(16, batching, GRAFTS),
        ONE_GRAFT: lambda: ours(16, batching, GRAFTS[:1]),
        "transformers_static_8": lambda: static(8),
        "clients_8": lambda: ours(8, batching),
        "json": constrained,
        "prefix_1000": prefix,
    }

    def theirs(url: str, clients: int) -> dict[str, float]:
        load = load_of(size, url, clients, (str(folder),))
        tokenizer: Any = backbone.need_tokenizer()
        texts = [tokenizer.decode(ids) for ids in load["prompts"]]  # it takes no ids
        return run_load(load | {"prompts": texts})  # type: ignore[arg-type]

    with transformers_server(folder, str(folder)) as url:
        turns[THEIRS] = lambda: theirs(url, 16)
        theirs(url, 1)  # warm
        return _rounds(turns, size.rounds)


def _rounds(turns: dict[str, Callable[[], dict[str, float]]], count: int) -> Measured:
    """Run as many rounds as the time limit allows, at most `count`."""
    measured: Measured = {name: [] for name in turns}
    start = time.monotonic()
    for index in range(count):
        if index and index * (_SECONDS + start - time.monotonic()) < time.monotonic() - start:
            break
        for name in list(turns)[:: -1 if index % 2 else 1]:
            measured[name].append(turns[name]())
            print(f"round {index + 1}, {name}: {measured[name][-1]}", flush=True)
    return measured


def benchmark(quick: bool) -> Results:
    """All rows."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(size, Path(folder))
    rows = [_row(name, measured) for name in ROWS]
    aims = [
        made_aim(label, "ratio", aim, None if quick else _middle(row))
        for row, (label, aim) in zip(rows, ROWS.values(), strict=True)
        if aim is not None
    ]
    others: dict[str, Any] = {name: measured[name] for name in (SERIAL, ONE_GRAFT, "clients_8")}
    sizes = vars(size) | {"prompt": list(size.prompt), "requests": {str(n): m for n, m in size.requests.items()}}
    details = {"size": sizes, "beside": others}
    details |= {"threads": torch.get_num_threads(), "batch_size": EngineLimits().batch_size}
    return Results.here(NAME, rows, seeds=[SEED], aims=aims, details=details)


def _row(name: str, measured: Measured) -> Row:
    own = measured[name]
    pairs = {"mixed_grafts_4": (name, ONE_GRAFT), THEIRS: ("clients_16", THEIRS), "json": (name, "clients_8")}
    pairs |= {f"transformers_static_{n}": (f"clients_{n}", name) for n in (8, 16)}
    over, under = pairs.get(name, (name, SERIAL))
    if name == "prefix_1000":
        ratios = [turn["second_s"] / turn["first_s"] for turn in own]
    else:
        both = zip(measured[over], measured[under], strict=True)
        ratios = [upper["tokens_per_s"] / lower["tokens_per_s"] for upper, lower in both]
    metrics: dict[str, Any] = {metric: interval([turn[metric] for turn in own]) for metric in own[0]}
    return Row(id=name, label=ROWS[name][0], metrics={"ratio": interval(ratios)} | metrics)


def _middle(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # an interval, made above


if __name__ == "__main__":
    command(
        NAME,
        (__doc__ or "").splitlines()[0],
        lambda quick, device, clock: benchmark(quick),
        {name: aim and aim[1] for name, (_, aim) in ROWS.items()},
        options=(),
    )

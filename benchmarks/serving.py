"""Throughput of the server: concurrent clients, grafts in one batch, and `transformers serve`.

    python benchmarks/serving.py --out DIR [--quick]

A random Llama streams its answers to clients in another process of this machine. The compared turns run one after
another in rounds of alternating order, so that other load of the machine affects both sides of a ratio. A row's `ratio`
is the median over rounds; its interval has the smallest and the largest value.
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from turns import AT_LEAST, command, interval, made_aim

from graftlm.backbone import Backbone, load_backbone
from graftlm.evaluation import Results, Row
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.protocol import Engine, EngineLimits
from graftlm.serving.server import GraftServer
from graftlm.serving.service import Service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore

NAME, SEED = "bench-serving", 0
ROWS = {  # row id -> label, aim
    "clients_1": ("1 client, over one request at a time", None),
    "clients_4": ("4 clients, over one request at a time", None),
    "clients_16": ("16 clients, over one request at a time", 3.0),
    "clients_64": ("64 clients, over one request at a time", None),
    "mixed_grafts_4": ("4 grafts in one batch, over one graft for all", 0.8),
    "transformers_serve_16": ("transformers serve with 16 clients; ratio: ours over it", None),
}
SERIAL, ONE_GRAFT, THEIRS = "one_at_a_time_16", "one_graft_16", "transformers_serve_16"
GRAFTS = tuple("abcd")
_SECONDS = 900  # time limit of all rounds; a round that would exceed it is left out


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement.

    Attributes:
        model: values of the backbone's config.
        words: size of the vocabulary.
        prompt: shortest and longest prompt, in tokens.
        new: new tokens of each answer.
        requests: requests of each client, by the number of clients.
        rounds: number of rounds.
    """

    model: dict[str, int]
    words: int
    prompt: tuple[int, int]
    new: int
    requests: dict[int, int]
    rounds: int


FULL = Size(
    {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    words=32_000,
    prompt=(8, 64),
    new=32,
    requests={1: 3, 4: 2, 16: 2, 64: 1},
    rounds=3,
)
QUICK = Size(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    words=100,
    prompt=(2, 6),
    new=3,
    requests={1: 1, 4: 1, 16: 1, 64: 1},
    rounds=1,
)


def save_backbone(size: Size, folder: Path) -> None:
    """Save a random Llama and a tokenizer of made-up words, both without an end-of-text token."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **size.model,
        vocab_size=size.words,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    first = "w0"
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size.words)}, unk_token=first))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=first, pad_token=first, model_max_length=2048)
    fast.save_pretrained(folder)


def make_grafts(backbone: Backbone) -> dict[str, Graft]:
    """Gated adapters of a tenth of the backbone's weights together, random, about half of the gates open."""
    torch.manual_seed(SEED)
    config = graft_config({"kind": "neutral-residues", "capacity": 0.1})
    made = {name: build_graft(config, backbone).eval() for name in GRAFTS}
    with torch.no_grad():
        for graft in made.values():
            for parameter in graft.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.02)
    return made


def load_of(size: Size, url: str, clients: int, names: tuple[str, ...]) -> Load:
    """The requests of so many clients."""
    chance = random.Random(SEED + clients)
    count = clients * size.requests[clients]
    lengths = [chance.randint(*size.prompt) for _ in range(count)]
    prompts = [" ".join(f"w{chance.randrange(1, size.words)}" for _ in range(length)) for length in lengths]
    return {"url": url, "models": list(names), "prompts": prompts, "clients": clients, "max_tokens": size.new}


def run_load(load: Load) -> dict[str, float]:
    """Run the clients: tokens_per_s, and the seconds to the first text, ttft_p50 and ttft_p99."""
    clients = [sys.executable, str(Path(__file__).with_name("serving_clients.py"))]
    done = subprocess.run(clients, input=json.dumps(load), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    times: list[list[float]] = json.loads(done.stdout)
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
    service = Service(backbone, engine, GraftStore(backbone), "backbone", settings=settings)
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
    options = ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
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
    grafts, limits = make_grafts(backbone), EngineLimits(queue=64)

    def batching() -> Engine:
        return BatchingEngine(backbone, grafts, "backbone", limits)

    def serial() -> Engine:
        return SerialEngine(backbone, grafts, "backbone", limits)

    def ours(clients: int, engine: Callable[[], Engine], names: tuple[str, ...] = ("backbone",)) -> dict[str, float]:
        with served(backbone, engine) as url:
            run_load(load_of(size, url, 1, names) | {"prompts": ["w1 w2"] * len(names)})  # type: ignore[arg-type]  # warm
            return run_load(load_of(size, url, clients, names))

    turns: dict[str, Callable[[], dict[str, float]]] = {
        SERIAL: lambda: ours(16, serial),
        **{f"clients_{n}": lambda n=n: ours(n, batching) for n in (1, 4, 16, 64)},
        ONE_GRAFT: lambda: ours(16, batching, GRAFTS[:1]),
        "mixed_grafts_4": lambda: ours(16, batching, GRAFTS),
    }
    with transformers_server(folder, str(folder)) as url:
        turns[THEIRS] = lambda: run_load(load_of(size, url, 16, (str(folder),)))
        run_load(load_of(size, url, 1, (str(folder),)))
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
        made_aim(label, "ratio", (AT_LEAST, aim), None if quick else _middle(row))
        for row, (label, aim) in zip(rows, ROWS.values(), strict=True)
        if aim is not None
    ]
    others: dict[str, Any] = {name: measured[name] for name in (SERIAL, ONE_GRAFT)}
    sizes = vars(size) | {"prompt": list(size.prompt), "requests": {str(n): m for n, m in size.requests.items()}}
    details = {"size": sizes, "beside": others}
    details |= {"threads": torch.get_num_threads(), "batch_size": EngineLimits().batch_size}
    return Results.here(NAME, rows, seeds=[SEED], aims=aims, details=details)


def _row(name: str, measured: Measured) -> Row:
    own = measured[name]
    pairs = {"mixed_grafts_4": (name, ONE_GRAFT), THEIRS: ("clients_16", THEIRS)}
    over, under = pairs.get(name, (name, SERIAL))
    ratios = [
        upper["tokens_per_s"] / lower["tokens_per_s"]
        for upper, lower in zip(measured[over], measured[under], strict=True)
    ]
    metrics: dict[str, Any] = {metric: interval([turn[metric] for turn in own]) for metric in own[0]}
    return Row(id=name, label=ROWS[name][0], metrics={"ratio": interval(ratios)} | metrics)


def _middle(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # an interval, made above


if __name__ == "__main__":
    command(
        NAME,
        (__doc__ or "").splitlines()[0],
        lambda quick, device, clock: benchmark(quick),
        {name: aim for name, (_, aim) in ROWS.items()},
        options=(),
    )

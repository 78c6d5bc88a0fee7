"""Throughput of the server: concurrent clients, grafts in one batch, and `transformers serve`.

    python benchmarks/serving.py --out DIR [--quick]

SmolLM2-135M-Instruct streams its answers to clients in another process of this machine. The compared turns run in
rounds of alternating order, with the turns of a ratio next to each other (except those of `transformers serve`), so
that other load of the machine affects both sides. A row's `ratio` is the median over rounds; its interval has the
smallest and the largest value.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from serial_engine import SerialEngine
from serving_clients import Load
from turns import AT_LEAST, AT_MOST, command, in_order, interval, made_aim

from graftlm.backbone import Backbone, left_padded, load_backbone
from graftlm.evaluation import Interval, Results, Row
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.protocol import EngineLimits
from graftlm.serving.server import GraftServer
from graftlm.serving.service import Service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.testing.tiny import tiny_model, tiny_tokenizer

NAME = "bench-serving"
SEED = 0


class Goal(NamedTuple):
    """A row of the results: its label, and its aim if there is one."""

    label: str
    aim: tuple[str, float] | None = None


ROWS = {
    "clients_1": Goal("1 client, over one request at a time"),
    "clients_4": Goal("4 clients, over one request at a time"),
    "clients_16": Goal("16 clients, over one request at a time", (AT_LEAST, 3.0)),
    "clients_64": Goal("64 clients, over one request at a time"),
    "mixed_grafts_4": Goal("4 grafts in one batch, over one graft for all", (AT_LEAST, 0.85)),
    "transformers_static_8": Goal("transformers' batch of 8; ratio: ours with 8 clients over it", (AT_LEAST, 1.0)),
    "transformers_static_16": Goal("transformers' batch of 16; ratio: ours with 16 clients over it", (AT_LEAST, 1.0)),
    "transformers_serve_16": Goal("transformers serve with 16 clients; ratio: ours over it"),
    "prefix_1000": Goal(
        "Time to the first token of a prompt whose 1,000 tokens are known, over unknown", (AT_MOST, 0.15)
    ),
    "json": Goal("8 clients' answers held to JSON, over free ones", (AT_LEAST, 0.9)),
}
SERIAL = "one_at_a_time_16"
ONE_GRAFT = "one_graft_16"
TRANSFORMERS_SERVE = "transformers_serve_16"
RATIOS = {  # the turns whose throughputs are divided; by default the row's own turn over SERIAL
    "mixed_grafts_4": ("mixed_grafts_4", ONE_GRAFT),
    "transformers_static_8": ("clients_8", "transformers_static_8"),
    "transformers_static_16": ("clients_16", "transformers_static_16"),
    TRANSFORMERS_SERVE: ("clients_16", TRANSFORMERS_SERVE),
    "json": ("json", "clients_8"),
}
GRAFTS = tuple("abcd")
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 99}
_SECONDS = 900  # time limit of all rounds; a round that would exceed it is left out
_WARM_UP_PROMPT = [150, 151]

Figures = dict[str, float]
Turn = Callable[[], Figures]
Measured = dict[str, list[Figures]]
"""The figures of each turn by name, one for each round."""


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement.

    Attributes:
        model: name of a model in bfloat16, or a family of `graftlm.testing` with random weights.
        prompt: minimum and maximum number of tokens of a prompt.
        new: number of new tokens of each answer.
        prefix: number of common tokens of two prompts.
        requests: number of requests of each client, by the number of clients.
        rounds: number of rounds.
    """

    model: str
    prompt: tuple[int, int]
    new: int
    prefix: int
    requests: dict[int, int]
    rounds: int


FULL = Size(
    model="smollm2-135m-instruct",
    prompt=(8, 64),
    new=32,
    prefix=1000,
    requests={1: 3, 4: 2, 8: 2, 16: 2, 64: 1},
    rounds=3,
)
QUICK = Size(
    model="llama",
    prompt=(2, 6),
    new=3,
    prefix=140,
    requests={1: 1, 4: 1, 8: 1, 16: 1, 64: 1},
    rounds=1,
)


def save_backbone(size: Size, folder: Path) -> None:
    """Save the backbone without an end-of-text token, so that all answers have the same length."""
    if size.model == FULL.model:
        backbone = load_backbone(size.model, dtype="bfloat16")
        model = backbone.model
        tokenizer = backbone.need_tokenizer()
    else:
        model = tiny_model(size.model, max_position_embeddings=2048)
        tokenizer = tiny_tokenizer()
    model.config.eos_token_id = None
    tokenizer.eos_token = None
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_grafts(backbone: Backbone) -> dict[str, Graft]:
    """Return random gated adapters of a tenth of the backbone's weights in its dtype, half of whose gates are open."""
    torch.manual_seed(SEED)
    config = graft_config({"kind": "neutral-residues", "capacity": 0.1})
    grafts = {name: build_graft(config, backbone).eval() for name in GRAFTS}
    with torch.no_grad():
        for graft in grafts.values():
            for parameter in graft.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.02)
            graft.to(backbone.model.dtype)
    return grafts


def random_ids(chance: random.Random, count: int) -> list[int]:
    """Return ids of ordinary tokens, which every model has."""
    return [chance.randrange(100, 300) for _ in range(count)]


def random_prompts(size: Size, clients: int) -> list[list[int]]:
    """Return the prompts of some clients; no two begin alike."""
    chance = random.Random(SEED + clients)
    lengths = [chance.randint(*size.prompt) for _ in range(clients * size.requests[clients])]
    return [random_ids(chance, length) for length in lengths]


def timed(load: Load) -> list[list[float]]:
    """Return the times of each request's start, first text and end."""
    program = str(Path(__file__).with_name("serving_clients.py"))
    done = subprocess.run(
        [sys.executable, program],
        input=json.dumps(load),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return sorted(json.loads(done.stdout))


def run_load(load: Load) -> Figures:
    """Run the clients, and return the throughput and percentiles of the seconds to the first text."""
    times = timed(load)
    waits = sorted(first - start for start, first, _ in times)
    first_start = min(start for start, _, _ in times)
    last_end = max(end for _, _, end in times)
    return {
        "tokens_per_s": len(times) * load["max_tokens"] / (last_end - first_start),
        "ttft_p50": statistics.median(waits),
        "ttft_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    }


@contextmanager
def served(backbone: Backbone, engine: ThreadedEngine) -> Iterator[str]:
    """Serve with an engine; yields the address."""
    service = Service(
        backbone,
        engine,
        GraftStore({"backbone": backbone}),
        "backbone",
        settings=ServerSettings(port=0, grace=0.0),
    )
    # Grammars need an end token, which the model does not have; the measured answers end before it.
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
    """Run `transformers serve`; yields the address."""
    address = f"127.0.0.1:{_free_port()}"
    program = str(Path(sys.executable).with_name("transformers"))
    host, _, port = address.partition(":")
    command_line = [program, "serve", name, "--device", "cpu", "--dtype", "auto", "--host", host, "--port", port]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (folder / "transformers-serve.log").open("w") as log:
        server = subprocess.Popen(command_line, stdout=log, stderr=log, env=environment)
    try:
        _wait_for(f"http://{address}/health", server)
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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


class Turns:
    """The turns of the benchmark.

    Args:
        size: the sizes.
        folder: a folder for the backbone.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        save_backbone(size, folder)
        self.size = size
        self.folder = folder
        self.backbone = load_backbone(str(folder))
        self.grafts = make_grafts(self.backbone)
        self.limits = EngineLimits(queue=64)

    def by_name(self) -> dict[str, Turn]:
        """Return our turns and the static ones by name; the turns of a ratio are next to each other."""
        return {
            "clients_1": partial(self.ours, 1),
            "clients_4": partial(self.ours, 4),
            "clients_64": partial(self.ours, 64),
            SERIAL: self.serial,
            "clients_16": partial(self.ours, 16),
            "transformers_static_16": partial(self.static, 16),
            "mixed_grafts_4": partial(self.ours, 16, GRAFTS),
            ONE_GRAFT: partial(self.ours, 16, GRAFTS[:1]),
            "transformers_static_8": partial(self.static, 8),
            "clients_8": partial(self.ours, 8),
            "json": self.constrained,
            "prefix_1000": self.prefix,
        }

    def ours(self, clients: int, models: tuple[str, ...] = ("backbone",)) -> Figures:
        """Measure our server with continuous batching."""
        return self._run(self._batching(), clients, models)

    def serial(self) -> Figures:
        """Measure our server with one request at a time."""
        engine = SerialEngine(self.backbone, self.grafts, "backbone", self.limits)
        return self._run(engine, 16, ("backbone",))

    def constrained(self) -> Figures:
        """Measure our server with answers of JSON."""
        return self._run(self._batching(), 8, ("backbone",), {"structured_outputs": {"json": NUMBERS}})

    def prefix(self) -> Figures:
        """Measure the seconds to the first token of two prompts with the same beginning."""
        chance = random.Random(SEED)
        common = random_ids(chance, self.size.prefix)
        prompts = [[*common, *random_ids(chance, 20)] for _ in range(2)]
        with served(self.backbone, self._batching()) as url:
            load = Load(url=url, models=["backbone"], prompts=prompts, clients=1, max_tokens=1)
            warm_up(load)
            first, second = timed(load)
        return {"first_s": first[1] - first[0], "second_s": second[1] - second[0]}

    def static(self, rows: int) -> Figures:
        """Measure static batches of transformers."""
        prompts = random_prompts(self.size, rows)
        model: Any = self.backbone.model
        start = time.perf_counter()
        for first in range(0, len(prompts), rows):
            inputs = left_padded(prompts[first : first + rows], 0, "cpu")
            model.generate(**inputs, max_new_tokens=self.size.new, do_sample=False)
        seconds = time.perf_counter() - start
        return {"tokens_per_s": len(prompts) * self.size.new / seconds}

    def transformers_serve(self, url: str, clients: int) -> Figures:
        """Measure `transformers serve`, which accepts texts only."""
        tokenizer = self.backbone.need_tokenizer()
        texts = [str(tokenizer.decode(ids)) for ids in random_prompts(self.size, clients)]
        load = Load(
            url=url,
            models=[str(self.folder)],
            prompts=texts,
            clients=clients,
            max_tokens=self.size.new,
        )
        return run_load(load)

    def _batching(self) -> ThreadedEngine:
        return BatchingEngine(self.backbone, self.grafts, "backbone", self.limits)

    def _run(
        self,
        engine: ThreadedEngine,
        clients: int,
        models: tuple[str, ...],
        extra: dict[str, object] | None = None,
    ) -> Figures:
        with served(self.backbone, engine) as url:
            load = Load(
                url=url,
                models=list(models),
                prompts=random_prompts(self.size, clients),
                clients=clients,
                max_tokens=self.size.new,
                extra=extra or {},
            )
            warm_up(load)
            return run_load(load)


def warm_up(load: Load) -> None:
    """Send a short request to each model of a load."""
    prompts = [_WARM_UP_PROMPT for _ in load["models"]]
    short = load.copy()
    short["prompts"] = prompts
    short["clients"] = 1
    timed(short)


def measure(size: Size, folder: Path) -> Measured:
    """Return the figures of all turns."""
    turns = Turns(size, folder)
    by_name = turns.by_name()
    with transformers_server(folder, str(folder)) as url:
        by_name[TRANSFORMERS_SERVE] = partial(turns.transformers_serve, url, 16)
        turns.transformers_serve(url, 1)  # warm up
        return _rounds(by_name, size.rounds)


def _rounds(turns: dict[str, Turn], count: int) -> Measured:
    """Run at most `count` rounds within the time limit."""
    measured: Measured = {name: [] for name in turns}
    start = time.monotonic()
    for number in range(count):
        elapsed = time.monotonic() - start
        remaining = _SECONDS - elapsed
        if number > 0 and remaining < elapsed / number:
            break
        for name in in_order(turns, number):
            figures = turns[name]()
            measured[name].append(figures)
            print(f"round {number + 1}, {name}: {figures}", flush=True)
    return measured


def benchmark(quick: bool) -> Results:
    """Return all rows."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(size, Path(folder))
    rows = [_row(name, measured) for name in ROWS]
    aims = []
    for row, goal in zip(rows, ROWS.values(), strict=True):
        if goal.aim is not None:
            aims.append(made_aim(goal.label, "ratio", goal.aim, None if quick else _median_ratio(row)))
    other_turns = {name: measured[name] for name in (SERIAL, ONE_GRAFT, "clients_8")}
    details: dict[str, Any] = {
        "size": {
            **vars(size),
            "prompt": list(size.prompt),
            "requests": {str(clients): count for clients, count in size.requests.items()},
        },
        "beside": other_turns,
        "threads": torch.get_num_threads(),
        "batch_size": EngineLimits().batch_size,
    }
    return Results.here(NAME, rows, seeds=[SEED], aims=aims, details=details)


def _row(name: str, measured: Measured) -> Row:
    own = measured[name]
    metrics: dict[str, Any] = {"ratio": interval(_ratios(name, measured))}
    for metric in own[0]:
        metrics[metric] = interval([figures[metric] for figures in own])
    return Row(id=name, label=ROWS[name].label, metrics=metrics)


def _ratios(name: str, measured: Measured) -> list[float]:
    """Return the ratio of a row in each round."""
    if name == "prefix_1000":
        return [figures["second_s"] / figures["first_s"] for figures in measured[name]]
    over, under = RATIOS.get(name, (name, SERIAL))
    pairs = zip(measured[over], measured[under], strict=True)
    return [upper["tokens_per_s"] / lower["tokens_per_s"] for upper, lower in pairs]


def _median_ratio(row: Row) -> float:
    ratio = row.metrics["ratio"]
    assert isinstance(ratio, Interval)
    return ratio.mean


if __name__ == "__main__":
    command(
        NAME,
        (__doc__ or "").splitlines()[0],
        lambda quick, device, clock: benchmark(quick),
        {name: None if goal.aim is None else goal.aim[1] for name, goal in ROWS.items()},
        options=(),
    )

"""A soak test of ten minutes: every answer is right, every refusal is clean, and memory does not grow.

Clients request whole and streamed texts, texts with a grammar and texts with a long common beginning, disconnect, send
invalid and too large bodies, and name unknown grafts, while a graft's files are replaced and damaged. Every answer is
compared with that of a server without a prefix cache, which receives one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from matplotlib.figure import Figure
from soak_clients import LIMIT, Body, Clients, Expected, Tally
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm import build_graft, graft_config, load_backbone, save_graft
from graftlm.evaluation import Aim, Results, Row, write_report
from graftlm.files.writing import staged_folder

NAME = "bench-serving-soak"
TEXT = "The quick brown fox jumps over the lazy dog. Le renard brun saute par-dessus le chien paresseux. "
MODELS = ("base", "danish", "french", "changing")
PROMPTS = ("The quick brown fox", "Le renard", "over the lazy dog and then the other dogs", "saute")
BEGINNING = TEXT * 8
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}  # with the ids 0, 1, 2
GRAMMARS: tuple[Body, ...] = (
    {"regex": "[a-e ]{5,30}"},
    {"choice": ["the fox", "the dog", "le renard"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "maxProperties": 1}},
)
WARM_UP = 0.1  # share of the memory samples that is ignored
EDGE = 0.1  # share of the other samples at the beginning and at the end, which the growth compares
GROWTH = 0.05  # maximum growth of memory
LAST_SECONDS = 300  # time limit for the shutdown of a server that shares its cores


@dataclass
class SoakServer:
    """A server under test.

    Attributes:
        process: its process.
        address: its address.
        grafts: folder of its grafts.
    """

    process: subprocess.Popen[str]
    address: str
    grafts: Path

    def memory(self) -> float:
        """Return the resident memory in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def make_files(folder: Path, width: int, layers: int) -> None:
    """Save a random Llama with a tokenizer, three grafts, and two states of one of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,  # so that tokens differ clearly
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    backbone = load_backbone(folder / "base")
    for path in ("grafts/danish", "grafts/french", "grafts/changing", "states/changed"):
        graft = build_graft(graft_config({"kind": "adapter", "width": 8}), backbone)
        with torch.no_grad():
            for parameter in graft.parameters():
                parameter.normal_(std=0.3)
        save_graft(graft, backbone, folder / path)
    shutil.copytree(folder / "grafts" / "changing", folder / "states" / "changing")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


@contextlib.contextmanager
def served(folder: Path, *more: str) -> Iterator[SoakServer]:
    """Run a server on these files, with further options."""
    command = [sys.executable, "-m", "graftlm", "serve", "--quiet"]
    options = {
        "--backbone": "base",
        "--grafts": "grafts",
        "--port": "0",
        "--max-body": str(LIMIT),
        "--batch-size": "8",
        "--queue": "8",
        "--reload-every": "0.5",
        "--max-tokens": "64",
    }
    for option, value in options.items():
        command += [option, value]
    command += more
    log = (folder / "log").open("w+")
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)
    try:
        yield SoakServer(process, wait_for_address(process, folder / "log"), folder / "grafts")
    finally:
        process.kill()
        process.wait()
        log.close()


def wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    """Return the address that a server prints once it is ready."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving "):
                return line.rpartition(" at ")[2].strip()
        time.sleep(0.05)
    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")


def good_requests() -> list[Body]:
    """Return greedy and seeded completions; chats use the same code after the prompt."""
    requests = []
    for model in MODELS:
        for number, prompt in enumerate(PROMPTS):
            requests.append(greedy(model, prompt, max_tokens=4 + 9 * number))
            requests.append(seeded(model, prompt, max_tokens=16, seed=number))
            requests.append(greedy(model, BEGINNING + prompt, max_tokens=12))
        for number, grammar in enumerate(GRAMMARS):
            request = seeded(model, PROMPTS[0], max_tokens=48, seed=number)
            request["structured_outputs"] = grammar
            requests.append(request)
    return requests


def greedy(model: str, prompt: str, max_tokens: int) -> Body:
    """Return a greedy request."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def seeded(model: str, prompt: str, max_tokens: int, seed: int) -> Body:
    """Return a request with sampling."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.9,
        "seed": seed,
    }


async def learn(server: SoakServer, folder: Path, requests: list[Body]) -> Expected:
    """Return the answers to single requests, with both states of the changing graft."""
    expected: Expected = {json.dumps(request): set() for request in requests}
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        for state in ("changed", "changing"):
            await put_state(server, folder / "states" / state, client)
            for request in requests:
                if request["model"] == "changing" or state == "changing":
                    answer = await client.post("/v1/completions", json=request)
                    expected[json.dumps(request)].add(answer.json()["choices"][0]["text"])
    return expected


async def put_state(server: SoakServer, state: Path, client: httpx.AsyncClient) -> None:
    """Replace the changing graft with a rename, and wait until it is in service."""
    loaded = await loads(client, "loaded")
    with staged_folder(server.grafts / "changing") as draft:
        shutil.copytree(state, draft, dirs_exist_ok=True)
    server.process.send_signal(signal.SIGHUP)
    while await loads(client, "loaded") == loaded:
        await asyncio.sleep(0.02)


async def loads(client: httpx.AsyncClient, outcome: str) -> float:
    """Return how often the changing graft was loaded or refused."""
    metric = f'graftlm_graft_loads_total{{graft="changing",outcome="{outcome}"}}'
    response = await client.get("/metrics")
    for line in response.text.splitlines():
        if line.startswith(metric):
            return float(line.rpartition(" ")[2])
    return 0.0


async def change_grafts(server: SoakServer, folder: Path, until: float, pause: float) -> Counter[str]:
    """Replace and damage a graft's files repeatedly. At the end it has its first state again."""
    done: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        while time.monotonic() < until:
            state = "changed" if done["replaced"] % 2 else "changing"
            await put_state(server, folder / "states" / state, client)
            done["replaced"] += 1
            await asyncio.sleep(pause)
            await damage(server, client)
            done["spoilt"] += 1
            await asyncio.sleep(pause)
        await put_state(server, folder / "states" / "changing", client)
    return done


async def damage(server: SoakServer, client: httpx.AsyncClient) -> None:
    """Overwrite a graft's tensors in place, and wait until the server refuses them."""
    refused = await loads(client, "refused")
    (server.grafts / "changing" / "graft.safetensors").write_bytes(os.urandom(1000))
    server.process.send_signal(signal.SIGHUP)
    while await loads(client, "refused") == refused:
        await asyncio.sleep(0.02)


async def sample_memory(server: SoakServer, until: float, every: float) -> list[float]:
    """Return the server's memory at intervals."""
    memory = []
    while time.monotonic() < until:
        memory.append(server.memory())
        await asyncio.sleep(every)
    return memory


def growth_of(memory: list[float]) -> float:
    """Return the relative growth of the median from the beginning to the end, after the warm-up."""
    warm = memory[int(len(memory) * WARM_UP) :]
    edge = max(1, int(len(warm) * EDGE))
    beginning = statistics.median(warm[:edge])
    end = statistics.median(warm[-edge:])
    return end / beginning - 1


async def soak(folder: Path, seconds: float, workers: int) -> tuple[Tally, list[float], dict[str, Any]]:
    """Load one server, and stop it with SIGTERM. Return the outcomes, the memory and further details."""
    with served(folder, "--prefix-cache", "0") as server:
        expected = await learn(server, folder, good_requests())
    with served(folder) as server:
        before = hashes_of(server.grafts)
        until = time.monotonic() + seconds
        clients = Clients(server.address, expected, seconds, workers)
        _, memory, changes = await asyncio.gather(
            clients.run(),
            sample_memory(server, until, every=max(0.05, seconds / 600)),
            change_grafts(server, folder, until, pause=min(2.0, seconds / 10)),
        )
        is_alive = server.process.poll() is None
        exit_code = await asyncio.to_thread(stop, server)
        after = hashes_of(server.grafts)
    details = {
        "changes": dict(changes),
        "alive": is_alive,
        "exit_code": exit_code,
        "grafts_intact": before == after,
        "cached_tokens": clients.tally.cached_tokens,
    }
    if clients.tally.wrong:
        print((folder / "log").read_text()[-8000:], file=sys.stderr)
    return clients.tally, memory, details


def stop(server: SoakServer) -> int:
    """Send SIGTERM and return the exit code; a server that does not end is killed."""
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(LAST_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return server.process.wait()


def hashes_of(grafts: Path) -> dict[str, str]:
    """Return the SHA-256 of each graft's tensors."""
    hashes = {}
    for folder in grafts.iterdir():
        if not folder.name.startswith("."):
            tensors = (folder / "graft.safetensors").read_bytes()
            hashes[folder.name] = hashlib.sha256(tensors).hexdigest()
    return hashes


def results_of(tally: Tally, memory: list[float], details: dict[str, Any], seconds: float, quick: bool) -> Results:
    """Return the results in the common form."""
    counts = tally.counts
    growth = growth_of(memory)
    wrong = counts["wrong"]
    if not details["alive"]:
        wrong += 1
    if details["exit_code"] != 0:
        wrong += 1
    if not details["grafts_intact"]:
        wrong += 1
    row = Row(
        id="soak",
        label=f"{seconds:g} seconds of mixed load",
        metrics={
            "requests": sum(counts.values()),
            "answered": counts["answered"],
            "failed_cleanly": counts["failed_cleanly"],
            "vanished": counts["vanished"],
            "wrong": wrong,
            "memory_growth": growth,
            "memory_mb": statistics.median(memory) / 1e6,
            "seconds": seconds,
        },
    )
    aims = [
        aim_of("nothing is answered wrongly or lost", "wrong", 0.0, None if quick else wrong),
        aim_of("memory is flat", "memory_growth", GROWTH, None if quick else growth),
    ]
    every = max(1, len(memory) // 60)
    all_details = {
        **details,
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "went_wrong": tally.wrong,
        "memory_mb": [round(value / 1e6, 1) for value in memory[::every]],
    }
    return Results.here(NAME, [row], aims=aims, details=all_details)


def aim_of(text: str, metric: str, aim: float, measured: float | None) -> Aim:
    """Return an aim, and whether it is met; undecided without a measured value."""
    if measured is None:
        return Aim(text=text, metric=metric, aim=aim)
    return Aim(
        text=text,
        metric=metric,
        aim=aim,
        measured=measured,
        met=measured <= aim,
    )


def draw(results: Results) -> Figure:
    """Return a plot of the server's memory over time."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    values = results.details["memory_mb"]
    assert isinstance(values, list)
    seconds = results.rows[0].metrics["seconds"]
    assert isinstance(seconds, int | float)
    times = [seconds * index / len(values) for index in range(len(values))]
    axes.plot(times, values, color="#0072B2")  # type: ignore[arg-type]  # numbers
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory, MB")
    return figure


def main() -> None:
    """Run the test, and write `results.json`, `report.md` and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs") / NAME)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=12, help="number of concurrent clients")
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a test of the program")
    chosen = parser.parse_args()
    seconds = 3.0 if chosen.quick else chosen.seconds
    workers = 6 if chosen.quick else chosen.workers
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.quick:
            make_files(folder, width=32, layers=2)
        else:
            make_files(folder, width=128, layers=4)
        tally, memory, details = asyncio.run(soak(folder, seconds, workers))
    results = results_of(tally, memory, details, seconds, chosen.quick)
    write_report(results, chosen.out, plots={"memory": draw(results)})
    print(json.dumps(results.rows[0].model_dump(mode="json")["metrics"]))
    print(f"written to {chosen.out}")


if __name__ == "__main__":
    main()

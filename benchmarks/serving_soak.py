"""A soak test of ten minutes: every answer is right, every refusal is clean, and memory does not grow.

Clients request whole and streamed texts, texts of a given form and texts with a long common beginning, disconnect, send
invalid and too large bodies, and name unknown grafts, while a graft's files are replaced and damaged. Every answer is
compared with the answer to the same request alone, of a server without a prefix cache.
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
from soak_clients import LIMIT, Clients, Expected, Tally
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
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-e ]{5,30}"},
    {"choice": ["the fox", "the dog", "le renard"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "maxProperties": 1}},
)
WARM_UP = 0.1  # share of the time
EDGE = 0.1  # share of the rest at either end; the growth of memory compares both ends
GROWTH = 0.05
LAST_SECONDS = 300  # time limit for the end of a server that shares its cores


@dataclass
class SoakServer:
    """A server under test: its process, its address, its grafts' folder."""

    process: subprocess.Popen[str]
    address: str
    grafts: Path

    def memory(self) -> float:
        """Resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def make_files(folder: Path, width: int, layers: int) -> None:
    """A random Llama with a tokenizer, three grafts, and a second state of one of them."""
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
    for name in ("danish", "french", "changing", "changed"):
        graft = build_graft(graft_config({"kind": "adapter", "width": 8}), backbone)
        with torch.no_grad():
            for parameter in graft.parameters():
                parameter.normal_(std=0.3)
        save_graft(graft, backbone, folder / ("states" if name == "changed" else "grafts") / name)
    shutil.copytree(folder / "grafts" / "changing", folder / "states" / "changing")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>", "<bos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    names = dict(zip(("pad_token", "eos_token", "bos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@contextlib.contextmanager
def served(folder: Path, *more: str) -> Iterator[SoakServer]:
    """A server on these files."""
    options = ["--backbone", "base", "--grafts", "grafts", "--port", "0", "--max-body", str(LIMIT)]
    options += ["--batch-size", "8", "--queue", "8", "--reload-every", "0.5", "--max-tokens", "64", "--quiet"]
    command = [sys.executable, "-m", "graftlm", "serve", *options, *more]
    log = (folder / "log").open("w+")
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)
    try:
        yield SoakServer(process, wait_for_address(process, folder / "log"), folder / "grafts")
    finally:
        process.kill()
        process.wait()
        log.close()


def wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    """The address that a server prints once it is ready."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving "):
                return line.rpartition(" at ")[2].strip()
        time.sleep(0.05)
    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")


def good_requests() -> list[dict[str, Any]]:
    """Greedy and seeded completions, whose answers are known; chats take the same path."""
    requests: list[dict[str, Any]] = []
    for model in MODELS:
        for number, prompt in enumerate(PROMPTS):
            requests.append({"model": model, "prompt": prompt, "max_tokens": 4 + 9 * number, "temperature": 0})
            requests.append({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0.9, "seed": number})
            requests.append({"model": model, "prompt": BEGINNING + prompt, "max_tokens": 12, "temperature": 0})
        for number, form in enumerate(FORMS):
            seeded = {"model": model, "prompt": PROMPTS[0], "max_tokens": 48, "temperature": 0.9, "seed": number}
            requests.append(seeded | {"structured_outputs": form})
    return requests


async def learn(server: SoakServer, folder: Path, requests: list[dict[str, Any]]) -> Expected:
    """The answer to each request alone, with both states of the graft that changes."""
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
    """Replace the graft that changes by a rename, and wait until it is in service."""
    loaded = await loads(client, "loaded")
    with staged_folder(server.grafts / "changing") as draft:
        shutil.copytree(state, draft, dirs_exist_ok=True)
    server.process.send_signal(signal.SIGHUP)
    while await loads(client, "loaded") == loaded:
        await asyncio.sleep(0.02)


async def loads(client: httpx.AsyncClient, outcome: str) -> float:
    """The number of times that the graft that changes was loaded or refused."""
    line = f'graftlm_graft_loads_total{{graft="changing",outcome="{outcome}"}}'
    page = (await client.get("/metrics")).text
    return next((float(text.rpartition(" ")[2]) for text in page.splitlines() if text.startswith(line)), 0.0)


async def change_grafts(server: SoakServer, folder: Path, until: float, pause: float) -> Counter[str]:
    """Replace and damage a graft's files repeatedly; the last state is the first."""
    done: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        while time.monotonic() < until:
            await put_state(server, folder / "states" / ("changed" if done["replaced"] % 2 else "changing"), client)
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
    """The server's memory at intervals."""
    memory = []
    while time.monotonic() < until:
        memory.append(server.memory())
        await asyncio.sleep(every)
    return memory


def growth_of(memory: list[float]) -> float:
    """The relative growth from the first to the last tenth after the warm-up, in medians."""
    warm = memory[int(len(memory) * WARM_UP) :]
    edge = max(1, int(len(warm) * EDGE))
    return statistics.median(warm[-edge:]) / statistics.median(warm[:edge]) - 1


async def soak(folder: Path, seconds: float, workers: int) -> tuple[Tally, list[float], dict[str, Any]]:
    """Load on one server, and its end by SIGTERM."""
    with served(folder, "--prefix-cache", "0") as server:
        expected = await learn(server, folder, good_requests())
    with served(folder) as server:
        before = {path.name: hash_of(path) for path in (folder / "grafts").iterdir()}
        until = time.monotonic() + seconds
        clients = Clients(server.address, expected, seconds, workers)
        every = max(0.05, seconds / 600)
        changing = change_grafts(server, folder, until, min(2.0, seconds / 10))
        _, memory, done = await asyncio.gather(clients.run(), sample_memory(server, until, every), changing)
        alive = server.process.poll() is None
        code = await asyncio.to_thread(stop, server)
        after = {path.name: hash_of(path) for path in (folder / "grafts").iterdir() if not path.name.startswith(".")}
    details = {"changes": dict(done), "alive": alive, "exit_code": code, "grafts_intact": before == after}
    details["cached_tokens"] = clients.tally.cached_tokens
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


def hash_of(folder: Path) -> str:
    """SHA-256 of a graft's tensors."""
    return hashlib.sha256((folder / "graft.safetensors").read_bytes()).hexdigest()


def results_of(tally: Tally, memory: list[float], details: dict[str, Any], seconds: float, quick: bool) -> Results:
    """The results in the common form."""
    counts, growth = tally.counts, growth_of(memory)
    lost = counts["wrong"] + (not details["alive"]) + (details["exit_code"] != 0) + (not details["grafts_intact"])
    metrics = {
        "requests": sum(counts.values()),
        "answered": counts["answered"],
        "failed_cleanly": counts["failed_cleanly"],
        "vanished": counts["vanished"],
        "wrong": lost,
        "memory_growth": growth,
        "memory_mb": statistics.median(memory) / 1e6,
        "seconds": seconds,
    }
    aims = [
        ("nothing is answered wrongly or lost", "wrong", 0.0, lost),
        ("memory is flat", "memory_growth", GROWTH, growth),
    ]
    return Results.here(
        NAME,
        [Row(id="soak", label=f"{seconds:g} seconds of mixed load", metrics=metrics)],
        aims=[
            Aim(text=text, metric=metric, aim=aim)
            if quick
            else Aim(text=text, metric=metric, aim=aim, measured=value, met=value <= aim)
            for text, metric, aim, value in aims
        ],
        details=details
        | {"statuses": {str(status): n for status, n in sorted(tally.statuses.items())}, "went_wrong": tally.wrong}
        | {"memory_mb": [round(value / 1e6, 1) for value in memory[:: max(1, len(memory) // 60)]]},
    )


def draw(results: Results) -> Figure:
    """The server's memory over time."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    values = results.details["memory_mb"]
    assert isinstance(values, list)
    seconds = results.rows[0].metrics["seconds"]
    axes.plot([float(seconds) * index / len(values) for index in range(len(values))], values, color="#0072B2")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory, MB")
    return figure


def main() -> None:
    """Soak, and write `results.json`, `report.md` and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs") / NAME)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=12, help="clients at a time")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    chosen = parser.parse_args()
    seconds, width, layers = (3.0, 32, 2) if chosen.quick else (chosen.seconds, 128, 4)
    with tempfile.TemporaryDirectory() as scratch:
        make_files(Path(scratch), width, layers)
        tally, memory, details = asyncio.run(soak(Path(scratch), seconds, 6 if chosen.quick else chosen.workers))
    results = results_of(tally, memory, details, seconds, chosen.quick)
    write_report(results, chosen.out, plots={"memory": draw(results)})
    print(json.dumps(results.rows[0].model_dump(mode="json")["metrics"]), f"written to {chosen.out}")


if __name__ == "__main__":
    main()

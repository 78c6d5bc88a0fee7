"""`graft serve --engine vllm` with the real vLLM: several grafts in one server, through HTTP."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import FitsOnText, Graft
from graftlm.store.artifact import save_graft
from graftlm.testing import attach_graft, randomise
from integrations.vllm.comparison import TIE, continuation
from integrations.vllm.environment import UnavailableError, find_python
from integrations.vllm.models import tiny_backbone

STEPS = 8
TEXTS = ("The capital of Velmora is", "hidden states", "Every day she sells", "What is it?")
EXPERT = {"rank": 3, "targets": ["ffn"], "texts": ["Velmora", "Who rules Zorvath?"]}
GRAFTS: dict[str, dict[str, Any]] = {
    "danish": {"kind": "neutral-residues", "width": 47},
    "plain": {"kind": "adapter", "width": 9},
    "law": {"kind": "lora", "rank": 4},
    "router": {
        "kind": "token-routing",
        "experts": {"facts": EXPERT},
        "embedder": {"name": "words", "centroids": "all"},
        "threshold": 0.5,
        "reads": "prompt",
    },
}
LATER = {"kind": "neutral-residues", "width": 20}
MIXTURE = {"danish": 0.7, "law": 0.3}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
ARGUMENTS = "--enforce-eager --max-model-len 256 --max-num-seqs 16 --enable-auto-tool-choice --tool-call-parser hermes"
START_SECONDS = 400
REQUESTS = 200
WORKERS = 8


class Served:
    """A server with grafts, and what each model must answer.

    Attributes:
        address: the address of the server.
        watched: the folder of grafts that the server watches.
        later: the folder of a graft that is not served yet.
        expected: the tokens of the greedy answers to `TEXTS`, by model; None from the first tie on.
    """

    def __init__(self, folder: Path) -> None:
        self.address = ""
        self.watched = folder / "grafts"
        self.later = folder / "later"
        self.expected: dict[str, list[list[int | None]]] = {}

    def is_right(self, model: str, number: int, tokens: list[int]) -> bool:
        """Return whether tokens are those of a model's answer to a text."""
        for expected, found in zip(self.expected[model][number], tokens, strict=True):
            if expected is None:
                return True  # after a tie
            if expected != found:
                return False
        return True

    def ask(self, model: str, number: int) -> list[int]:
        """Return the tokens of a model's greedy answer to a text."""
        answer = httpx.post(f"{self.address}/v1/completions", json=body(model, number), timeout=120)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]


def body(model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": TEXTS[number],
        "max_tokens": STEPS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def made(config: dict[str, Any], backbone: Backbone) -> Graft:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    if config["kind"] == "token-routing":
        assert isinstance(graft, FitsOnText)
        graft.fit({})
    return graft


def answers(grafts: dict[str, Graft], backbone: Backbone) -> list[list[int | None]]:
    """Return the tokens of greedy answers to `TEXTS`, each after a pass over the whole text; None after a tie."""
    tokens: list[list[int | None]] = []
    with GraftedModel(backbone, grafts) as model:
        model.eval()
        for text in TEXTS:
            ids = backbone.need_tokenizer()(text)["input_ids"]
            prompt = torch.arange(len(ids) + STEPS)[None] < len(ids)

            def logits(tokens: torch.Tensor, prompt: torch.Tensor = prompt) -> torch.Tensor:
                return model(input_ids=tokens, prompt=prompt[:, : tokens.shape[1]]).logits

            result = continuation(logits, ids, STEPS)
            first_tie = next((step for step, gap in enumerate(result.gaps) if gap < TIE), STEPS)
            tokens.append([token if step < first_tie else None for step, token in enumerate(result.tokens)])
    return tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`graft serve --engine vllm` with all grafts and a mixture."""
    try:
        python = find_python()
    except UnavailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("served")
    backbone = tiny_backbone("llama", max_position_embeddings=512)
    backbone.model.save_pretrained(folder / "base")
    backbone.need_tokenizer().save_pretrained(folder / "base")
    (folder / "template.jinja").write_text(TEMPLATE)
    result = Served(folder)
    result.expected["base"] = answers({}, backbone)
    grafts = {name: made(config, backbone) for name, config in GRAFTS.items()}
    for name, graft in grafts.items():
        save_graft(graft, backbone, result.watched / name)
        result.expected[name] = answers({name: graft}, backbone)
    later = made(LATER, backbone)
    save_graft(later, backbone, result.later)
    result.expected["later"] = answers({"later": later}, backbone)
    result.expected["both"] = answers(weighted(grafts), backbone)
    assert len({str(tokens) for tokens in result.expected.values()}) == len(result.expected)
    mixture = "both=" + "+".join(f"{name}:{weight}" for name, weight in MIXTURE.items())
    command = [sys.executable, "-m", "graftlm", "serve", "--engine", "vllm", "--vllm-python", str(python)]
    command += ["--backbone", f"base={folder / 'base'}", "--grafts", str(result.watched), "--mix", mixture]
    command += ["--chat-template", str(folder / "template.jinja"), "--port", "0", "--reload-every", "0.5"]
    command += ["--vllm-args", ARGUMENTS]
    variables = {"GRAFTLM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | variables)
    try:
        result.address = _address(process, log)
        yield result
    finally:
        process.terminate()
        process.wait(60)


def weighted(grafts: dict[str, Graft]) -> dict[str, Graft]:
    """Return copies of the mixture's grafts whose last matrices are multiplied by the weights."""
    backbone = tiny_backbone("llama", max_position_embeddings=512)
    copies = {}
    for name, weight in MIXTURE.items():
        graft = made(GRAFTS[name], backbone)
        copies[name] = graft
        tensors = graft.tensors() if hasattr(graft, "tensors") else graft.state_dict()
        scaled = {
            key: weight * tensor if ("w_o" in key or "lora_B" in key) else tensor for key, tensor in tensors.items()
        }
        load = graft.load_tensors if hasattr(graft, "load_tensors") else graft.load_state_dict
        load(scaled)
    return copies


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("serving "):
                return line.rpartition(" at ")[2]
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.5)
    raise AssertionError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def test_grafts_mixtures_and_the_bare_model_in_one_batch(served: Served) -> None:
    """Each answer is that of the model alone, and that of our own forward pass."""
    models = ["base", "danish", "plain", "law", "router", "both"]
    asked = [(model, number) for number in range(len(TEXTS)) for model in models]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: served.ask(*each), asked))
    for (model, number), tokens in zip(asked, together, strict=True):
        assert served.is_right(model, number, tokens), (model, TEXTS[number])
    for model in models:
        assert served.is_right(model, 0, served.ask(model, 0)), model


def test_the_client_of_openai(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="unused")
    assert {model.id for model in client.models.list()} >= {"base", *GRAFTS, "both"}
    messages: Any = [{"role": "user", "content": "Say it"}]
    whole = client.chat.completions.create(model="danish", messages=messages, max_tokens=6, temperature=0)
    chunks = list(
        client.chat.completions.create(model="danish", messages=messages, max_tokens=6, temperature=0, stream=True)
    )
    assert {chunk.model for chunk in chunks} == {whole.model} == {"danish"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    schema = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    structured = client.chat.completions.create(
        model="law", messages=messages, max_tokens=120, temperature=0, response_format=wanted
    )
    assert json.loads(structured.choices[0].message.content or "")["color"] in ("red", "blue")
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    called = client.chat.completions.create(
        model="plain",
        messages=messages,
        max_tokens=120,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "paint"}},
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "paint"


def test_requests_while_grafts_come_and_go(served: Served) -> None:
    """200 requests, some of them cancelled, while a graft is added and removed again and again: none is wrong."""
    stop = threading.Event()
    changer = threading.Thread(target=_add_and_remove, args=(served, stop))
    changer.start()
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            outcomes = list(pool.map(lambda seed: _one_request(served, seed), range(REQUESTS)))
    finally:
        stop.set()
        changer.join()
    assert not [outcome for outcome in outcomes if outcome.startswith("wrong")]
    assert outcomes.count("right") > REQUESTS / 2
    assert outcomes.count("cancelled") > 10
    assert {"right of later", "absent"} <= set(outcomes)


def _add_and_remove(served: Served, stop: threading.Event) -> None:
    while not stop.is_set():
        shutil.copytree(served.later, served.watched / "later")
        stop.wait(3)
        shutil.rmtree(served.watched / "later")
        stop.wait(2)


def _one_request(served: Served, seed: int) -> str:
    """Ask a random model; return whether the answer was right, wrong, cancelled, or absent."""
    chosen = random.Random(seed)
    model = chosen.choice(["base", "danish", "plain", "law", "router", "both", "later", "later"])
    number = chosen.randrange(len(TEXTS))
    if chosen.random() < 0.15:
        request = {**body(model, number), "stream": True}
        with httpx.stream("POST", f"{served.address}/v1/completions", json=request, timeout=120) as answer:
            next(answer.iter_lines(), "")
        return "cancelled"
    answer = httpx.post(f"{served.address}/v1/completions", json=body(model, number), timeout=120)
    if answer.status_code == 404 and model == "later":
        return "absent"
    if answer.status_code != 200:
        return f"wrong: {model} has status {answer.status_code}, {answer.text}"
    tokens = answer.json()["choices"][0]["token_ids"]
    if not served.is_right(model, number, tokens):
        return f"wrong: {model} answers {tokens} instead of {served.expected[model][number]}"
    return "right of later" if model == "later" else "right"

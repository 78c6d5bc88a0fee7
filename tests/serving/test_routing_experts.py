"""Experts of a routing that come and go while a server has requests: the recipe is trained again into its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import load_backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.token_routing import TokenRouting
from graftlm.runs.recipe import Recipe, run_recipe
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import EngineLimits, GenerationRequest, TokenOutput
from graftlm.serving.service import Service, open_service
from graftlm.store.artifact import load_graft
from serving.engines import BLOCKING, Gate, read
from token_routing.tools import settings, write_adapters

TEXTS = {"one": "The quick brown fox", "two": "Le renard brun saute", "three": "def forward(self): return"}
PROMPT = (11, 12, 13, 14)
TOKENS = 40


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return write_adapters("llama", tmp_path / "adapters", {name: settings("llama")[name] for name in TEXTS})


def train(backbone: Path, folders: dict[str, str], names: list[str], out: Path) -> Path:
    """Run the recipe of a routing between some of the adapters, and return the folder of its graft."""
    experts = {name: {"path": folders[name], "texts": [TEXTS[name]]} for name in names}
    recipe: dict[str, Any] = {
        "backbone": {"name": str(backbone), "device": "cpu"},
        "graft": {"kind": "token-routing", "experts": experts, "every": 1},
        "training": {"steps": 0},
        "evaluation": {"decode_prompts": 0, "own_tokens": 0},
        "out": str(out),
    }
    run_recipe(Recipe.parse(recipe), progress=False, log=lambda _: None)
    return out / "graft"


def served_experts(service: Service) -> list[str]:
    assert isinstance(service.engine, BatchingEngine)
    ((_, graft),) = service.engine.graft_set(GenerationRequest(PROMPT, "router", max_tokens=1)).grafts
    assert isinstance(graft, TokenRouting)
    return graft.names


def greedy(backbone: Path, graft: Path) -> list[int]:
    """The greedy continuation of `PROMPT` by a routing outside of a server."""
    host = load_backbone(str(backbone))
    with GraftedModel(host, {"router": load_graft(graft, host)}) as model:
        prompt = torch.tensor([PROMPT])
        output = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return output[0, len(PROMPT) :].tolist()


def test_experts_come_and_go_while_a_request_runs(tiny_backbone, folders: dict[str, str], tmp_path: Path) -> None:
    backbone = tiny_backbone("llama")
    out = tmp_path / "run"
    graft = train(backbone, folders, ["one", "two"], out)
    before = greedy(backbone, graft)
    service = open_service(load_backbone(str(backbone)), {"router": graft}, limits=EngineLimits(batch_size=4))
    request = GenerationRequest(PROMPT, "router", max_tokens=TOKENS, ignore_eos=True)

    async def during_a_request() -> list[int]:
        tokens: list[int] = []
        async for item in service.engine.submit([request]):
            if not isinstance(item, TokenOutput):
                continue
            tokens.append(item.token)
            if len(tokens) == 1:
                blocking = service.engine.submit([BLOCKING])
                await asyncio.to_thread(Gate.reached.wait, 30)
                await asyncio.to_thread(train, backbone, folders, ["one", "two", "three"], out)
                await asyncio.to_thread(service.reload, now=True)
                assert served_experts(service) == ["one", "two", "three"]
                Gate.opened.set()
                await read(blocking)
        return tokens

    Gate.shut()
    service.engine.replace("gate", Gate())
    try:
        assert asyncio.run(during_a_request()) == before, "the request keeps the experts with which it began"
        assert greedy(backbone, graft) != before, "the third expert changes what is written"
        train(backbone, folders, ["three", "one"], out)
        service.reload(now=True)
        assert served_experts(service) == ["three", "one"]
        assert service.store.problems() == {}
    finally:
        Gate.opened.set()
        service.engine.close(10)

"""The main job on a real chat model: SmolLM2 learns C++ headers, beside LoRA, and keeps what it says without old text.

The new text is part of PyTorch, so every machine has it. The old text is sampled from the model itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from graftlm.artifact import load_graft
from graftlm.backbone import Backbone, default_device, end_ids, generate_rows, load_backbone
from graftlm.config import Config
from graftlm.data.chats import render_question
from graftlm.demo.corpus import deal, read_installation, write_documents
from graftlm.demo.run import fill_recipe
from graftlm.errors import DataError
from graftlm.evaluation import Results
from graftlm.grafts import GraftedModel
from graftlm.io import fill_once
from graftlm.runs.recipe import Recipe, compare_recipe
from graftlm.runs.run import Log

QUESTION = "What is the capital of France?"
_ANSWER_TOKENS = 24
_HEADERS = ("c10", "ATen/core", "torch/csrc/api/include/torch")
_LEAST_CHARACTERS = 2_000


class ChatDemoSize(Config):
    """How large the demo is; tokens are the model's.

    Args:
        steps, batch_size, length: of the training of each method.
        own_tokens: sampled by the model as old text.
        own_test_tokens: sampled to measure the divergence.
        scored_tokens: of each test text.
    """

    steps: int = 60
    batch_size: int = Field(2, ge=1)
    length: int = 256
    own_tokens: int = 6000
    own_test_tokens: int = 2048
    scored_tokens: int = 3000


QUICK = ChatDemoSize(steps=2, length=64, own_tokens=200, own_test_tokens=100, scored_tokens=200)


def run_chat_demo(
    out: str | Path = "runs/demo", *, quick: bool = False, seed: int = 0, progress: bool = True, log: Log = print
) -> Results:
    """Run the demo in a folder; what an earlier run left there is used again.

    Raises BackboneError if the model is neither installed (the extra smollm2) nor on a hub that can be reached, and
    DataError if the installation of PyTorch has no headers.
    """
    out, size = Path(out), QUICK if quick else ChatDemoSize()
    make_texts(out / "corpus", log)
    half = bfloat16_is_faster(default_device())
    kind = {"dtype": "bfloat16", "precision": "bf16"} if half else {"dtype": "float32", "precision": "fp32"}
    settings = size.model_dump() | kind | {"warmup_steps": max(1, size.steps // 10)}
    recipe = fill_recipe("chat.yaml", out, **settings, seed=seed)
    results = compare_recipe(recipe, progress=progress, log=log)
    for name, answer in answers(recipe, out).items():
        log(f"{QUESTION} {name}: {answer}")
    return results


def make_texts(folder: Path, log: Log) -> Path:
    """Write the C++ headers of PyTorch, and English to test on, as jsonl files, unless they are there."""

    def fill(folder: Path) -> None:
        log("Reading the C++ headers of this PyTorch installation.")
        root = Path(torch.__file__).parent / "include"
        files = sorted(file for name in _HEADERS for file in (root / name).rglob("*.h"))
        texts = [text for file in files if len(text := file.read_text("utf-8", "replace")) >= _LEAST_CHARACTERS]
        if len(texts) < 10:
            raise DataError(
                f"PyTorch has {len(texts)} C++ headers in {root}, and the demo learns from more: run graft demo --tiny."
            )
        for name, documents in deal(texts, {"cpp": 9, "cpp-test": 1}).items():
            write_documents(folder / f"{name}.jsonl", documents)
        write_documents(folder / "english-test.jsonl", read_installation(1).english)

    return fill_once(folder, {"torch": torch.__version__}, fill)


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether a product of matrices takes less time in bfloat16 than in float32, as where a CPU can multiply it."""

    def seconds(dtype: torch.dtype) -> float:
        left, right = (torch.randn(512, 512, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            (left @ right).sum().backward()
            assert left.grad is not None, "of the product"
            left.grad[0, 0].item()  # waits for an accelerator
            times.append(time.perf_counter() - start)
        return min(times[1:])

    return seconds(torch.bfloat16) < seconds(torch.float32)


def answers(recipe: Recipe, out: Path) -> dict[str, str]:
    """What the backbone and each graft of a comparison answer in chat."""
    backbone = load_backbone(recipe.backbone.name, dtype=recipe.backbone.dtype, device=default_device())
    given = {"before": answer(backbone.model, backbone)}
    for name in recipe.methods:
        with GraftedModel(backbone, {"graft": load_graft(out / name / "graft", backbone)}) as model:
            given[f"after, {name}"] = answer(model, backbone)
    return given


def answer(model: Any, backbone: Backbone) -> str:
    """The likeliest answer to the question, its end token shown."""
    tokenizer: Any = backbone.need_tokenizer()
    question = render_question([{"role": "user", "content": QUESTION}], tokenizer)
    prompts = [tokenizer(question, add_special_tokens=False)["input_ids"]]
    options: dict[str, Any] = {"max_new_tokens": _ANSWER_TOKENS, "do_sample": False}
    (new,) = generate_rows(model, tokenizer, prompts, end_ids(model, tokenizer), **options)
    return repr(tokenizer.decode(new))

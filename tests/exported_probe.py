"""What a process without graftlm measures of exported folders. It reads jobs and prints their results, both as JSON.

`python exported_probe.py JOBS.json`: a list of {folder, expected, checks}. `expected` is a file of `torch.save` with
ids (B, T), the grafted model's logits, and the tokens that it continues them with.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["graftlm"] = None  # type: ignore[assignment]  # its import fails from here on

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 6


def load(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def gap(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max())


def generation(model: Any, ids: Tensor, **options: Any) -> list[list[int]]:
    options |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()


def compiled(model: Any, ids: Tensor, backend: str = "eager") -> float:
    torch.compiler.reset()
    whole = torch.compile(model.forward, fullgraph=True, backend=backend)
    with torch.no_grad():
        return gap(whole(ids, use_cache=False).logits, logits(model, ids))


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model: Any, ids: Tensor) -> dict[str, Any]:
    """How far gradients with activation checkpointing are from those without, and the adapters' smallest gradient."""
    for module in model.modules():  # what is random would differ
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    plain = gradients(model, ids)
    model.gradient_checkpointing_enable()
    again = gradients(model, ids)
    adapters = [float(gradient.abs().max()) for name, gradient in plain.items() if ".adapter." in name]
    return {"gap": max(gap(again[name], plain[name]) for name in plain), "adapters": adapters}


def saved_again(model: Any, ids: Tensor) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        auto_map = json.loads((Path(folder) / "config.json").read_text()).get("auto_map", {})
        return {"gap": gap(logits(load(folder), ids), logits(model, ids)), "auto_map": sorted(auto_map)}


CHECKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "compiled": compiled,
    "saved_again": saved_again,
    "checkpointed": checkpointed,  # last, as it changes the model
}


def measure(folder: str, expected: str, checks: list[str]) -> dict[str, Any]:
    values = torch.load(expected, weights_only=True)
    model, ids = load(folder), values["ids"]
    result: dict[str, Any] = {
        "class": type(model).__name__,
        "logits": gap(logits(model, ids), values["logits"]),
        "dynamic": generation(model, ids) == values["tokens"].tolist(),
    }
    if "static" in checks:
        result["static"] = generation(model, ids, cache_implementation="static") == values["tokens"].tolist()
    with contextlib.suppress(OSError):
        result["tokens"] = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("The quick brown fox")[
            "input_ids"
        ]
    return result | {name: check(model, ids) for name, check in CHECKS.items() if name in checks}


if __name__ == "__main__":
    results = [measure(**job) for job in json.loads(Path(sys.argv[1]).read_text())]
    assert not [name for name, module in sys.modules.items() if name.startswith("graftlm") and module is not None]
    print(json.dumps(results))

"""One way to mix the experts, for one seed: loaded, asked, and kept in a cell."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch.nn import functional
from transformers import DynamicCache

from experiments.token_routing import drift
from experiments.token_routing.lessons import Lesson
from experiments.token_routing.peers import load_arrow, train_xlora
from experiments.token_routing.texts import DOMAINS, Item, read_changing, read_items
from graftlm.backbone import Backbone, leading_bos
from graftlm.evaluation.examples import Example, score_answers
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.io import write_atomically

MEASURED = "measurement.json"

Trace = np.ndarray


class Cell(Lesson):
    """What is measured of one row for one seed.

    Args:
        id: its folder's name.
        mixes: `none` for the bare backbone, a `routing` of ours, or a peer of PEFT's.
        adapters: the experts' folders, by domain.
        routing: of the graft's config, what is not its experts; and `examples`, what the centroids are of: `whole`
            examples, as in the paper, their `prompt`, or `both`.
        part: which questions are asked.
        traced: measure whether the right expert has the largest weight.
        asks: questions of the domains, documents that change domain, or how far `cache: keep` is from `recompute` on
            either: `drift` and `drift of documents`.
    """

    id: str
    mixes: Literal["none", "routing", "xlora", "arrow"] = "routing"
    adapters: dict[str, str] = {}
    routing: dict[str, Any] = {}
    part: Literal["validation", "test"] = "test"
    traced: bool = False
    asks: Literal["questions", "documents", "drift", "drift of documents"] = "questions"

    def cell_key(self) -> str:
        """SHA-256 over the settings and all that is read."""
        digest = hashlib.sha256(self.key().encode())
        names = [f"{domain}-{self.part}.jsonl" for domain in DOMAINS] + [f"changing-{self.part}.jsonl"]
        files = [Path(self.texts) / name for name in names]
        files += [Path(folder) / "adapter_model.safetensors" for folder in self.adapters.values()]
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
    """Measure one cell; one that was measured in `out` with the same settings is read back."""
    file, key = out / cell.id / MEASURED, cell.cell_key()
    kept = _read(file)
    if kept is not None and kept["key"] == key:
        return kept
    if cell.asks.startswith("drift"):
        found = read_twice(cell, out)
    else:
        with opened(cell, out) as (model, graft, backbone):
            ask = ask_questions if cell.asks == "questions" else read_documents
            found = ask(cell, model, graft, backbone)
    write_atomically(file, json.dumps({"key": key} | found).encode())
    return found


@contextmanager
def opened(cell: Cell, out: Path) -> Iterator[tuple[Any, Any, Backbone]]:
    """The model of a cell, its graft where it has one, and the backbone, whose tokenizer it reads with."""
    backbone = cell.load()
    if cell.mixes == "xlora":
        yield train_xlora(cell, cell.adapters, out / cell.id), None, backbone
    elif cell.mixes == "arrow":
        yield load_arrow(cell, cell.adapters), None, backbone
    elif cell.mixes == "none":
        yield backbone.model, None, backbone
    else:
        experts = {name: {"path": path} for name, path in cell.adapters.items()}
        routing = {key: value for key, value in cell.routing.items() if key != "examples"}
        graft = build_graft(graft_config({"kind": "token-routing", "experts": experts, **routing}), backbone)
        _fit(graft, cell, out)
        with GraftedModel(backbone, {"graft": graft}) as model:
            yield model, graft, backbone


def _fit(graft: Any, cell: Cell, out: Path) -> None:
    """Give a graft its centroids; those of the same texts and embedder are made once, and kept in `out`."""
    texts = {name: _examples_of(cell, name) for name in cell.adapters}
    said = [cell.key(), graft.config.embedder.model_dump(mode="json"), texts]
    file = out / "centroids" / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]}.safetensors"
    if file.exists():
        graft.load_tensors(load_file(file))
        return
    graft.fit(texts)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save({name: tensor.cpu() for name, tensor in graft.tensors().items()}))


def read_twice(cell: Cell, out: Path) -> dict[str, Any]:
    """How far `keep` is from `recompute`: on right answers after their prompts, or on documents that change domain."""
    said, texts = [], []
    for cache in ("keep", "recompute"):
        with opened(cell.model_copy(update={"routing": {**cell.routing, "cache": cache}}), out) as (model, _, backbone):
            texts = _answers(cell, backbone) if cell.asks == "drift" else _documents(cell, backbone)
            said.append(drift.say(model, backbone, texts, prompts=cell.asks == "drift"))
    return {"metrics": drift.apart(said[0], said[1], texts)}


def _answers(cell: Cell, backbone: Backbone) -> list[drift.Text]:
    """Questions with their right answers, a sixth of those that are asked: `recompute` takes a pass for each route."""
    items = [
        one
        for domain in DOMAINS
        for one in read_items(Path(cell.texts), domain, cell.part)[: max(1, cell.setting.amounts.tested // 6)]
    ]
    return [(_ids(backbone, [one.prompt, one.answer]), len(_ids(backbone, [one.prompt]))) for one in items]


def _documents(cell: Cell, backbone: Backbone) -> list[drift.Text]:
    return [(_ids(backbone, halves), 1) for halves in read_changing(Path(cell.texts), cell.part)]


def ask_questions(cell: Cell, model: Any, graft: Any, backbone: Backbone) -> dict[str, Any]:
    """Log-perplexity of the right answers in nats per token, by domain, and the share of ARC that is chosen right."""
    amounts, tokenizer = cell.setting.amounts, backbone.need_tokenizer()
    asked = {domain: read_items(Path(cell.texts), domain, cell.part)[: amounts.tested] for domain in DOMAINS}
    found: dict[str, float] = {}
    for domain, items in asked.items():
        scores = score_answers(model, tokenizer, [Example(one.prompt, one.answer) for one in items])
        found[f"nll_{domain}"] = scores.nats_per_token
    found["nll_average"] = float(np.mean([found[f"nll_{domain}"] for domain in DOMAINS]))
    if cell.part == "test":
        choices = [one for one in read_items(Path(cell.texts), "science", cell.part) if one.choices]
        found["arc_accuracy"] = choose(model, tokenizer, choices[: amounts.chosen])
    if cell.traced:
        found["routing_accuracy"] = right_share(model, graft, backbone, asked)
    return {"metrics": found}


def choose(model: Any, tokenizer: Any, items: Sequence[Item]) -> float:
    """The share of items whose right answer is the likeliest of its choices, in nats per byte."""
    scores = score_answers(model, tokenizer, [Example(one.prompt, choice) for one in items for choice in one.choices])
    nats, right, start = scores.nats / scores.bytes, 0, 0
    for one in items:
        own = nats[start : start + len(one.choices)]
        right += one.choices[int(own.argmin())] == one.answer
        start += len(one.choices)
    return right / len(items)


def right_share(model: Any, graft: Any, backbone: Backbone, asked: Mapping[str, Sequence[Item]]) -> float:
    """The share of prompts at whose end the domain's own expert has the largest weight."""
    marks = []
    for domain, items in asked.items():
        for one in items:
            _, weights = read_through(model, graft, backbone, [one.prompt])
            marks.append(graft.names[int(weights[-1, :-1].argmax())] == domain)
    return float(np.mean(marks))


def read_documents(cell: Cell, model: Any, graft: Any, backbone: Backbone) -> dict[str, Any]:
    """Nats of every token of the documents that change domain, and the weights of every token."""
    found = []
    for halves in read_changing(Path(cell.texts), cell.part):
        nats, weights = read_through(model, graft, backbone, halves)
        first = len(_ids(backbone, halves[:1]))
        found.append({"nats": nats.tolist(), "first": first, "weights": np.round(weights, 4).tolist()})
    return {"documents": found, "names": graft.names if graft is not None else []}


def read_through(model: Any, graft: Any, backbone: Backbone, texts: Sequence[str]) -> tuple[np.ndarray, Trace]:
    """(T - 1,) nats of every token but the first of some texts in one row, and (T, experts + 1) weights."""
    ids = torch.tensor([_ids(backbone, texts)], device=backbone.device)
    cache = DynamicCache(config=backbone.model.config)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, :-1].float()
        nats = functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().cpu().numpy()
    trace = graft.cache_trace(cache) if graft is not None else None
    return nats, np.zeros((ids.shape[1], 0)) if trace is None else trace.values[0].cpu().numpy()


def _ids(backbone: Backbone, texts: Sequence[str]) -> list[int]:
    """The tokens of texts, each tokenised apart, behind the BOS that belongs there."""
    tokenizer = backbone.need_tokenizer()
    bos = leading_bos(tokenizer)
    pieces = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [*([] if bos is None else [bos]), *(token for piece in pieces for token in piece)]


def _examples_of(cell: Cell, domain: str) -> list[str]:
    """Examples for a centroid, of training alone, drawn by the seed."""
    items = read_items(Path(cell.texts), domain, "train")
    count = min(cell.setting.centroids, len(items))
    drawn = random.Random(f"{domain} {cell.seed}").sample(items, count)
    texts = {"whole": [one.whole for one in drawn], "prompt": [one.prompt for one in drawn]}
    texts["both"] = [*texts["whole"], *texts["prompt"]]
    return texts[cell.routing.get("examples", "whole")]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

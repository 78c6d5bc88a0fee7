"""The cost of a routed mixture of LoRA experts against one adapter, the published merge, X-LoRA and the backbone.

    python benchmarks/token_routing.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in one process, in rounds of alternating order, so that other load affects both.
A row's `ratio` is the median over rounds; its interval is the smallest and the largest. The backbone is a random Llama
whose weights all models share. The experts are random LoRA adapters on q_proj and v_proj, as in the paper, in PEFT
folders that both sides read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pair import bytes_of, count
from peft import PeftModel
from routed import QUICK, Clocked, Reader, RoutingBenchmark, Size, lora_parameters
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from turns import AT_LEAST, AT_MOST, Clock, Turns, command, interval, made_aim, rounds

from composition import ratios
from graftlm.evaluation import Aim, Metric, Results, Row, value_of

NAME = "bench-token-routing"
COUNTS = (2, 8, 32, 128)
LENGTHS = (128, 256, 512, 1024)
READ = 256  # tokens of a text that MiniLM reads
ROWS = {  # row id -> label, aim of its ratio
    "decode_vs_one_lora": ("decoding speed with four experts, over PEFT's with one unmerged adapter", (AT_LEAST, 0.9)),
    **{
        f"published_step_{n}": (f"decoding speed behind {n} tokens, over the published procedure's", None)
        for n in LENGTHS
    },
    **{f"recompute_{n}": (f"decoding speed behind {n} tokens, over a pass without a cache", None) for n in LENGTHS},
    "vs_xlora": ("decoding speed, over PEFT's X-LoRA, which has no cache", None),
    "routing_share": ("routing's share of a decode step", (AT_MOST, 0.03)),
    "batch16_mixed": ("decoding speed of rows with a mixture each, over rows with one mixture", (AT_LEAST, 0.95)),
    "states_quarter": (
        "a decode step routed by states after a quarter of the layers, over one by token embeddings",
        None,
    ),
    "states_last": ("a decode step routed by the last states, over one routed by token embeddings", None),
} | {f"experts_{n}": (f"a decode step with {n} experts loaded, over the bare backbone's", None) for n in COUNTS}
GROWTH = "growth of what experts add to a step, over that of the rank sum, the worst of 2 to 8, 32 and 128"
FLAT = "a decode step with top: 2 of 128 experts, over top: 2 of 2"
HOW = {
    "decode_vs_one_lora": "one forward pass a token behind a cached context, which grows by it; a new route every "
    "second token. bound: what the weights that are read would make of the ratio. ratio_top2: with top: 2, over the "
    "one adapter. ratio_over_bare: over the bare backbone. ratio_over_four: over PEFT with all four adapters active, "
    "each added in full",
    "published_step": "the peer, for one token: the text from its tokens; its embedding by a random encoder of "
    "MiniLM's size, which reads at most 256 tokens; weights by the cosines; add_weighted_adapter('linear') of the four "
    "adapters; tokens from the text; a pass over all of them without a cache. Not counted: its new pipeline, and "
    "deleting the adapter merged before",
    "recompute": "the peer: the pass without a cache alone, with one adapter",
    "vs_xlora": "the peer reads the whole text twice for a token, the first time to find its scalings; behind the "
    "shortest text",
    "routing_share": "seconds inside the graft's prepare, where text is embedded and weighed and routes are "
    "remembered, over those of the whole step, by one clock around each. ratio_longer: behind the longest text. "
    "ratio_every_1: a new route for each token. ratio_prompt: the prompt's route for all",
    "batch16_mixed": "steps of as many rows of different random text, each with its mixture, over those of one of them "
    "as many times. ratio_top2: with top: 2, where different rows need more experts between them",
    "states": "a new route every second token, for which the bare backbone reads both tokens in one pass of its first "
    "layers. ratio_every_1: a new route for each token. ratio_prompt: reading the context, which is read once more. "
    "layers: of the backbone's",
    "experts": "bound: what the weights that are read would make of the ratio. ratio_top2: the two experts of the "
    "largest weights. ratio_changing: these, by the last token alone, so that nearly every token has another pair",
    "memory": "bytes. experts: the four of rank 64, here and in PEFT. routes: beside the keys and values of the "
    "context",
}
MERGED = "merged"

Metrics = dict[str, Metric]
Routed = Mapping[str, tuple[Any, Clocked]]
"""Models with a routing of the four experts, by name."""


def measure_decoding(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], Metrics]:
    """Seconds of a decode step with four experts, of PEFT with one and with four adapters, and bare; and the row."""
    experts = bench.size.experts
    four: Any = bench.peft(experts)
    four.base_model.set_adapter([str(n) for n in range(experts)])
    models = {name: model for name, (model, _) in routed.items()} | {
        "one_lora": bench.peft(1).get_base_model(),
        "four_loras": four.get_base_model(),
        "bare": bench.shared(),
    }
    taken = bench.decode(models, bench.ids(1, bench.size.context), bench.size.decode_rounds)
    backbone, added = count(bench.model), count(routed["routed"][1])
    further = {
        "ratio_over_bare": ratios(taken["bare"], taken["routed"]).model_dump(),
        "ratio_over_four": ratios(taken["four_loras"], taken["routed"]).model_dump(),
    }
    return {"seconds": taken} | further, {
        "ratio": ratios(taken["one_lora"], taken["routed"]),
        "bound": (backbone + added / experts) / (backbone + added),
        "ratio_top2": ratios(taken["one_lora"], taken["routed_top2"]),
    }


def measure_peers(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Turns], dict[str, Metrics]]:
    """Seconds of a token of ours, as published, by recomputation, and by X-LoRA, behind each length; and the rows."""
    size = bench.size
    peft, xlora, encoder = bench.peft(size.experts), bench.xlora(), bench.encoder()
    taken: dict[str, Turns] = {}
    rows: dict[str, Metrics] = {}
    for name, length in zip(LENGTHS, size.lengths, strict=True):
        text = bench.ids(1, length + 1)
        reader = Reader(routed["routed"][0], text[:, :-1])
        turns = {
            "routed": partial(bench.step, reader),
            "published": partial(published_step, bench, peft, encoder, text),
            "recompute": partial(bench.seconds, partial(read_whole, peft.get_base_model(), text)),
        }
        if name == LENGTHS[0]:
            turns["xlora"] = partial(bench.seconds, partial(read_whole, xlora, text))
        of_length = taken[str(name)] = rounds(turns, size.peer_rounds)
        rows[f"published_step_{name}"] = {"ratio": ratios(of_length["published"], of_length["routed"])}
        rows[f"recompute_{name}"] = {"ratio": ratios(of_length["recompute"], of_length["routed"])}
    first = taken[str(LENGTHS[0])]
    return taken, rows | {"vs_xlora": {"ratio": ratios(first["xlora"], first["routed"])}}


def published_step(bench: RoutingBenchmark, peft: PeftModel, encoder: Any, ids: Tensor) -> float:
    """Seconds of one token as published."""
    names = [str(n) for n in range(bench.size.experts)]
    centroids = torch.randn(len(names), bench.size.encoder.width, device=bench.device, dtype=bench.dtype)

    @torch.inference_mode()
    def token() -> None:
        text = bench.tokenizer.decode(ids[0])
        vector = encoder(ids[:, :READ].clamp(max=30_000)).last_hidden_state.mean(1)
        cosines = torch.cosine_similarity(vector, centroids)
        cosines[cosines.argmax()] *= 4
        weights = cosines.softmax(-1).tolist()
        peft.add_weighted_adapter(names, weights, MERGED, combination_type="linear")
        peft.set_adapter(MERGED)
        again = bench.tokenizer(text, return_tensors="pt")["input_ids"].to(bench.device)
        read_whole(peft.get_base_model(), again)

    taken = bench.seconds(token)
    peft.set_adapter("0")
    peft.delete_adapter(MERGED)
    return taken


@torch.inference_mode()
def read_whole(model: Any, text: Tensor) -> None:
    """Predict one token from the whole text."""
    model(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False, logits_to_keep=1)


def measure_share(bench: RoutingBenchmark, graft: Clocked) -> tuple[dict[str, Any], Metrics]:
    """The share of `prepare` in a decode step, round by round; and the row."""
    size = bench.size

    def turn(graft: Clocked, reader: Reader) -> float:
        graft.spent = 0.0
        taken = bench.step(reader) * size.steps
        return graft.spent / taken

    turns = {}
    for name, length, changes in (
        ("ratio", size.context, {}),
        ("ratio_longer", size.longest, {}),
        ("ratio_every_1", size.context, {"every": 1}),
        ("ratio_prompt", size.context, {"reads": "prompt"}),
    ):
        model, own = bench.again(graft, **changes)
        turns[name] = partial(turn, own, Reader(model, bench.ids(1, length)))
    shares = rounds(turns, size.share_rounds)
    intervals = {name: interval(values) for name, values in shares.items()}
    further = {name: intervals.pop(name).model_dump() for name in ("ratio_every_1", "ratio_prompt")}
    return {"shares": shares} | further, dict(intervals)


def measure_states(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], dict[str, Metrics]]:
    """Seconds of decode steps and of prompts, routed by hidden states and by token embeddings; and the rows."""
    size, layers = bench.size, bench.size.shape.layers
    ids = bench.ids(1, size.context)
    taken, rows = {}, {}
    for name, number in (("states_quarter", layers // 4), ("states_last", layers)):
        model, graft = bench.routing(bench.adapters, embedder={"layers": number})
        states_1, tokens_1 = (bench.again(routing, every=1)[0] for routing in (graft, routed["routed"][1]))
        models = {
            "states": model,
            "tokens": routed["routed"][0],
            "states_every_1": states_1,
            "tokens_every_1": tokens_1,
        }
        steps = bench.decode(models, ids, size.share_rounds)
        prompts = rounds(
            {key: partial(bench.seconds, partial(Reader, models[key], ids)) for key in ("states", "tokens")},
            size.share_rounds,
        )
        taken[name] = {"steps": steps, "prompts": prompts}
        rows[name] = {
            "ratio": ratios(steps["states"], steps["tokens"]),
            "ratio_every_1": ratios(steps["states_every_1"], steps["tokens_every_1"]),
            "ratio_prompt": ratios(prompts["states"], prompts["tokens"]),
            "layers": number / layers,
        }
    return taken, rows


def measure_batch(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], Metrics]:
    """Seconds of a step of many rows, with a mixture each and with one; and the row."""
    size = bench.size
    mixed = bench.ids(size.rows, size.short)
    texts = {"mixed": mixed, "one": mixed[:1].repeat(size.rows, 1)}
    readers = {f"{name}_{text}": Reader(routed[name][0], ids) for name in routed for text, ids in texts.items()}
    taken = rounds({name: partial(bench.step, reader) for name, reader in readers.items()}, size.batch_rounds)
    mixtures = {name: mixtures_of(routed[name.rpartition("_")[0]][1], reader) for name, reader in readers.items()}
    return {"seconds": taken, "mixtures": mixtures}, {
        "ratio": ratios(taken["routed_one"], taken["routed_mixed"]),
        "ratio_top2": ratios(taken["routed_top2_one"], taken["routed_top2_mixed"]),
    }


def mixtures_of(graft: Clocked, reader: Reader) -> int:
    """How many different mixtures the rows have now."""
    trace = graft.cache_trace(reader.cache)
    assert trace is not None
    return len(trace.values[:, -1].unique(dim=0))


def measure_experts(bench: RoutingBenchmark, adapters: Sequence[Path]) -> tuple[Turns, Metrics]:
    """Seconds of a decode step with some experts loaded, and bare; and the row."""
    size = bench.size
    model, graft = bench.routing(adapters)
    models = {
        "ratio": model,
        "ratio_top2": bench.again(graft, top=2)[0],
        "ratio_changing": bench.again(graft, top=2, window=1, every=1)[0],
        "bare": bench.shared(),
    }
    taken = bench.decode(models, bench.ids(1, size.short), size.many_rounds)
    metrics: Metrics = {name: ratios(taken[name], taken["bare"]) for name in models if name != "bare"}
    bound = 1 + count(graft) / count(bench.model)
    return taken, metrics | {"rank_sum": len(adapters) * size.low_rank, "bound": bound}


def measure_memory(bench: RoutingBenchmark, graft: Clocked) -> dict[str, int]:
    """Bytes of the four experts here and in PEFT, and of what a generation remembers beside its keys and values."""
    model, own = bench.again(graft)
    reader = Reader(model, bench.ids(1, bench.size.context))
    kept = [layer for layer in reader.cache.layers if isinstance(layer, DynamicLayer)]
    layers = [bytes_of(layer.keys) + bytes_of(layer.values) for layer in kept]
    return {
        "experts": bytes_in(own.parameters()),
        "peft": bytes_in(lora_parameters(bench.peft(bench.size.experts))),
        "keys_and_values": sum(layers[: bench.size.shape.layers]),
        "routes": sum(layers[bench.size.shape.layers :]),
    }


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """The size of the tensors' storages, shared ones counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """All rows, with their aims and details."""
    with TemporaryDirectory() as folder:
        return measure(RoutingBenchmark(size, Path(folder), device, clock))


def measure(bench: RoutingBenchmark) -> Results:
    """All rows, from a benchmark whose adapters exist."""
    load, size, rows = [os.getloadavg()[0]], bench.size, {}
    model, graft = bench.routing(bench.adapters)
    routed: Routed = {"routed": (model, graft), "routed_top2": bench.again(graft, top=2)}
    decoding, row = measure_decoding(bench, routed)
    rows |= print_rows({"decode_vs_one_lora": row})
    peers, of_peers = measure_peers(bench, routed)
    rows |= print_rows(of_peers)
    shares, row = measure_share(bench, graft)
    rows |= print_rows({"routing_share": row})
    states, of_states = measure_states(bench, routed)
    rows |= print_rows(of_states)
    batch, row = measure_batch(bench, routed)
    rows |= print_rows({"batch16_mixed": row})
    memory = measure_memory(bench, graft)
    many, adapters = {}, bench.write(max(COUNTS), size.low_rank)
    for number in COUNTS:
        many[f"experts_{number}"], row = measure_experts(bench, adapters[:number])
        rows |= print_rows({f"experts_{number}": row})
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size) | {"lengths": list(size.lengths)},
        "dtype": str(bench.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": bench.clock,
        "load_average": load,
        "parameters": {"backbone": count(bench.model), "four_experts": count(graft)},
        "how": HOW,
        "decode_vs_one_lora": decoding,
        "peers": {"seconds": peers},
        "routing_share": shares,
        "batch16_mixed": batch,
        "states": {"seconds": states},
        "experts": {"seconds": many},
        "memory": {"bytes": memory},
    }
    made = [Row(id=name, label=label, metrics=rows[name]) for name, (label, _) in ROWS.items()]
    return Results.here(NAME, made, aims=aims(rows, size), details=details)


def print_rows(rows: dict[str, Metrics]) -> dict[str, Metrics]:
    """Print rows, and return them."""
    for name, metrics in rows.items():
        label, aim = ROWS[name]
        values = ", ".join(f"{key} {value_of(value):.4g}" for key, value in metrics.items())
        print(f"{label}: {values}" + (f", aim {aim[0]} {aim[1]:g}" if aim else ""), flush=True)
    return rows


def aims(rows: Mapping[str, Metrics], size: Size) -> list[Aim]:
    """The aims; they hold for the full size, so a quick run measures none."""
    known: dict[str, Any] = (
        {} if size == QUICK else {name: value_of(metrics["ratio"]) for name, metrics in rows.items()}
    )
    made = [made_aim(label, "ratio", aim, known.get(name)) for name, (label, aim) in ROWS.items() if aim is not None]
    made.append(made_aim(GROWTH, "ratio", (AT_MOST, 1.0), growth(rows) if known else None))
    return [*made, made_aim(FLAT, "ratio_top2", (AT_MOST, 1.05), spread(rows) if known else None)]


def growth(rows: Mapping[str, Metrics]) -> float:
    """The largest growth of the experts' cost from one count to the next, relative to that of the rank sum."""
    added = [max(value_of(rows[f"experts_{n}"]["ratio"]) - 1, 1e-3) for n in COUNTS]
    return max((b / a) / (m / n) for (a, b), (n, m) in zip(pairwise(added), pairwise(COUNTS), strict=True))


def spread(rows: Mapping[str, Metrics]) -> float:
    """A step with the most experts over a step with the fewest, both with top: 2."""
    fewest, most = (value_of(rows[f"experts_{n}"]["ratio_top2"]) for n in (min(COUNTS), max(COUNTS)))
    return most / fewest


def main() -> None:
    """Measure, print, and write `results.json`, `report.md` and a plot."""
    command(
        NAME,
        "What a routed mixture of LoRA experts costs, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else Size(), device, clock),
        {name: aim and aim[1] for name, (_, aim) in ROWS.items()},
    )


if __name__ == "__main__":
    main()

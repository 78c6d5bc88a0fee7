"""The cost of a routed mixture of LoRA experts compared with one adapter, the published merge, X-LoRA and the backbone.

    python benchmarks/token_routing.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in one process, in rounds of alternating order, so that other load affects both.
The `ratio` of a row is the median over the rounds; its interval is the smallest and the largest value. The backbone is
a random Llama whose weights all models share. The experts are random LoRA adapters on q_proj and v_proj, as in the
paper, in PEFT folders that both sides read.
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
ROWS: dict[str, tuple[str, tuple[str, float] | None]] = {  # row id -> label, aim of its ratio
    "decode_vs_one_lora": ("decoding speed with four experts, over PEFT's with one unmerged adapter", (AT_LEAST, 0.9)),
    **{
        f"published_step_{n}": (f"decoding speed after {n} tokens, over the published procedure's", None)
        for n in LENGTHS
    },
    **{f"recompute_{n}": (f"decoding speed after {n} tokens, over a pass without a cache", None) for n in LENGTHS},
    "vs_xlora": ("decoding speed, over PEFT's X-LoRA, which has no cache", None),
    "routing_share": ("routing's share of a decode step", (AT_MOST, 0.03)),
    "batch16_mixed": ("decoding speed of rows with different mixtures, over rows with one mixture", (AT_LEAST, 0.95)),
    "states_quarter": (
        "a decode step routed by states after a quarter of the layers, over one by token embeddings",
        None,
    ),
    "states_last": ("a decode step routed by the last states, over one routed by token embeddings", None),
    **{f"experts_{n}": (f"a decode step with {n} experts loaded, over the bare backbone's", None) for n in COUNTS},
}
GROWTH = "growth of the time that experts add to a step, over that of the rank sum, the worst of 2 to 8, 32 and 128"
FLAT = "a decode step with top: 2 of 128 experts, over top: 2 of 2"
HOW = {
    "decode_vs_one_lora": "one forward pass per token after a cached context, which grows by the token; a new route at "
    "every second token. bound: the ratio if the time were that of reading the weights. ratio_top2: with top: 2, over "
    "the one adapter. ratio_over_bare: over the bare backbone. ratio_over_four: over PEFT with all four adapters "
    "active, each added in full",
    "published_step": "the peer, for one token: the text from its tokens; its embedding by a random encoder of "
    "MiniLM's size, which reads at most 256 tokens; weights by the cosines; add_weighted_adapter('linear') of the four "
    "adapters; tokens from the text; a pass over all of them without a cache. Not counted: its new pipeline, and "
    "deleting the previously merged adapter",
    "recompute": "the peer: only the pass without a cache, with one adapter",
    "vs_xlora": "the peer reads the whole text twice for a token, the first time in order to compute its scalings; "
    "after the shortest text",
    "routing_share": "seconds inside the graft's prepare, where text is embedded, weights are computed and routes are "
    "stored, over the seconds of the whole step, by the same clock. ratio_longer: after the longest text. "
    "ratio_every_1: a new route for each token. ratio_prompt: the route of the prompt for all tokens",
    "batch16_mixed": "steps of many rows of different random text with different mixtures, over steps of equal rows. "
    "ratio_top2: with top: 2, where different rows together need more experts",
    "states": "a new route at every second token, for which the bare backbone reads both tokens in one pass of its "
    "first layers. ratio_every_1: a new route for each token. ratio_prompt: reading the context, which is read once "
    "more. layers: share of the backbone's layers",
    "experts": "bound: the ratio if the time were that of reading the weights. ratio_top2: the two experts of the "
    "largest weights. ratio_changing: the same, by the last token alone, so that nearly every token has another pair",
    "memory": "bytes. experts: the four of rank 64, here and in PEFT. routes: in addition to the keys and values of "
    "the context",
}
MERGED = "merged"

Metrics = dict[str, Metric]
Routed = Mapping[str, tuple[Any, Clocked]]
"""Models with a routing of the four experts, by name."""


def measure_decoding(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], Metrics]:
    """Measure a decode step with four experts, of PEFT with one and with four adapters, and of the bare backbone.

    Returns:
        The details, and the metrics of the row.
    """
    experts = bench.size.experts
    four: Any = bench.peft(experts)
    four.base_model.set_adapter([str(n) for n in range(experts)])
    models = {name: model for name, (model, _) in routed.items()}
    models["one_lora"] = bench.peft(1).get_base_model()
    models["four_loras"] = four.get_base_model()
    models["bare"] = bench.shared()
    step_seconds = bench.decode(models, bench.ids(1, bench.size.context), bench.size.decode_rounds)
    backbone = count(bench.model)
    added = count(routed["routed"][1])
    details = {
        "seconds": step_seconds,
        "ratio_over_bare": ratios(step_seconds["bare"], step_seconds["routed"]).model_dump(),
        "ratio_over_four": ratios(step_seconds["four_loras"], step_seconds["routed"]).model_dump(),
    }
    metrics: Metrics = {
        "ratio": ratios(step_seconds["one_lora"], step_seconds["routed"]),
        "bound": (backbone + added / experts) / (backbone + added),
        "ratio_top2": ratios(step_seconds["one_lora"], step_seconds["routed_top2"]),
    }
    return details, metrics


def measure_peers(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Turns], dict[str, Metrics]]:
    """Measure a token with a routing, as published, by recomputation, and by X-LoRA, after texts of each length.

    Returns:
        The seconds by length, and the metrics of the rows.
    """
    size = bench.size
    peft = bench.peft(size.experts)
    xlora = bench.xlora()
    encoder = bench.encoder()
    by_length: dict[str, Turns] = {}
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
        measured = rounds(turns, size.peer_rounds)
        by_length[str(name)] = measured
        rows[f"published_step_{name}"] = {"ratio": ratios(measured["published"], measured["routed"])}
        rows[f"recompute_{name}"] = {"ratio": ratios(measured["recompute"], measured["routed"])}
    shortest = by_length[str(LENGTHS[0])]
    rows["vs_xlora"] = {"ratio": ratios(shortest["xlora"], shortest["routed"])}
    return by_length, rows


def published_step(bench: RoutingBenchmark, peft: PeftModel, encoder: Any, ids: Tensor) -> float:
    """Return the seconds of one token by the published procedure."""
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

    token_seconds = bench.seconds(token)
    peft.set_adapter("0")
    peft.delete_adapter(MERGED)
    return token_seconds


@torch.inference_mode()
def read_whole(model: Any, text: Tensor) -> None:
    """Predict one token from the whole text."""
    model(
        input_ids=text,
        attention_mask=torch.ones_like(text),
        use_cache=False,
        logits_to_keep=1,
    )


def measure_share(bench: RoutingBenchmark, graft: Clocked) -> tuple[dict[str, Any], Metrics]:
    """Measure the share of `prepare` in a decode step.

    Returns:
        The details, and the metrics of the row.
    """
    size = bench.size

    def share(graft: Clocked, reader: Reader) -> float:
        graft.spent = 0.0
        step_seconds = bench.step(reader) * size.steps
        return graft.spent / step_seconds

    variants: dict[str, tuple[int, dict[str, Any]]] = {  # length of the context, changes of the config
        "ratio": (size.context, {}),
        "ratio_longer": (size.longest, {}),
        "ratio_every_1": (size.context, {"every": 1}),
        "ratio_prompt": (size.context, {"reads": "prompt"}),
    }
    turns = {}
    for name, (length, changes) in variants.items():
        model, changed = bench.again(graft, **changes)
        turns[name] = partial(share, changed, Reader(model, bench.ids(1, length)))
    shares = rounds(turns, size.share_rounds)
    details = {
        "shares": shares,
        "ratio_every_1": interval(shares["ratio_every_1"]).model_dump(),
        "ratio_prompt": interval(shares["ratio_prompt"]).model_dump(),
    }
    metrics: Metrics = {
        "ratio": interval(shares["ratio"]),
        "ratio_longer": interval(shares["ratio_longer"]),
    }
    return details, metrics


def measure_states(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], dict[str, Metrics]]:
    """Measure decode steps and prompts routed by hidden states, and the same routed by token embeddings.

    Returns:
        The seconds, and the metrics of the rows.
    """
    layers = bench.size.shape.layers
    seconds: dict[str, Any] = {}
    rows: dict[str, Metrics] = {}
    for name, number in (("states_quarter", layers // 4), ("states_last", layers)):
        seconds[name], rows[name] = measure_states_after(bench, routed, number)
    return seconds, rows


def measure_states_after(bench: RoutingBenchmark, routed: Routed, number: int) -> tuple[dict[str, Turns], Metrics]:
    """Measure decode steps and prompts routed by the hidden states after `number` layers; see `measure_states`."""
    size = bench.size
    ids = bench.ids(1, size.context)
    model, graft = bench.routing(bench.adapters, embedder={"layers": number})
    tokens_model, tokens_graft = routed["routed"]
    models = {
        "states": model,
        "tokens": tokens_model,
        "states_every_1": bench.again(graft, every=1)[0],
        "tokens_every_1": bench.again(tokens_graft, every=1)[0],
    }
    steps = bench.decode(models, ids, size.share_rounds)
    prompt_turns = {
        "states": partial(bench.seconds, partial(Reader, model, ids)),
        "tokens": partial(bench.seconds, partial(Reader, tokens_model, ids)),
    }
    prompts = rounds(prompt_turns, size.share_rounds)
    metrics: Metrics = {
        "ratio": ratios(steps["states"], steps["tokens"]),
        "ratio_every_1": ratios(steps["states_every_1"], steps["tokens_every_1"]),
        "ratio_prompt": ratios(prompts["states"], prompts["tokens"]),
        "layers": number / size.shape.layers,
    }
    return {"steps": steps, "prompts": prompts}, metrics


def measure_batch(bench: RoutingBenchmark, routed: Routed) -> tuple[dict[str, Any], Metrics]:
    """Measure a step of many rows, with a different mixture for each row and with the same one.

    Returns:
        The details, and the metrics of the row.
    """
    size = bench.size
    mixed = bench.ids(size.rows, size.short)
    texts = {"mixed": mixed, "one": mixed[:1].repeat(size.rows, 1)}
    readers: dict[tuple[str, str], Reader] = {}
    for name, (model, _) in routed.items():
        for text, ids in texts.items():
            readers[name, text] = Reader(model, ids)
    turns = {f"{name}_{text}": partial(bench.step, reader) for (name, text), reader in readers.items()}
    measured = rounds(turns, size.batch_rounds)
    mixtures = {}
    for (name, text), reader in readers.items():
        mixtures[f"{name}_{text}"] = count_mixtures(routed[name][1], reader)
    metrics: Metrics = {
        "ratio": ratios(measured["routed_one"], measured["routed_mixed"]),
        "ratio_top2": ratios(measured["routed_top2_one"], measured["routed_top2_mixed"]),
    }
    return {"seconds": measured, "mixtures": mixtures}, metrics


def count_mixtures(graft: Clocked, reader: Reader) -> int:
    """Return the number of different mixtures of the rows at the last token."""
    trace = graft.cache_trace(reader.cache)
    assert trace is not None
    return len(trace.values[:, -1].unique(dim=0))


def measure_experts(bench: RoutingBenchmark, adapters: Sequence[Path]) -> tuple[Turns, Metrics]:
    """Measure a decode step with experts loaded, and of the bare backbone.

    Returns:
        The seconds, and the metrics of the row.
    """
    size = bench.size
    model, graft = bench.routing(adapters)
    models = {
        "ratio": model,
        "ratio_top2": bench.again(graft, top=2)[0],
        "ratio_changing": bench.again(graft, top=2, window=1, every=1)[0],
        "bare": bench.shared(),
    }
    measured = bench.decode(models, bench.ids(1, size.short), size.many_rounds)
    metrics: Metrics = {}
    for name in ("ratio", "ratio_top2", "ratio_changing"):
        metrics[name] = ratios(measured[name], measured["bare"])
    metrics["rank_sum"] = len(adapters) * size.low_rank
    metrics["bound"] = 1 + count(graft) / count(bench.model)
    return measured, metrics


def measure_memory(bench: RoutingBenchmark, graft: Clocked) -> dict[str, int]:
    """Measure the bytes of four experts here and in PEFT, and of the layers of a generation's cache."""
    model, own = bench.again(graft)
    reader = Reader(model, bench.ids(1, bench.size.context))
    layers = [layer for layer in reader.cache.layers if isinstance(layer, DynamicLayer)]
    layer_bytes = [bytes_of(layer.keys) + bytes_of(layer.values) for layer in layers]
    backbone_layers = bench.size.shape.layers
    return {
        "experts": storage_bytes(own.parameters()),
        "peft": storage_bytes(lora_parameters(bench.peft(bench.size.experts))),
        "keys_and_values": sum(layer_bytes[:backbone_layers]),
        "routes": sum(layer_bytes[backbone_layers:]),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; shared ones are counted once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """Measure all rows, and return them with their aims and details."""
    with TemporaryDirectory() as folder:
        return measure(RoutingBenchmark(size, Path(folder), device, clock))


def measure(bench: RoutingBenchmark) -> Results:
    """Measure all rows with a benchmark whose adapters are written."""
    load = [os.getloadavg()[0]]
    size = bench.size
    rows: dict[str, Metrics] = {}
    model, graft = bench.routing(bench.adapters)
    routed: Routed = {"routed": (model, graft), "routed_top2": bench.again(graft, top=2)}

    def add(new: dict[str, Metrics]) -> None:
        rows.update(new)
        for name, metrics in new.items():
            print_row(name, metrics)

    decoding, row = measure_decoding(bench, routed)
    add({"decode_vs_one_lora": row})
    peers, peer_rows = measure_peers(bench, routed)
    add(peer_rows)
    shares, row = measure_share(bench, graft)
    add({"routing_share": row})
    states, state_rows = measure_states(bench, routed)
    add(state_rows)
    batch, row = measure_batch(bench, routed)
    add({"batch16_mixed": row})
    memory = measure_memory(bench, graft)
    adapters = bench.write(max(COUNTS), size.low_rank)
    many: dict[str, Turns] = {}
    for number in COUNTS:
        many[f"experts_{number}"], row = measure_experts(bench, adapters[:number])
        add({f"experts_{number}": row})
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


def print_row(name: str, metrics: Metrics) -> None:
    """Print the metrics of a row, and its aim."""
    label, aim = ROWS[name]
    values = ", ".join(f"{key} {value_of(value):.4g}" for key, value in metrics.items())
    aim_text = f", aim {aim[0]} {aim[1]:g}" if aim else ""
    print(f"{label}: {values}{aim_text}", flush=True)


def aims(rows: Mapping[str, Metrics], size: Size) -> list[Aim]:
    """Return the aims; they apply to the full size, so a quick run does not judge them."""
    is_judged = size != QUICK
    made = []
    for name, (label, aim) in ROWS.items():
        if aim is not None:
            value = value_of(rows[name]["ratio"]) if is_judged else None
            made.append(made_aim(label, "ratio", aim, value))
    made.append(made_aim(GROWTH, "ratio", (AT_MOST, 1.0), growth(rows) if is_judged else None))
    made.append(made_aim(FLAT, "ratio_top2", (AT_MOST, 1.05), spread(rows) if is_judged else None))
    return made


def growth(rows: Mapping[str, Metrics]) -> float:
    """Return the largest growth of the experts' cost from one count to the next, relative to that of the rank sum."""
    costs = {}
    for number in COUNTS:
        costs[number] = max(value_of(rows[f"experts_{number}"]["ratio"]) - 1, 1e-3)
    return max((costs[more] / costs[fewer]) / (more / fewer) for fewer, more in pairwise(COUNTS))


def spread(rows: Mapping[str, Metrics]) -> float:
    """Return a step with the most experts over a step with the fewest, both with top: 2."""
    fewest = value_of(rows[f"experts_{min(COUNTS)}"]["ratio_top2"])
    most = value_of(rows[f"experts_{max(COUNTS)}"]["ratio_top2"])
    return most / fewest


def run(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run the benchmark with small models (`quick`) or full ones."""
    return benchmark(QUICK if quick else Size(), device, clock)


def main() -> None:
    """Measure, print, and write `results.json`, `report.md` and a plot."""
    command(
        NAME,
        "The cost of a routed mixture of LoRA experts, in ratios.",
        run,
        {name: aim[1] if aim else None for name, (_, aim) in ROWS.items()},
    )


if __name__ == "__main__":
    main()

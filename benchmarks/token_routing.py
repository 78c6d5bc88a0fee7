"""What a routed mixture of LoRA experts costs beside one adapter, the published merge, X-LoRA and the bare backbone.

    python benchmarks/token_routing.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

What is compared runs in one process, turn by turn, in rounds of alternating order, so that whatever else the machine
does falls on both sides of a ratio. A row's `ratio` is the median over rounds, its interval the smallest and the
largest. The backbone is a random Llama, whose weights all models of a comparison share; the experts are random LoRA
adapters on q_proj and v_proj, as in the paper, that PEFT wrote into folders and both sides read.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerFast
from turns import Clock, Turns, draw, interval, rounds, seconds

from composition import Shape, bytes_of, count, random_llama, ratios
from graftlm.backbone import Backbone, Call
from graftlm.evaluation import Aim, Metric, Results, Row, value_of, write_report
from graftlm.grafts import GraftedModel
from graftlm.grafts.token_routing import TokenRouting, TokenRoutingConfig

NAME = "bench-token-routing"
AT_MOST, AT_LEAST = "at most", "at least"
COUNTS = (2, 8, 32, 128)
ROWS = {  # row id -> label, aim of its ratio
    "decode_vs_one_lora": ("decoding speed with four experts, over PEFT's with one unmerged adapter", (AT_LEAST, 0.9)),
    "vs_published_merge": ("decoding speed, over the published merge of adapters for every token", (AT_LEAST, 20.0)),
    "vs_xlora": ("decoding speed, over PEFT's X-LoRA, which has no cache", None),
    "routing_share": ("routing's share of a decode step", (AT_MOST, 0.03)),
    "batch16_mixed": ("decoding speed of rows with a mixture each, over rows with one mixture", (AT_LEAST, 0.95)),
} | {f"experts_{n}": (f"a decode step with {n} experts loaded, over the bare backbone's", None) for n in COUNTS}
GROWTH = "growth of what experts add to a step, over that of the rank sum, the worst of 2 to 8, 32 and 128: at most 1"
FLAT = "a decode step with top: 2 of 128 experts, over top: 2 of 2: at most 1.05"
HOW = {
    "decode_vs_one_lora": "one forward pass a token behind a cached context, which grows by it; a new route every "
    "second token. bound: what the weights that are read would make of the ratio. ratio_top2: with top: 2, over the "
    "one adapter. ratio_over_bare: over the bare backbone. ratio_over_four: over PEFT with all four adapters active, "
    "each added in full",
    "vs_published_merge": "the peer: add_weighted_adapter('linear') of the four adapters, then a pass over the whole "
    "text without a cache, for one token. Not counted: its embedding of the text, its new pipeline, its way through "
    "text, and deleting the adapter merged before. As many of its tokens are timed as there are rounds, all of one "
    "length of text, behind which our steps are timed as well: the context's, and in ratio_longer the longer one",
    "vs_xlora": "the peer reads the whole text twice for a token, the first time to find its scalings; otherwise as "
    "above",
    "routing_share": "seconds inside the graft's prepare, where text is embedded and weighed and routes are "
    "remembered, over those of the whole step, by one clock around each. ratio_longer: behind the longest text. "
    "ratio_every_1: a new route for each token. ratio_prompt: the prompt's route for all",
    "batch16_mixed": "steps of as many rows of different random text, each with its mixture, over those of one of them "
    "as many times. ratio_top2: with top: 2, where different rows need more experts between them",
    "experts": "bound: what the weights that are read would make of the ratio. ratio_top2: the two experts of the "
    "largest weights. ratio_changing: these, by the last token alone, so that nearly every token has another pair",
    "memory": "bytes. experts: the four of rank 64, here and in PEFT. routes: beside the keys and values of the "
    "context",
}
SHAPE, QUICK_SHAPE = Shape(1024, 2816, 24, 16), Shape(64, 128, 4, 4)
SPECIAL = {"eos_token": "<eos>", "unk_token": "<unk>"}
MERGED, PAPERS_WEIGHTS = "merged", [0.668, 0.122, 0.110, 0.100]


@dataclass(frozen=True)
class Size:
    """How large the model and the work are."""

    shape: Shape = SHAPE
    vocabulary: int = 32_000
    experts: int = 4
    rank: int = 64
    low_rank: int = 16
    """Of each of many experts."""
    context: int = 128
    longer: int = 256
    longest: int = 512
    rows: int = 16
    short: int = 32
    """The context of many rows, and of many experts."""
    steps: int = 2
    """Decode steps per turn."""
    decode_rounds: int = 11
    peer_rounds: int = 3
    share_rounds: int = 5
    batch_rounds: int = 5
    many_rounds: int = 5


QUICK = Size(
    QUICK_SHAPE,
    vocabulary=512,
    rank=8,
    low_rank=2,
    context=16,
    longer=32,
    longest=64,
    short=16,
    decode_rounds=3,
    peer_rounds=3,
    share_rounds=3,
    batch_rounds=3,
    many_rounds=3,
)


class Bench:
    """A random backbone, adapters for it in folders, and what is made of them; all share the backbone's weights."""

    def __init__(self, size: Size, folder: Path, device: torch.device, clock: Clock) -> None:
        self.size, self.device, self.folder = size, device, folder
        self.clock: Clock = clock
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Any = random_llama(size.shape, size.vocabulary, 0).to(device, self.dtype)  # type: ignore[arg-type]
        self.tokenizer = word_tokenizer(size.vocabulary)
        self.adapters = self.write(size.experts, size.rank)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes."""
        return seconds(work, self.device, self.clock)

    def write(self, number: int, rank: int) -> list[Path]:
        """So many adapters of random factors, as PEFT writes them."""
        config = LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft = get_peft_model(self.shared(), config)
        generator = torch.Generator().manual_seed(1)
        folders = [self.folder / f"rank-{rank}-{n}" for n in range(number)]
        for folder in folders:
            with torch.no_grad():
                for parameter in lora_parameters(peft):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            peft.save_pretrained(str(folder), save_embedding_layers=False)
        return folders

    def shared(self) -> Any:
        """The backbone as a model of its own, with the same weights in memory."""
        return copy.deepcopy(self.model, {id(one): one for one in self.model.parameters()})

    def routed(self, graft: TokenRouting, backbone: Backbone) -> Any:
        """A model with a routing."""
        return GraftedModel(backbone, {"graft": graft}).eval().model

    def routing(self, adapters: Sequence[Path]) -> tuple[Any, Clocked]:
        """A model with a routing between adapters, and the routing."""
        experts = {f"expert{n}": {"path": str(folder)} for n, folder in enumerate(adapters)}
        backbone = self.backbone()
        graft = Clocked(TokenRoutingConfig.parse({"experts": experts}), backbone, self.clock)
        graft.fit({name: [random_words(n, self.size.vocabulary)] for n, name in enumerate(experts)})
        return self.routed(graft, backbone), graft

    def again(self, graft: Clocked, **changes: Any) -> tuple[Any, Clocked]:
        """Another model with the same experts in memory, told otherwise."""
        other = copy.copy(graft)
        other.config = graft.config.model_copy(update=changes)
        return self.routed(other, self.backbone()), other

    def backbone(self) -> Backbone:
        """A backbone of its own, with the same weights."""
        return Backbone.wrap(self.shared(), self.tokenizer, "a random Llama")

    def peft(self, number: int) -> PeftModel:
        """PEFT with the first so many adapters, unmerged, and the first of them active."""
        first, *others = self.adapters[:number]
        peft = PeftModel.from_pretrained(self.shared(), str(first), "0", autocast_adapter_dtype=False)
        for n, folder in enumerate(others, 1):
            peft.load_adapter(str(folder), str(n), autocast_adapter_dtype=False)
        return peft.eval()

    def xlora(self) -> Any:
        """PEFT's X-LoRA with all adapters, its classifier as it starts."""
        model = self.shared()
        model.config.use_cache = False
        adapters = {str(n): str(folder) for n, folder in enumerate(self.adapters)}
        config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=self.size.shape.width, adapters=adapters)
        return get_peft_model(model, config, autocast_adapter_dtype=False).to(self.dtype).eval()

    def ids(self, rows: int, length: int, seed: int = 3) -> Tensor:
        """Random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, self.size.vocabulary, (rows, length), generator=generator).to(self.device)

    def step(self, reader: Reader) -> float:
        """Seconds of a decode step, of which one in two takes a new route."""
        steps = self.size.steps
        return self.seconds(lambda: reader.step(steps)) / steps

    def decode(self, models: Mapping[str, Any], ids: Tensor, count: int) -> Turns:
        """Seconds of each model's decode step behind the same text, in turns."""
        readers = {name: Reader(model, ids) for name, model in models.items()}
        return rounds({name: partial(self.step, reader) for name, reader in readers.items()}, count)


class Clocked(TokenRouting):
    """A routing that counts the seconds of its `prepare`, by a clock around it."""

    def __init__(self, config: TokenRoutingConfig, backbone: Backbone, clock: Clock) -> None:
        super().__init__(config, backbone)
        self.spent, self._device = 0.0, backbone.device
        self._clock: Clock = clock

    def prepare(self, call: Call) -> None:
        self.spent += seconds(lambda: TokenRouting.prepare(self, call), self._device, self._clock)


Metrics = dict[str, Metric]
Routed = Mapping[str, tuple[Any, Clocked]]
"""Models with a routing of the four experts, by name."""


class Reader:
    """A model that reads random text on and on, with a cache.

    Args:
        model: it.
        ids: (B, T) the text before.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model = model
        self.cache = DynamicCache(config=model.config)
        generator = torch.Generator().manual_seed(4)
        more = torch.randint(2, model.config.vocab_size, (1, 256), generator=generator)
        self._more, self._next = more.to(ids.device).expand(len(ids), -1), 0
        self._read(ids)

    @torch.inference_mode()
    def _read(self, ids: Tensor) -> None:
        length = self.cache.get_seq_length() + ids.shape[1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        self._model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self, number: int) -> None:
        """Read so many more tokens, one by one."""
        for _ in range(number):
            self._read(self._more[:, self._next : self._next + 1])
            self._next += 1


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Every token is a word; the first two are special."""
    words = [*SPECIAL.values(), *(f"w{n}" for n in range(len(SPECIAL), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def random_words(seed: int, vocabulary: int) -> str:
    """Text for a centroid."""
    generator = torch.Generator().manual_seed(100 + seed)
    return " ".join(f"w{n}" for n in torch.randint(2, vocabulary, (64,), generator=generator).tolist())


def lora_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The factors of PEFT's adapters."""
    return [parameter for name, parameter in module.named_parameters() if ".lora_" in name]


def measure_decoding(bench: Bench, routed: Routed) -> tuple[dict[str, Any], Metrics]:
    """Seconds of a decode step with four experts, of PEFT with one and with four adapters, and bare; and the row."""
    experts = bench.size.experts
    four = bench.peft(experts)
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


def measure_peers(bench: Bench, routed: Routed) -> tuple[dict[str, Turns], dict[str, Metrics]]:
    """Seconds of a token of ours, by the published merge, and by X-LoRA; and both rows."""
    size = bench.size
    peft, xlora = bench.peft(size.experts), bench.xlora()
    taken = {}
    for name, length in (("context", size.context), ("longer", size.longer)):
        text = bench.ids(1, length + 1)
        reader = Reader(routed["routed"][0], text[:, :-1])
        turns = {"routed": partial(bench.step, reader), "published": partial(merge_and_read, bench, peft, text)}
        if name == "context":
            turns["xlora"] = partial(bench.seconds, partial(read_whole, xlora, text))
        taken[name] = rounds(turns, size.peer_rounds)
    context, longer = taken["context"], taken["longer"]
    return taken, {
        "vs_published_merge": {
            "ratio": ratios(context["published"], context["routed"]),
            "ratio_longer": ratios(longer["published"], longer["routed"]),
        },
        "vs_xlora": {"ratio": ratios(context["xlora"], context["routed"])},
    }


def merge_and_read(bench: Bench, peft: PeftModel, text: Tensor) -> float:
    """Seconds of one token as published."""
    names = [str(n) for n in range(bench.size.experts)]

    def token() -> None:
        peft.add_weighted_adapter(names, PAPERS_WEIGHTS, MERGED, combination_type="linear")
        peft.set_adapter(MERGED)
        read_whole(peft.get_base_model(), text)

    taken = bench.seconds(token)
    peft.set_adapter("0")
    peft.delete_adapter(MERGED)
    return taken


@torch.inference_mode()
def read_whole(model: Any, text: Tensor) -> None:
    """Predict one token from the whole text."""
    model(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False, logits_to_keep=1)


def measure_share(bench: Bench, graft: Clocked) -> tuple[dict[str, Any], Metrics]:
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
    found = {name: interval(some) for name, some in shares.items()}
    further = {name: found.pop(name).model_dump() for name in ("ratio_every_1", "ratio_prompt")}
    return {"shares": shares} | further, dict(found)


def measure_batch(bench: Bench, routed: Routed) -> tuple[dict[str, Any], Metrics]:
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
    trace = graft.trace(reader.cache)
    assert trace is not None
    return len(trace.values[:, -1].unique(dim=0))


def measure_experts(bench: Bench, adapters: Sequence[Path]) -> tuple[Turns, Metrics]:
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
    found: Metrics = {name: ratios(taken[name], taken["bare"]) for name in models if name != "bare"}
    bound = 1 + count(graft) / count(bench.model)
    return taken, found | {"rank_sum": len(adapters) * size.low_rank, "bound": bound}


def measure_memory(bench: Bench, graft: Clocked) -> dict[str, int]:
    """Bytes of the four experts here and in PEFT, and of what a generation remembers beside its keys and values."""
    model, own = bench.again(graft)
    reader = Reader(model, bench.ids(1, bench.size.context))
    layers = [bytes_of(layer.keys) + bytes_of(layer.values) for layer in reader.cache.layers]  # type: ignore[union-attr]
    return {
        "experts": bytes_in(own.parameters()),
        "peft": bytes_in(lora_parameters(bench.peft(bench.size.experts))),
        "keys_and_values": sum(layers[: bench.size.shape.layers]),
        "routes": sum(layers[bench.size.shape.layers :]),
    }


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """What tensors hold, each piece of memory once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """All rows, with their aims and what belongs to them."""
    with TemporaryDirectory() as folder:
        return measure(Bench(size, Path(folder), device, clock))


def measure(bench: Bench) -> Results:
    """The same, in a folder of adapters."""
    load, size, rows = [os.getloadavg()[0]], bench.size, {}
    model, graft = bench.routing(bench.adapters)
    routed: Routed = {"routed": (model, graft), "routed_top2": bench.again(graft, top=2)}
    decoding, row = measure_decoding(bench, routed)
    rows |= told({"decode_vs_one_lora": row})
    peers, of_peers = measure_peers(bench, routed)
    rows |= told(of_peers)
    shares, row = measure_share(bench, graft)
    rows |= told({"routing_share": row})
    batch, row = measure_batch(bench, routed)
    rows |= told({"batch16_mixed": row})
    memory = measure_memory(bench, graft)
    many, adapters = {}, bench.write(max(COUNTS), size.low_rank)
    for number in COUNTS:
        many[f"experts_{number}"], row = measure_experts(bench, adapters[:number])
        rows |= told({f"experts_{number}": row})
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size),
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
        "experts": {"seconds": many},
        "memory": {"bytes": memory},
    }
    made = [Row(id=name, label=label, metrics=rows[name]) for name, (label, _) in ROWS.items()]
    return Results.here(NAME, made, aims=aims(rows, size), details=details)


def told(rows: dict[str, Metrics]) -> dict[str, Metrics]:
    """Rows as they are, which are printed as well."""
    for name, metrics in rows.items():
        label, aim = ROWS[name]
        values = ", ".join(f"{key} {value_of(value):.4g}" for key, value in metrics.items())
        print(f"{label}: {values}" + (f", aim {aim[0]} {aim[1]:g}" if aim else ""), flush=True)
    return rows


def aims(rows: Mapping[str, Metrics], size: Size) -> list[Aim]:
    """What the figures should be of a model of this size; a small one says nothing about them."""
    wanted = [
        (f"{label}: {aim[0]} {aim[1]:g}", "ratio", *aim, value_of(rows[name]["ratio"]))
        for name, (label, aim) in ROWS.items()
        if aim is not None
    ]
    wanted += [(GROWTH, "ratio", AT_MOST, 1.0, growth(rows)), (FLAT, "ratio_top2", AT_MOST, 1.05, spread(rows))]
    made = []
    for text, metric, side, value, measured in wanted:
        met = measured <= value if side == AT_MOST else measured >= value
        known: dict[str, Any] = {} if size == QUICK else {"measured": measured, "met": met}
        made.append(Aim(text=text, metric=metric, aim=value, **known))
    return made


def growth(rows: Mapping[str, Metrics]) -> float:
    """How much faster than the rank sum the cost of experts grows from a number to the next, at worst."""
    added = [max(value_of(rows[f"experts_{n}"]["ratio"]) - 1, 1e-3) for n in COUNTS]
    return max((b / a) / (m / n) for (a, b), (n, m) in zip(pairwise(added), pairwise(COUNTS), strict=True))


def spread(rows: Mapping[str, Metrics]) -> float:
    """A step with the most experts over one with the fewest, two of them in use."""
    fewest, most = (value_of(rows[f"experts_{n}"]["ratio_top2"]) for n in (min(COUNTS), max(COUNTS)))
    return most / fewest


def main() -> None:
    """Measure, print, and write `results.json`, `report.md` and a plot."""
    parser = argparse.ArgumentParser(description="What a routed mixture of LoRA experts costs, in ratios.")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-token-routing"))
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: own time, for a busy machine")
    chosen = parser.parse_args()
    results = benchmark(QUICK if chosen.quick else Size(), torch.device(chosen.device), chosen.clock)
    marks = {name: aim and aim[1] for name, (_, aim) in ROWS.items()}
    write_report(results, chosen.out, plots={"ratios": draw(results, marks, "ratio", logarithmic=True)})
    print(f"written to {chosen.out}")


if __name__ == "__main__":
    main()

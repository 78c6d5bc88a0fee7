"""Fills placeholders of pages with tables that are generated from the code.

<!-- keys of module.Class -->   the keys of a config
<!-- verbs -->                  the verbs of `graft`
<!-- grafts -->                 the kinds of grafts
<!-- extras -->                 the extras of the package
<!-- sizing -->                 what a server of SmolLM2 needs and does, from the results of the benchmark `serving`
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from graftlm.config import Config

_PLACEHOLDER = re.compile(r"<!-- (keys of (?P<config>[\w.]+)|verbs|grafts|extras|experiments|memory|time|sizing) -->")
GB = 1e9


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Replace the placeholders of a page; mkdocs calls this function for every page."""
    folder = posixpath.dirname(page.file.src_uri) if page is not None else ""

    def fill(placeholder: re.Match[str]) -> str:
        if placeholder["config"]:
            return _keys(placeholder["config"])
        return _LISTS[placeholder[1]](folder)

    return _PLACEHOLDER.sub(fill, markdown)


def _verbs(folder: str) -> str:
    import typer.main

    from graftlm.cli import app

    page = posixpath.relpath("cli.md", folder or ".")
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [[f"[`{verb}`]({page}#{verb})", command.get_short_help_str(200)] for verb, command in commands.items()]
    return _table(["verb", "what it does"], rows)


def _grafts(folder: str) -> str:
    from graftlm.generation.methods import methods

    rows = [[f"`{method.kind}`", method.label, method.summary] for method in methods()]
    return _table(["kind", "label", "what it is"], rows)


def _extras(folder: str) -> str:
    """Extras with the comment above each in pyproject.toml, and their packages."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    rows = []
    for extra, requirements in tomllib.loads(text)["project"]["optional-dependencies"].items():
        comment = re.search(rf"^# (.+)\n{extra} = ", text, re.MULTILINE)
        packages = ", ".join(re.split(r"[<>=~!\[ ;]", requirement)[0] for requirement in requirements)
        rows.append([f"`graftlm[{extra}]`", comment[1] if comment else "", packages])
    return _table(["extra", "for", "packages"], rows)


def _experiments(folder: str) -> str:
    """Experiments with the titles of their READMEs."""
    rows = []
    for readme in sorted((Path(__file__).parents[1] / "experiments").glob("*/README.md")):
        title = readme.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append([f"`{readme.parent.name.replace('_', '-')}`", title])
    return _table(["experiment", "subject"], rows)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like backbone; `kv_width` is the width of all key-value heads together."""

    name: str
    layers: int
    width: int
    ffn_width: int
    kv_width: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        """N: embedding, output layer, and per layer four attention matrices, three FFN matrices and two norms."""
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        attention = 2 * self.width * (self.width + self.kv_width)
        layer = attention + 3 * self.width * self.ffn_width + 2 * self.width
        return embeddings + self.layers * layer + self.width

    def saved_activations(self, graft_parameters: int) -> tuple[float, float]:
        """Numbers saved for backward per token: in the layers, and in the logits.

        The backbone is frozen. A graft of gated adapters stands beside the FFN of every layer, and every gate is open.
        The first layer's attention and FFN need no gradient.
        """
        layer = 3 * self.ffn_width + 5 * self.width + 2 * self.kv_width
        adapters = 4 * graft_parameters / (3 * self.width)  # 4 w per layer; the graft has 3 d w parameters per layer
        return (self.layers - 1) * layer + 2 * self.width + adapters, self.vocabulary


SHAPES = (
    Shape("0.1B (SmolLM2-135M)", 30, 576, 1536, 192, 49_152, True),
    Shape("0.5B (Qwen2.5-0.5B)", 24, 896, 4864, 128, 151_936, True),
    Shape("1B (Llama-3.2-1B)", 16, 2048, 8192, 512, 128_256, True),
    Shape("3B (Llama-3.2-3B)", 28, 3072, 8192, 1024, 128_256, True),
    Shape("8B (Llama-3.1-8B)", 32, 4096, 14_336, 1024, 128_256, False),
)


@dataclass(frozen=True)
class Requirements:
    """Memory in bytes and time in seconds of one graft on one backbone."""

    backbone: float
    graft_training: float
    activations: float
    graft: float
    cache: float
    flops_per_token: float

    @property
    def training(self) -> float:
        """Bytes of weights, optimiser state and saved activations."""
        return self.backbone + self.graft_training + self.activations

    @property
    def serving(self) -> float:
        """Bytes of weights and cache."""
        return self.backbone + self.graft + self.cache

    def decode_rate(self, bandwidth: float) -> float:
        """Upper bound of tokens per second of one row: each token reads all weights once."""
        return bandwidth / (self.backbone + self.graft)


def requirements(
    shape: Shape, *, capacity: float = 0.2, tokens: int = 2048, context: int = 4096, number: int = 2
) -> Requirements:
    """The arithmetic of the page "What it needs".

    Args:
        shape: the backbone.
        capacity: the graft's parameters over the backbone's.
        tokens: tokens of one forward pass in training: rows of a micro-batch times their length.
        context: tokens in the cache of one row in serving.
        number: bytes of a number of the backbone and of the layers' activations; logits and graft have 4.
    """
    backbone = shape.parameters
    graft = capacity * backbone
    layers, logits = shape.saved_activations(int(graft))
    return Requirements(
        backbone=number * backbone,
        graft_training=16 * graft,  # float32: weight, gradient and two moments of AdamW
        activations=tokens * (number * layers + 4 * logits),
        graft=4 * graft,
        cache=context * number * 2 * shape.layers * shape.kv_width,
        flops_per_token=4 * backbone + 6 * graft,
    )


def _memory(folder: str) -> str:
    head = ["backbone", "weights", "graft in training", "activations", "training, sum", "cache", "serving, sum"]
    rows = []
    for shape in SHAPES:
        needs = requirements(shape)
        sizes = (needs.backbone, needs.graft_training, needs.activations, needs.training, needs.cache, needs.serving)
        rows.append([shape.name, *(f"{size / GB:.1f}" for size in sizes)])
    return _table(head, rows)


def _hours(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def _time(folder: str) -> str:
    head = ["backbone", "GFLOP per token", "10M tokens at 0.1 TFLOP/s", "at 100 TFLOP/s"]
    head += ["decoding at 50 GB/s", "at 1,000 GB/s"]
    rows = []
    for shape in SHAPES:
        needs = requirements(shape)
        hours = [1e7 * needs.flops_per_token / rate / 3600 for rate in (1e11, 1e14)]
        rates = [needs.decode_rate(bandwidth) for bandwidth in (50 * GB, 1000 * GB)]
        cells = [f"{needs.flops_per_token / 1e9:.1f}", *map(_hours, hours)]
        rows.append([shape.name, *cells, *(f"{rate:,.0f} tokens/s" for rate in rates)])
    return _table(head, rows)


@dataclass(frozen=True)
class ServingRates:
    """What one replica did in the benchmark `serving`.

    Attributes:
        alone, batch: tokens per second that it writes for one client, and for 16 together.
        prompt: tokens per second of a prompt that it reads for the first time.
        known: seconds to the first token of a prompt of which 1,000 tokens are known.
        grafts: rate with four grafts in one batch over that with one.
    """

    alone: float
    batch: float
    prompt: float
    known: float
    grafts: float

    def seconds(self, prompt: int, answer: int, *, is_known: bool = False) -> float:
        """Seconds of a replica that a request takes; `is_known` for a prompt of about 1,000 tokens in the cache."""
        return (self.known if is_known else prompt / self.prompt) + answer / self.batch


def serving_rates(results: dict[str, Any]) -> ServingRates:
    """The rates of a results.json of the benchmark."""
    means = {row["id"]: {name: metric["mean"] for name, metric in row["metrics"].items()} for row in results["rows"]}
    prefix = means["prefix_1000"]
    return ServingRates(
        alone=means["clients_1"]["tokens_per_s"],
        batch=means["clients_16"]["tokens_per_s"],
        prompt=(results["details"]["size"]["prefix"] + 20) / prefix["first_s"],  # 20 tokens follow the prefix
        known=prefix["second_s"],
        grafts=means["mixed_grafts_4"]["ratio"],
    )


def _sizing(folder: str) -> str:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "serving" / "results.json"
    rates, shape = serving_rates(json.loads(path.read_text(encoding="utf-8"))), SHAPES[0]
    token = requirements(shape, context=1).cache
    new, known = rates.seconds(1000, 200), rates.seconds(1000, 200, is_known=True)
    rows = [
        ["weights", f"2 · {shape.parameters / 1e6:.1f} · 10⁶ = {requirements(shape).backbone / GB:.2f} GB"],
        ["keys and values of a token", f"2 · 2 · {shape.layers} · {shape.kv_width} = {token / 1e3:.1f} kB"],
        ["of 16 requests of 1,000 tokens", f"{16_000 * token / GB:.2f} GB"],
        ["of `--prefix-cache 8192`", f"{8192 * token / GB:.2f} GB"],
        ["prompts that are new", f"**{rates.prompt:,.0f} tokens/s**"],
        [
            "1,000 tokens that are known",
            f"**{rates.known:.2f} s**, where reading them takes {1000 / rates.prompt:.2f} s",
        ],
        ["answers, one client", f"**{rates.alone:.0f} tokens/s**"],
        ["answers, 16 clients together", f"**{rates.batch:.0f} tokens/s**"],
        ["the same with four grafts in one batch", f"**{rates.grafts:.2f}** of the rate with one"],
        ["a request of 1,000 new tokens, 200 of answer", f"{new:.1f} s of a replica: {0.7 / new:.2f} a second"],
        ["the same where the 1,000 tokens are known", f"{known:.1f} s of a replica: {0.7 / known:.2f} a second"],
        ["replicas for 5 such requests a second", f"{_replicas(5, new)}, or {_replicas(5, known)} where all are known"],
    ]
    return _table(["SmolLM2-135M in bfloat16, two CPU cores", ""], rows)


def _replicas(rate: float, seconds: float) -> int:
    """Replicas that are busy for 70% of the time."""
    return math.ceil(rate * seconds / 0.7)


_LISTS: dict[str, Callable[[str], str]] = {
    "verbs": _verbs,
    "grafts": _grafts,
    "extras": _extras,
    "experiments": _experiments,
    "memory": _memory,
    "time": _time,
    "sizing": _sizing,
}


def _keys(name: str) -> str:
    module, _, class_name = name.rpartition(".")
    config = getattr(import_module(module), class_name)
    assert issubclass(config, Config), f"{name} is not a config"
    return _table(["key", "value", "default", "meaning"], [_key(key, f) for key, f in config.model_fields.items()])


def _key(key: str, field: FieldInfo) -> list[str]:
    default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
    return [f"`{key}`", _type(field.annotation), default, field.description or ""]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _default(value: Any) -> str:
    if value is None or isinstance(value, Config) or value in ([], {}, ""):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
    return f"`{shown}`"


def _type(annotation: Any) -> str:
    """A type in the words of readers of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not NoneType)
    if origin is list:
        return f"list of {_type(arguments[0])}s"
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation.__name__.removesuffix("Config").lower()
    return {str: "text", int: "number", float: "number", bool: "`true`, `false`"}.get(annotation, "any value")

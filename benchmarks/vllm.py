"""Throughput of vLLM with exported grafts, relative to our server and to vLLM with the bare backbone.

    python benchmarks/vllm.py --out DIR [--quick]    # about 30 minutes; --quick for two or three

Neutral residues on SmolLM2-135M-Instruct in float32, one thread for each server: our server has the grafts, and three
servers of vLLM have the exported model, the bare backbone, and a carrier with eight grafts as LoRA adapters. Clients in
another process stream their answers. In rows of mixed grafts the requests name two or eight grafts in turn, and have
few tokens: vLLM's LoRA on a CPU copies the factors of the adapter for each token.

The turns of a row run next to each other, in rounds of alternating order, so that other load of the machine affects
all. A ratio is the median over rounds; its interval has the smallest and the largest value. Needs the environment of
`integrations/vllm/environment.py`, and ends with status 3 where that can't be had.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from serving_clients import Load
from turns import AT_LEAST, command, draw, in_order, interval, made_aim

from graftlm.backbone import Backbone, load_backbone
from graftlm.evaluation import Results, Row, value_of
from graftlm.export import export_graft, export_many
from graftlm.export.many import CARRIER, SETTINGS, VllmSettings
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import EngineLimits
from serving import Figures, Measured, random_ids, run_load, served, warm_up

sys.path.append(str(Path(__file__).parents[1]))  # A script can import only from its folder.
from integrations.vllm.environment import UNAVAILABLE, UnavailableError, find_python
from integrations.vllm.models import tiny_backbone
from integrations.vllm.server import served as served_by_vllm

NAME = "bench-vllm"
SEED = 0
GRAFTS = tuple(f"graft{number}" for number in range(8))
BATCH = 32
"""Largest number of texts at once, of all servers."""


class Goal(NamedTuple):
    """A row of the results.

    Attributes:
        label: its label.
        clients: number of concurrent clients.
        aim: the aim of `export_over_bare`, if there is one.
        grafts: number of grafts that the requests name in turn.
    """

    label: str
    clients: int
    aim: tuple[str, float] | None = None
    grafts: int = 1

    @property
    def ratios(self) -> dict[str, tuple[str, str]]:
        """The servers whose throughputs are divided, for each metric."""
        return RATIOS if self.grafts == 1 else MIXED_RATIOS

    @property
    def servers(self) -> list[str]:
        """The names of the servers that are compared."""
        return list(dict.fromkeys(name for pair in self.ratios.values() for name in reversed(pair)))


RATIOS = {"vllm_over_ours": ("exported", "ours"), "export_over_bare": ("exported", "bare")}
MIXED_RATIOS = {"vllm_over_ours": ("carrier", "ours"), "carrier_over_bare": ("carrier", "bare")}
METRICS = tuple(dict.fromkeys([*RATIOS, *MIXED_RATIOS]))
ROWS = {
    "clients_1": Goal("1 client", 1),
    "clients_8": Goal("8 clients", 8, (AT_LEAST, 0.75)),
    "clients_32": Goal("32 clients", 32, (AT_LEAST, 0.75)),
    "mixed_grafts_2": Goal("8 clients, 2 grafts on one carrier", 8, grafts=2),
    "mixed_grafts_8": Goal("8 clients, 8 grafts on one carrier", 8, grafts=8),
}


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement.

    Attributes:
        model: name of a model, or None for a tiny random Llama.
        prompt: minimum and maximum number of tokens of a prompt.
        new: number of new tokens of each answer.
        requests: number of requests of each client, by the number of clients.
        mixed_prompt: minimum and maximum number of tokens of a prompt, in rows of mixed grafts.
        mixed_new: number of new tokens of each answer there; each client has one request.
        rounds: number of rounds.
        options: options of vLLM's servers.
    """

    model: str | None
    prompt: tuple[int, int]
    new: int
    requests: dict[int, int]
    mixed_prompt: tuple[int, int]
    mixed_new: int
    rounds: int
    options: tuple[str, ...]


_OPTIONS = ("--max-num-seqs", str(BATCH), "--max-model-len", "256", "--no-enable-prefix-caching")
FULL = Size(
    model="smollm2-135m-instruct",
    prompt=(8, 64),
    new=32,
    requests={1: 2, 8: 2, 32: 1},
    mixed_prompt=(2, 4),
    mixed_new=4,
    rounds=5,
    options=_OPTIONS,
)
QUICK = Size(
    model=None,
    prompt=(2, 6),
    new=4,
    requests={1: 1, 8: 1, 32: 1},
    mixed_prompt=(2, 4),
    mixed_new=2,
    rounds=1,
    options=(*_OPTIONS, "--enforce-eager"),  # without compiling, which takes longer than all turns
)


def make_backbone(size: Size) -> Backbone:
    """Return the backbone in float32 without an end-of-text token, so that all answers have the same length."""
    backbone = tiny_backbone("llama") if size.model is None else load_backbone(size.model, dtype="float32")
    backbone.model.config.eos_token_id = None
    backbone.need_tokenizer().eos_token = None
    if backbone.model.generation_config is not None:
        backbone.model.generation_config.eos_token_id = None
    return backbone


def make_graft(backbone: Backbone, seed: int) -> Graft:
    """Return random gated adapters of a tenth of the backbone's weights, a third of whose gates are open.

    Their gates are those of the first graft with every seed, so that all grafts compute the same number of adapters.
    """
    graft = build_graft(graft_config({"kind": "neutral-residues", "capacity": 0.1}), backbone).eval()
    for name, parameter in graft.named_parameters():
        chance = torch.Generator().manual_seed(SEED if "gate" in name else seed)
        with torch.no_grad():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=chance))
    return graft


class Servers:
    """The servers that are compared, with the same backbone.

    Args:
        size: the sizes.
        folder: a folder for models and logs.
        python: the Python of vLLM's environment.
    """

    def __init__(self, size: Size, folder: Path, python: Path) -> None:
        self.size = size
        self.folder = folder
        self.python = python
        self.backbone = make_backbone(size)
        self.grafts = {name: make_graft(self.backbone, SEED + number) for number, name in enumerate(GRAFTS)}

    def turns(self, stack: ExitStack) -> dict[str, Callable[[Goal], Figures]]:
        """Start vLLM's servers, and return what measures a row with each server."""
        bare = self.folder / "bare"
        self.backbone.model.save_pretrained(bare)
        self.backbone.need_tokenizer().save_pretrained(bare)
        exported = export_graft(self.grafts[GRAFTS[0]], self.backbone, self.folder / "exported")
        many = export_many(self.grafts, self.backbone, self.folder / "many")
        servers = [self._vllm(exported), self._vllm(bare), self._vllm(many / CARRIER, _adapter_options(many))]
        with ThreadPoolExecutor() as pool:  # a start takes a minute
            urls = list(pool.map(lambda server: stack.enter_context(server), servers))
        return {
            "ours": self._ours,
            "exported": partial(self._load, urls[0], ["model"]),
            "bare": partial(self._load, urls[1], ["model"]),
            "carrier": partial(self._load, urls[2], GRAFTS),
        }

    def _ours(self, goal: Goal) -> Figures:
        limits = EngineLimits(batch_size=BATCH)
        grafts = {name: self.grafts[name] for name in GRAFTS[: goal.grafts]}
        engine = BatchingEngine(self.backbone, grafts, "backbone", limits)
        with served(self.backbone, engine) as url:
            return self._load(url, GRAFTS, goal)

    def _vllm(self, model: Path, options: Sequence[str] = ()) -> AbstractContextManager[str]:
        log = self.folder / f"{model.name}.log"
        return served_by_vllm(self.python, model, log, [*self.size.options, *options], {"OMP_NUM_THREADS": "1"})

    def _load(self, url: str, models: Sequence[str], goal: Goal) -> Figures:
        """Measure a row.

        Args:
            url: address of the server.
            models: the server's names of the grafts, of which the row's number is used.
            goal: the row.
        """
        is_mixed = goal.grafts > 1
        load = Load(
            url=url,
            models=list(models[: goal.grafts]),
            prompts=self._prompts(goal),
            clients=goal.clients,
            max_tokens=self.size.mixed_new if is_mixed else self.size.new,
        )
        warm_up(load)
        return run_load(load)

    def _prompts(self, goal: Goal) -> list[list[int]]:
        """Return the same random prompts for all servers."""
        chance = random.Random(SEED + goal.clients)
        is_mixed = goal.grafts > 1
        count = goal.clients * (1 if is_mixed else self.size.requests[goal.clients])
        lengths = self.size.mixed_prompt if is_mixed else self.size.prompt
        return [random_ids(chance, chance.randint(*lengths)) for _ in range(count)]


def _adapter_options(folder: Path) -> list[str]:
    """Return the options of vLLM's server for the adapters of an export."""
    values = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    settings = VllmSettings(**{name: values[name] for name in VllmSettings._fields})
    modules = [f"{name}={folder / name}" for name in values["adapters"]]
    # At its start vLLM runs a batch of the largest size, for whose tokens a CPU copies the factors of the adapters.
    limit = ["--max-num-batched-tokens", "256"]
    return [*settings.arguments(has_carrier=True), "--lora-modules", *modules, *limit]


def measure(size: Size, folder: Path, python: Path) -> Measured:
    """Return the figures of each server in each row, by `SERVER_ROW`."""
    measured: Measured = {}
    with ExitStack() as stack:
        servers = Servers(size, folder, python).turns(stack)
        for server in servers.values():
            server(ROWS["clients_1"])  # warm up
        for number in range(size.rounds):
            for row, goal in ROWS.items():
                for name in in_order(goal.servers, number):
                    figures = servers[name](goal)
                    measured.setdefault(f"{name}_{row}", []).append(figures)
                    print(f"round {number + 1}, {name}, {goal.label}: {figures}", flush=True)
    return measured


def benchmark(quick: bool, python: Path) -> Results:
    """Return all rows."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(size, Path(folder), python)
    rows = [_row(name, measured) for name in ROWS]
    aims = []
    for row, goal in zip(rows, ROWS.values(), strict=True):
        if goal.aim is not None:
            found = None if quick else value_of(row.metrics["export_over_bare"])
            aims.append(made_aim(f"exported over bare, {goal.label}", "export_over_bare", goal.aim, found))
    details: dict[str, Any] = {
        "size": json.loads(json.dumps(asdict(size))),  # with lists for tuples
        "turns": measured,
        "threads": torch.get_num_threads(),
        "batch_size": BATCH,
    }
    return Results.here(NAME, rows, seeds=[SEED], aims=aims, details=details)


def _row(name: str, measured: Measured) -> Row:
    """Return the ratios of a row, and the throughput of each server."""
    goal = ROWS[name]
    speeds: dict[str, list[float]] = {}
    for server in goal.servers:
        speeds[server] = [figures["tokens_per_s"] for figures in measured[f"{server}_{name}"]]
    metrics: dict[str, Any] = {}
    for metric, (over, under) in goal.ratios.items():
        pairs = zip(speeds[over], speeds[under], strict=True)
        metrics[metric] = interval([upper / lower for upper, lower in pairs])
    for server, values in speeds.items():
        metrics[f"{server}_tokens_per_s"] = interval(values)
    return Row(id=name, label=goal.label, metrics=metrics)


def plots(results: Results) -> dict[str, Figure]:
    """Return a plot of each ratio."""
    figures = {}
    for metric in METRICS:
        rows = [
            Row(id=row.id, label=row.label, metrics={"ratio": row.metrics[metric]})
            for row in results.rows
            if metric in row.metrics
        ]
        aims = {name: goal.aim[1] if goal.aim and metric == "export_over_bare" else None for name, goal in ROWS.items()}
        figures[metric] = draw(results.model_copy(update={"rows": rows}), aims, metric, logarithmic=True)
    return figures


def main() -> None:
    """Run the command line, unless vLLM can't be had."""
    try:
        python = find_python()
    except UnavailableError as error:
        print(f"Skipped: {error}", file=sys.stderr)
        raise SystemExit(UNAVAILABLE) from error
    about = (__doc__ or "").splitlines()[0]
    command(NAME, about, lambda quick, device, clock: benchmark(quick, python), plots, options=())


if __name__ == "__main__":
    main()

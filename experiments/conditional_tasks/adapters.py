"""The rivals: bottlenecks and LoRA, one for each task or one for all, and adapters that a hypernetwork makes.

A row's task chooses its weights, so a batch mixes tasks. Heads, pooling, frozen layers and losses are those of
conditional tasks with all modules off. The controls are its modules, but that a row's task does not choose among them.

    bottleneck   beside each FFN: U act(V x)                                    (Houlsby et al. 2019; He et al. 2022)
    lora         beside each Linear of a layer: B A x                           (Hu et al. 2021)
    hyper        beside each FFN: U act(V x), V and U linear in LN(W [z; l]) of the task's vector z and the layer's l
                 (Karimi Mahabadi et al. 2021)

All U and B are zero at the start. Shape suffixes: B rows, T tokens, D width, R inner width, K tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graftlm.backbone import Call, Site, Tap
from graftlm.grafts import GraftConfig
from graftlm.grafts.conditional_tasks import ConditionalTasks, ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.modules import RowTasks

HYPER_WIDTH = 64
LINEARS = (
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
Weights = tuple[Tensor, Tensor]  # (B or 1, D, R) and (B or 1, R, D)


class TaskAdaptersConfig(ConditionalTasksConfig):
    """Config of adapters.

    Args:
        form: which of the three.
        shared: one for all tasks; of `hyper` the hypernetwork is, anyhow.
        inner: inner width, or rank.
    """

    kind: Literal["task-adapters"] = "task-adapters"
    attention: Literal["none", "blocks", "full"] = "none"
    alignment: bool = False
    norm: bool = False
    bottleneck: Literal["none", "base", "large"] = "none"
    lora_rank: int = 0
    form: Literal["bottleneck", "lora", "hyper"] = "bottleneck"
    shared: bool = False
    inner: int = Field(8, ge=1)


class PairOfMatrices(nn.Module):
    """V and U of each of K tasks, (K, D, R) and (K, R, D)."""

    def __init__(self, tasks: int, read: int, inner: int, written: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(tasks, read, inner) / math.sqrt(read))
        self.up = nn.Parameter(torch.zeros(tasks, inner, written))

    def forward(self, task_B: Tensor) -> Weights:
        """Those of each row; of the only task for all rows."""
        if len(self.down) == 1:
            return self.down, self.up
        return self.down.index_select(0, task_B), self.up.index_select(0, task_B)


class Hypernetwork(nn.Module):
    """V and U of every task and layer, from their vectors."""

    def __init__(self, layers: int, task_width: int, width: int, inner: int) -> None:
        super().__init__()
        self.shape = (width, inner)
        self.layers = nn.Parameter(torch.randn(layers, task_width) / math.sqrt(task_width))
        self.mix = nn.Sequential(nn.Linear(2 * task_width, HYPER_WIDTH), nn.LayerNorm(HYPER_WIDTH))
        self.down = nn.Parameter(torch.randn(HYPER_WIDTH, width * inner) / math.sqrt(width * HYPER_WIDTH))
        self.up = nn.Parameter(torch.zeros(HYPER_WIDTH, inner * width))

    def forward(self, z_KZ: Tensor, layer: int) -> Weights:
        """Those of each task in one layer."""
        mixed = self.mix(torch.cat([z_KZ, self.layers[layer].expand_as(z_KZ)], -1))
        return (mixed @ self.down).unflatten(-1, self.shape), (mixed @ self.up).unflatten(-1, self.shape[::-1])


class TaskAdapters(ConditionalTasks):
    """Adapters in every layer of a BERT encoder, beside the heads of conditional tasks."""

    Config: ClassVar[type[GraftConfig]] = TaskAdaptersConfig
    label = "adapters of tasks"
    config: TaskAdaptersConfig

    def _build(self) -> None:
        super()._build()
        config, sites = self.config, self._sites
        self.activation = ACT2FN[sites.activation]
        tasks, width = 1 if config.shared else len(config.tasks), sites.width
        self.hyper: Hypernetwork | None = None
        pairs: dict[str, PairOfMatrices] = {}
        if config.form == "hyper":
            self.hyper = Hypernetwork(sites.n_layers, config.task_width, width, config.inner)
        elif config.form == "bottleneck":
            pairs = {str(n): PairOfMatrices(tasks, width, config.inner, width) for n in range(sites.n_layers)}
        else:
            for path in self._linears():
                linear: Any = sites.module(Site("module", path=path))[0]
                pairs[path.replace(".", "/")] = PairOfMatrices(
                    tasks, linear.in_features, config.inner, linear.out_features
                )
        self.pairs = nn.ModuleDict(pairs)

    def _linears(self) -> list[str]:
        """The paths of all Linears of the layers."""
        sites = self._sites
        prefixes = (str(sites.norms(n)[0].path).partition(".attention.")[0] for n in range(sites.n_layers))
        return [f"{prefix}.{name}" for prefix in prefixes for name in LINEARS]

    def taps(self) -> list[Tap]:
        taps, layers = super().taps(), range(self._sites.n_layers)
        if self.config.form == "lora":
            for path, pair in self.pairs.items():
                site = Site("module", path=path.replace("/", "."))
                taps.append(Tap(site, "after", "add", partial(self._add, partial(self._of_task, pair), None)))
            return taps
        for n in layers:
            weights = partial(self._made, n) if self.hyper else partial(self._of_task, self.pairs[str(n)])
            taps.append(Tap(Site("ffn", n), "after", "add", partial(self._add, weights, self.activation)))
        return taps

    def _of_task(self, pair: nn.Module, call: Call) -> Weights:
        if (self, "number") not in call.scratch:
            task_B = call.extras.get("task", torch.zeros(1, dtype=torch.long))
            call.scratch[self, "number"] = task_B.to(self._embeddings().device, non_blocking=True)
        return pair(call.scratch[self, "number"])

    def _made(self, layer: int, call: Call) -> Weights:
        assert self.hyper is not None, "the form is hyper"
        tasks = self._tasks(call)
        down, up = self.hyper(tasks.z, layer)
        return tasks.rows(down), tasks.rows(up)

    def _add(
        self,
        weights: Callable[[Call], Weights],
        activation: Callable[[Tensor], Tensor] | None,
        call: Call,
        x_BTD: Tensor,
        y_BTD: Tensor,
    ) -> Tensor:
        down, up = weights(call)
        inner = x_BTD.to(call.working_dtype(self)) @ down
        return ((inner if activation is None else activation(inner)) @ up).to(y_BTD.dtype)


class BlindConfig(ConditionalTasksConfig):
    """Config of conditional tasks in which the first task's modules, or those `by` token ids, serve each row."""

    kind: Literal["blind"] = "blind"
    by: Literal["first", "row"] = "first"


class Blind(ConditionalTasks):
    """Conditional tasks whose modules do not know a row's task."""

    Config: ClassVar[type[GraftConfig]] = BlindConfig
    label = "modules that do not know the task"
    config: BlindConfig

    def _tasks(self, call: Call) -> RowTasks:
        if (self, "tasks") not in call.scratch:
            ids: Any = call.input_ids  # 0 pads
            choices = len(self.config.tasks) if self.config.by == "row" else 1
            call.scratch[self, "tasks"] = self._read_tasks(ids.sum(1) % choices)
        return call.scratch[self, "tasks"]


def parameters_per_width(form: str, layers: int, width: int, ffn: int, tasks: int) -> int:
    """The parameters of the adapters for each unit of their inner width, up to the hypernetwork's first matrix."""
    if form == "hyper":
        return 2 * HYPER_WIDTH * width
    linears = 2 * width if form == "bottleneck" else 4 * 2 * width + 2 * (width + ffn)
    return tasks * layers * linears

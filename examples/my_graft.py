"""A graft of your own in one file: U V x is added to the output of every FFN, x being its input and U = 0 at first.

    python examples/my_graft.py RECIPE.yaml OUT

trains it by a recipe with `graft: {kind: low-rank-bias, rank: 4}`, and tests/test_examples.py runs the laws on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from graftlm import Graft, load_recipe, register_graft, run_recipe
from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts import GraftConfig


class LowRankBiasConfig(GraftConfig):
    """Config of the graft; `rank` is the width between V and U."""

    kind: Literal["low-rank-bias"] = "low-rank-bias"
    rank: int = Field(4, ge=1)


class LowRankBias(Graft):
    """A low-rank matrix beside every FFN."""

    Config = LowRankBiasConfig
    label = "low-rank bias"

    def __init__(self, config: LowRankBiasConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config, sites = config, backbone.sites
        self.v = nn.ModuleList(nn.Linear(sites.width, config.rank, bias=False) for _ in range(sites.n_layers))
        self.u = nn.ModuleList(nn.Linear(config.rank, sites.width, bias=False) for _ in range(sites.n_layers))
        for weight in self.u.parameters():
            nn.init.zeros_(weight)
        self.to(backbone.device)

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", layer), "after", "add", self._add(layer)) for layer in range(len(self.u))]

    def _add(self, layer: int) -> Callable[[Call, Tensor, Tensor], Tensor]:
        def add(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
            return self.u[layer](self.v[layer](inputs.to(call.working_dtype(self)))).to(outputs.dtype)

        return add


register_graft("low-rank-bias", LowRankBias)

if __name__ == "__main__":
    run_recipe(load_recipe(sys.argv[1]), sys.argv[2])

"""A graft in one file: it adds U V x to the output of every FFN, where x is the input of the FFN and U starts at zero.

    python examples/my_graft.py RECIPE.yaml OUT

trains it by a recipe with `graft: {kind: low-rank-bias, rank: 4}`. tests/test_examples.py checks the laws on it.
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
    """Config of the graft.

    Args:
        rank: Width between V and U.
    """

    kind: Literal["low-rank-bias"] = "low-rank-bias"
    rank: int = Field(4, ge=1)


class LowRankBias(Graft):
    """A low-rank matrix parallel to every FFN."""

    Config = LowRankBiasConfig
    label = "low-rank bias"

    def __init__(self, config: LowRankBiasConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        width = backbone.sites.width
        self.v = nn.ModuleList()
        self.u = nn.ModuleList()
        for _ in range(backbone.sites.n_layers):
            v = nn.Linear(width, config.rank, bias=False)
            u = nn.Linear(config.rank, width, bias=False)
            nn.init.zeros_(u.weight)
            self.v.append(v)
            self.u.append(u)
        self.to(backbone.device)

    def taps(self) -> list[Tap]:
        return [self._tap(layer) for layer in range(len(self.u))]

    def _tap(self, layer: int) -> Tap:
        return Tap(
            site=Site("ffn", layer),
            when="after",
            act="add",
            function=self._bias(layer),
        )

    def _bias(self, layer: int) -> Callable[[Call, Tensor, Tensor], Tensor]:
        def bias(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
            x = inputs.to(call.working_dtype(self))
            return self.u[layer](self.v[layer](x)).to(outputs.dtype)

        return bias


register_graft("low-rank-bias", LowRankBias)

if __name__ == "__main__":
    run_recipe(load_recipe(sys.argv[1]), sys.argv[2])

"""What tests of the laws share beside `graftlm.testing`."""

from __future__ import annotations

import torch

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.testing import attach_graft
from laws.examples import Example


def graft_onto(backbone: Backbone, example: Example) -> GraftedModel:
    """A fresh, untrained graft of an example on a backbone; always the same one."""
    return attach_graft(backbone, example.values())


def active_calls(model: GraftedModel) -> list[Call]:
    """The forward passes that this thread has not ended."""
    return model._tap_hooks._stack.calls


class FailingGraft(Graft):
    """Raises in a tap of the last of `passes` forward passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes_left = passes

    def prepare(self, call: Call) -> None:
        self.passes_left -= 1

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 1), "after", "add", self._fail)]

    def _fail(self, call: Call, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if self.passes_left == 0:
            raise ZeroDivisionError

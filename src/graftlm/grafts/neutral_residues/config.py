"""The configs of neutral residues and of vanilla adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from graftlm.grafts.base import GraftConfig

GateKind = Literal["relu", "sigmoid", "none"]
LocalLoss = Literal["l1", "cross-entropy", "none"]

PAPER: dict[str, object] = {
    "capacity": 0.2,  # section 4.1: 20% of extra weights
    "gate": "relu",
    "gate_init": "random",  # our choice: the paper states no initialization of the gate
    "local_loss": "l1",
    "alpha": 0.01,  # section 4.1
    "init": "low-variance",
}
"""The form that the paper published."""


class NeutralResiduesConfig(GraftConfig):
    """Config of neutral residues.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        width: inner width of the adapters; it replaces `capacity`.
        gate: the activation of the gate; `none` leaves the adapter ungated.
        gate_init: initialization of the gate, which the paper does not state. `open`: weight 0 and bias 1, so that
            g(x) = act_g(1) for every token. `random`: a weight of variance 1 / d and no bias, both our choice; about
            half of the tokens then find a ReLU gate closed and contribute no gradient.
        local_loss: `l1` pulls the output towards zero on the old domain; `cross-entropy` trains the gate to classify
            the domain. The default is `l1` for a ReLU gate and `cross-entropy` for a sigmoid.
        alpha: weight of the local loss.
        init: variance of the input and gating matrices: `low-variance` is 1 / (d * layers), `he` is 2 / d.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"paper": PAPER}

    kind: Literal["neutral-residues"] = "neutral-residues"
    capacity: float = Field(0.2, gt=0, le=4)
    width: int | None = Field(None, ge=1)
    gate: GateKind = "relu"
    gate_init: Literal["open", "random"] = "open"
    local_loss: LocalLoss | None = None
    alpha: float = Field(1.0, ge=0)
    init: Literal["low-variance", "he"] = "low-variance"

    def _problems(self) -> Iterator[str]:
        if self.gate == "none" and self.local_loss == "cross-entropy":
            yield (
                "the local loss cross-entropy trains a gate, but gate is none: set gate to relu or sigmoid, or choose "
                "another local_loss"
            )

    @property
    def has_auxiliary_loss(self) -> bool:
        return self.alpha > 0 and self.loss_kind() != "none"

    def loss_kind(self) -> LocalLoss:
        """Return `local_loss`, or if it is None the default for the gate, which is `none` without a gate."""
        if self.local_loss is not None:
            return self.local_loss
        by_gate: dict[GateKind, LocalLoss] = {
            "relu": "l1",
            "sigmoid": "cross-entropy",
            "none": "none",
        }
        return by_gate[self.gate]


class VanillaAdapterConfig(NeutralResiduesConfig):
    """Config of plain parallel adapters: no gate, no local loss, He's initialization."""

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    kind: Literal["adapter"] = "adapter"
    gate: GateKind = "none"
    alpha: float = Field(0.0, ge=0)
    init: Literal["low-variance", "he"] = "he"

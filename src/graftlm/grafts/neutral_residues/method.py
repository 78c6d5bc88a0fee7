"""Neutral residues: gated adapters in parallel to each FFN, silent on what the backbone already knew.

Shape suffixes: B rows, T tokens, N = B*T tokens, O open tokens, D the backbone's width, F the adapter's width.

One block reads the FFN's input x and adds to the FFN's output

    r(x) = g(x) * A(x),    g(x) = act_g(w . x + b),    A(x) = W_o (act(W_g x) * W_i x)

with the backbone's own activation, and without W_g where the backbone's FFN is not a gated linear unit. Where a ReLU gate
is closed r(x) is exactly zero, and so is its gradient: only open tokens are ever computed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts.base import Graft, GraftConfig

GateKind = Literal["relu", "sigmoid", "none"]
LocalLoss = Literal["l1", "cross-entropy", "none"]


class NeutralResiduesConfig(GraftConfig):
    """Config of neutral residues.

    Args:
        capacity: extra weights as a share of the backbone's.
        width: the adapters' inner width; given, it is used instead of `capacity`.
        gate: the block gate's activation; `none` leaves the adapter ungated.
        gate_bias: whether the gate has a bias.
        local_loss: `l1` holds the output near zero on the old domain; `cross-entropy` teaches the gate to tell the domains
            apart. By default the one that belongs to the gate.
        alpha: weight of the local loss.
        init: `low-variance` (1 / (d * layers)) or `he` (2 / d), for the input and gating matrices.
    """

    kind: Literal["neutral-residues"] = "neutral-residues"
    capacity: float = Field(0.2, gt=0, le=4)
    width: int | None = Field(None, ge=1)
    gate: GateKind = "relu"
    gate_bias: bool = False
    local_loss: LocalLoss | None = None
    alpha: float = Field(0.01, ge=0)
    init: Literal["low-variance", "he"] = "low-variance"

    @model_validator(mode="after")
    def _gate_can_learn(self) -> Self:
        if self.gate == "none" and self.local_loss == "cross-entropy":
            raise ValueError("the local loss cross-entropy teaches a gate, and gate is none: use relu, sigmoid, or another local_loss")
        return self

    def loss_kind(self) -> LocalLoss:
        """The local loss in force."""
        by_gate: dict[GateKind, LocalLoss] = {"relu": "l1", "sigmoid": "cross-entropy", "none": "none"}
        return self.local_loss or by_gate[self.gate]


class VanillaAdapterConfig(NeutralResiduesConfig):
    """Config of plain parallel adapters: no gate, no local loss, He's initialisation."""

    kind: Literal["adapter"] = "adapter"  # type: ignore[assignment]  # a narrower literal on purpose
    gate: GateKind = "none"
    alpha: float = Field(0.0, ge=0)
    init: Literal["low-variance", "he"] = "he"


class GatedAdapter(nn.Module):
    """One block; see the module's equation.

    Args:
        width: D.
        inner: F.
        activation: its name in transformers' ACT2FN.
        gated_ffn: whether A is a gated linear unit.
        config: gate and initialisation.
        layers: how many layers the backbone has.
    """

    def __init__(
        self, width: int, inner: int, activation: str, gated_ffn: bool, config: NeutralResiduesConfig, layers: int
    ) -> None:
        super().__init__()
        self.kind = config.gate
        self.w_i = nn.Linear(width, inner, bias=False)
        self.w_g = nn.Linear(width, inner, bias=False) if gated_ffn else None
        self.w_o = nn.Linear(inner, width, bias=False)
        self.gate = None if config.gate == "none" else nn.Linear(width, 1, bias=config.gate_bias)
        self.activation = ACT2FN[activation]
        self._initialise(width, layers, config.init)

    @torch.no_grad()
    def _initialise(self, width: int, layers: int, init: str) -> None:
        deviation = math.sqrt(2 / width if init == "he" else 1 / (width * layers))
        for linear in (self.w_i, self.w_g):
            if linear is not None:
                linear.weight.normal_(0, deviation)
        self.w_o.weight.zero_()
        if self.gate is not None:
            self.gate.weight.normal_(0, 1 / math.sqrt(width))
            if self.gate.bias is not None:
                self.gate.bias.zero_()

    def scores(self, x_ND: Tensor) -> Tensor | None:
        """w . x + b, (N,); None without a gate."""
        return None if self.gate is None else self.gate(x_ND).squeeze(-1)

    def adapt(self, x_ND: Tensor) -> Tensor:
        """A(x), (N, D)."""
        inner = self.w_i(x_ND)
        if self.w_g is None:
            return self.w_o(self.activation(inner))
        return self.w_o(self.activation(self.w_g(x_ND)) * inner)


class NeutralResidues(Graft):
    """Gated adapters in every layer of a backbone."""

    Config: ClassVar[type[GraftConfig]] = NeutralResiduesConfig
    config: NeutralResiduesConfig

    def __init__(self, config: NeutralResiduesConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        sites = backbone.sites
        inner = config.width or width_for(config.capacity, backbone)
        self.blocks = nn.ModuleList(
            GatedAdapter(sites.width, inner, sites.activation, sites.family.gated, config, sites.n_layers)
            for _ in range(sites.n_layers)
        ).to(backbone.device)

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", layer), "after", "add", self._tap(layer)) for layer in range(len(self.blocks))]

    def _tap(self, layer: int) -> Any:
        block = self.blocks[layer]
        assert isinstance(block, GatedAdapter)

        def add(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
            x_ND = inputs.reshape(-1, inputs.shape[-1])
            residue = self._residue(call, layer, block, x_ND.to(block.w_i.weight.dtype))
            return None if residue is None else residue.to(outputs.dtype).view_as(outputs)

        return add

    def _residue(self, call: Call, layer: int, block: GatedAdapter, x_ND: Tensor) -> Tensor | None:
        scores_N = block.scores(x_ND)
        if scores_N is None:
            out_ND = block.adapt(x_ND)
            self._note(call, layer, out_ND, None, None)
            return out_ND
        if block.kind == "sigmoid":
            out_ND = torch.sigmoid(scores_N)[:, None] * block.adapt(x_ND)
            self._note(call, layer, out_ND, None, scores_N)
            return out_ND
        open_O = (scores_N > 0).nonzero().squeeze(-1)
        if len(open_O) == 0:
            self._note(call, layer, None, open_O, scores_N)
            return None
        if len(open_O) == len(scores_N):
            out_ND = scores_N[:, None] * block.adapt(x_ND)
            self._note(call, layer, out_ND, None, scores_N)
            return out_ND
        out_OD = scores_N[open_O, None] * block.adapt(x_ND[open_O])
        self._note(call, layer, out_OD, open_O, scores_N)
        return torch.zeros_like(x_ND, dtype=out_OD.dtype).index_copy(0, open_O, out_OD)

    def _note(self, call: Call, layer: int, out: Tensor | None, open_O: Tensor | None, scores_N: Tensor | None) -> None:
        """Keep what the local loss and `observe` need; `out` holds all tokens, or those of `open_O`."""
        call.scratch[self, "scores", layer] = scores_N
        if call.domain is None or out is None or self.config.loss_kind() != "l1":
            return
        old_N = _tokens_of(call, 0)
        rows = (old_N if open_O is None else old_N[open_O]).nonzero().squeeze(-1)
        if len(rows):
            call.scratch[self, "l1", layer] = out[rows].float().abs().sum() / out.shape[-1]

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """alpha * l_local.

        `l1`: |r(x)|_1 / D, averaged over the old domain's tokens and the layers. `cross-entropy`: of the gate as a classifier of
        the domain, averaged over tokens and layers.
        """
        kind = self.config.loss_kind()
        if call.domain is None or self.config.alpha == 0 or kind == "none":
            return None
        terms = self._l1_terms(call) if kind == "l1" else self._cross_entropy_terms(call)
        if not terms:
            return None
        count = _count(call, (0,) if kind == "l1" else (0, 1))
        return self.config.alpha * torch.stack(terms).sum() / (count * len(self.blocks)).clamp(min=1)

    def _l1_terms(self, call: Call) -> list[Tensor]:
        keys = [(self, "l1", layer) for layer in range(len(self.blocks))]
        return [call.scratch[key] for key in keys if key in call.scratch]

    def _cross_entropy_terms(self, call: Call) -> list[Tensor]:
        known = _tokens_of(call, 0) | _tokens_of(call, 1)
        new = _tokens_of(call, 1)[known].float()
        scores = [call.scratch.get((self, "scores", layer)) for layer in range(len(self.blocks))]
        return [
            functional.binary_cross_entropy_with_logits(score[known].float(), new, reduction="sum")
            for score in scores
            if score is not None
        ]

    def observe(self, call: Call) -> dict[str, Tensor]:
        """`open_share` (layers,): the share of tokens whose gate is open (over one half for a sigmoid)."""
        scores = [call.scratch.get((self, "scores", layer)) for layer in range(len(self.blocks))]
        if any(score is None for score in scores):
            return {}
        real = call.token_mask.reshape(-1) if call.token_mask is not None else slice(None)
        return {"open_share": torch.stack([(score[real] > 0).float().mean() for score in scores if score is not None])}

    def describe(self) -> dict[str, Any]:
        """`spectrum`: the singular values of each layer's gating matrix, divided by the largest."""
        matrices = [block.w_i if block.w_g is None else block.w_g for block in self.blocks]  # type: ignore[union-attr]
        return {"spectrum": [spectrum(matrix.weight) for matrix in matrices]}


class VanillaAdapter(NeutralResidues):
    """The same adapters without gate and local loss: the usual parallel adapter, as a baseline."""

    Config: ClassVar[type[GraftConfig]] = VanillaAdapterConfig


def width_for(capacity: float, backbone: Backbone) -> int:
    """The inner width F at which all layers together hold `capacity` times the backbone's weights."""
    matrices = 3 if backbone.sites.family.gated else 2
    weights = capacity * sum(parameter.numel() for parameter in backbone.model.parameters())
    return max(1, round(weights / (backbone.sites.n_layers * matrices * backbone.sites.width)))


def spectrum(weight: Tensor) -> list[float]:
    """Singular values of a matrix, largest first, divided by the largest."""
    values = torch.linalg.svdvals(weight.detach().float())
    return (values / values[0].clamp(min=1e-12)).tolist()


def _tokens_of(call: Call, domain: int) -> Tensor:
    """(N,) True for the tokens, not padding, of sequences with this domain mark."""
    assert call.domain is not None
    ids = call.input_ids if call.input_ids is not None else call.token_mask
    assert ids is not None, "a call needs input ids or a token mask to tell its tokens apart"
    mask_BT = (call.domain == domain)[:, None].expand(ids.shape)
    return (mask_BT if call.token_mask is None else mask_BT & call.token_mask).reshape(-1)


def _count(call: Call, domains: tuple[int, ...]) -> Tensor:
    """Tokens of these domains: over the whole optimiser step where the call says so, else in this pass."""
    if call.totals is not None:
        return call.totals[[1 + domain for domain in domains]].sum()
    return torch.stack([_tokens_of(call, domain).sum() for domain in domains]).sum().float()

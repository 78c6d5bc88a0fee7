"""Neutral residues: gated adapters in parallel to each FFN, which are silent on text that the backbone knows.

One block reads the FFN's input x and adds to the FFN's output

    r(x) = g(x) * A(x),    g(x) = act_g(w . x + b),    A(x) = W_o (act(W_g x) * W_i x)

with the backbone's own activation `act`. W_g is absent where the backbone's FFN is not a gated linear unit. Where a
ReLU gate is closed, r(x) and its gradient are exactly zero, so the adapter runs on open tokens only.

Shape suffixes: B rows, T tokens, N = B*T tokens, O open tokens, D the backbone's width, F the adapter's width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Tap, may_read
from graftlm.grafts.base import ExportedAdapter, ExportsAdapter, Graft, GraftConfig, Trace, Traceable

GateKind = Literal["relu", "sigmoid", "none"]
LocalLoss = Literal["l1", "cross-entropy", "none"]

# For this many tokens, as in decoding, time goes into reading the weights: selecting the open tokens saves nothing.
_FEW_TOKENS = 16
_EXPORTED = Path(__file__).with_name("exported.txt")
_LINEAR, _GATE = "self.{} = nn.Linear({}, bias=False)", "self.gate = nn.Linear(width, 1, bias={})"


class NeutralResiduesConfig(GraftConfig):
    """Config of neutral residues.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        width: the adapters' inner width; it replaces `capacity`.
        gate: the activation of the gate; `none` leaves the adapter ungated.
        gate_init: `open` begins with g(x) = act_g(1) for every token: weight 0, bias 1. `random` is the paper's: a
            weight of variance 1 / d, no bias; half of the tokens then find a ReLU gate closed, and teach it nothing.
        local_loss: `l1` pulls the output towards zero on the old domain; `cross-entropy` trains the gate to classify
            the domain; by default `l1` for a ReLU gate and `cross-entropy` for a sigmoid.
        alpha: weight of the local loss.
        init: variance of the input and gating matrices: `low-variance` is 1 / (d * layers), `he` is 2 / d.
    """

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
                "the local loss cross-entropy teaches a gate, and gate is none: use relu, sigmoid or another local_loss"
            )

    @property
    def has_auxiliary_loss(self) -> bool:
        return self.alpha > 0 and self.loss_kind() != "none"

    def loss_kind(self) -> LocalLoss:
        """The local loss, by default the one that belongs to the gate."""
        by_gate: dict[GateKind, LocalLoss] = {"relu": "l1", "sigmoid": "cross-entropy", "none": "none"}
        return self.local_loss or by_gate[self.gate]


class VanillaAdapterConfig(NeutralResiduesConfig):
    """Config of plain parallel adapters: no gate, no local loss, He's initialisation."""

    kind: Literal["adapter"] = "adapter"
    gate: GateKind = "none"
    alpha: float = Field(0.0, ge=0)
    init: Literal["low-variance", "he"] = "he"


class GatedAdapter(nn.Module):
    """One block; see the module's equation.

    Args:
        width: D.
        inner: F.
        activation: the name of `act` in transformers' ACT2FN.
        gated_ffn: whether A is a gated linear unit.
    """

    def __init__(
        self, width: int, inner: int, activation: str, gated_ffn: bool, config: NeutralResiduesConfig, layers: int
    ) -> None:
        super().__init__()
        self.kind = config.gate
        self.w_i = nn.Linear(width, inner, bias=False)
        self.w_g = nn.Linear(width, inner, bias=False) if gated_ffn else None
        self.w_o = nn.Linear(inner, width, bias=False)
        self.gate = None if config.gate == "none" else nn.Linear(width, 1, bias=config.gate_init == "open")
        from transformers.activations import ACT2FN  # imports transformers' models, which takes seconds

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
            if self.gate.bias is None:
                self.gate.weight.normal_(0, 1 / math.sqrt(width))
            else:
                self.gate.weight.zero_()
                self.gate.bias.fill_(1)

    def scores(self, x: Tensor) -> Tensor | None:
        """The gate's w . x + b, (N,), of inputs (..., D); None without a gate."""
        gate = self.gate
        # Every layer computes this for every decoded token, so it skips the overhead of the Linear's own call.
        return None if gate is None else functional.linear(x, gate.weight, gate.bias).view(-1)

    def adapt(self, x_ND: Tensor) -> Tensor:
        """A(x), (N, D)."""
        inner = self.w_i(x_ND)
        if self.w_g is None:
            return self.w_o(self.activation(inner))
        return self.w_o(self.activation(self.w_g(x_ND)) * inner)

    def residue(self, x_ND: Tensor, scores_N: Tensor | None, *, select: bool = True) -> Tensor:
        """r(x), (N, D); with `select`, closed tokens of many are left out, which synchronises with a GPU."""
        if scores_N is None:
            return self.adapt(x_ND)
        if self.kind == "sigmoid":
            return torch.sigmoid(scores_N)[:, None] * self.adapt(x_ND)
        if not select or len(scores_N) <= _FEW_TOKENS:
            return scores_N.relu()[:, None] * self.adapt(x_ND)
        open_O = (scores_N > 0).nonzero().squeeze(-1)
        if len(open_O) == len(scores_N):
            return scores_N[:, None] * self.adapt(x_ND)
        out_OD = scores_N.index_select(0, open_O)[:, None] * self.adapt(x_ND.index_select(0, open_O))
        return out_OD.new_zeros(x_ND.shape).index_copy(0, open_O, out_OD)

    def is_closed(self, scores_N: Tensor | None) -> bool:
        """Whether r(x) is zero for every token."""
        if scores_N is None or self.kind != "relu":
            return False
        highest = scores_N if len(scores_N) == 1 else scores_N.max()
        return not highest.item() > 0


class NeutralResidues(Graft, Traceable, ExportsAdapter):
    """Gated adapters in every layer of a backbone."""

    Config: ClassVar[type[GraftConfig]] = NeutralResiduesConfig
    label = "neutral residues"
    served_in_bfloat16 = True
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
        return [Tap(Site("ffn", layer), "after", "add", partial(self._add, layer)) for layer in range(len(self.blocks))]

    def prepare(self, call: Call) -> None:
        if call.domain is not None and self.config.alpha > 0 and self.config.loss_kind() == "l1":
            call.scratch[self, "old tokens"] = _tokens_of(call, 0).nonzero().squeeze(-1)

    def _add(self, layer: int, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        block: Any = self.blocks[layer]
        x = inputs.to(call.working_dtype(self))
        scores_N = call.scratch[self, "scores", layer] = block.scores(x)
        readable = may_read(x)
        if readable and block.is_closed(scores_N):
            return None
        select = readable or (x.shape[1] > 1 and not torch.compiler.is_compiling())
        out_ND = block.residue(x.reshape(-1, x.shape[-1]), scores_N, select=select)
        old = call.scratch.get((self, "old tokens"))
        if old is not None and len(old):  # |r(x)|_1 / D, summed over the old domain's tokens, for the local loss
            call.scratch[self, "l1", layer] = out_ND.index_select(0, old).float().abs().sum() / out_ND.shape[-1]
        return out_ND.to(outputs.dtype).view_as(outputs)

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """alpha * l_local.

        `l1` is |r(x)|_1 / D, averaged over the old domain's tokens and the layers. `cross-entropy` is that of the gate
        as a classifier of the domain, averaged over tokens and layers.
        """
        kind = self.config.loss_kind()
        if call.domain is None or not self.config.has_auxiliary_loss:
            return None
        if kind == "l1":
            keys = [(self, "l1", layer) for layer in range(len(self.blocks))]
            terms = [call.scratch[key] for key in keys if key in call.scratch]
        else:
            new = _tokens_of(call, 1)
            known = _tokens_of(call, 0) | new
            labels = new[known].float()
            terms = [
                functional.binary_cross_entropy_with_logits(scores_N[known].float(), labels, reduction="sum")
                for scores_N in self._scores(call)
            ]
        if not terms:
            return None
        count = _count(call, (0,) if kind == "l1" else (0, 1))
        return self.config.alpha * torch.stack(terms).sum() / (count * len(self.blocks)).clamp(min=1)

    def _scores(self, call: Call) -> list[Tensor]:
        """The scores of every layer's gate in this pass, (N,) each; none where a layer has no gate or did not run."""
        scores: list[Any] = [call.scratch.get((self, "scores", layer)) for layer in range(len(self.blocks))]
        return [] if any(score is None for score in scores) else scores

    def observe(self, call: Call) -> dict[str, Tensor]:
        """`open_share` (layers,): the share of tokens whose gate is open; a sigmoid is open above one half."""
        real = call.token_mask.reshape(-1) if call.token_mask is not None else slice(None)
        shares = [(scores_N[real] > 0).float().mean() for scores_N in self._scores(call)]
        return {"open_share": torch.stack(shares)} if shares else {}

    def forward_trace(self, call: Call) -> Trace | None:
        """`open`: the share of layers whose gate is open at each token; None without gates."""
        scores = self._scores(call)
        if call.input_ids is None or not scores:
            return None
        shares_N = torch.stack([(scores_N > 0).float() for scores_N in scores]).mean(0)
        return Trace(["open"], shares_N.view(*call.input_ids.shape, 1))

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """`spectrum`: the singular values of each layer's gating matrix over the largest, beside the backbone's."""
        first = (backbone.sites.ffn_weights(layer)[0] for layer in range(backbone.sites.n_layers))
        matrices: dict[str, list[Any]] = {
            "graft": [block.get_submodule("w_i" if block.w_g is None else "w_g").weight for block in self.blocks],
            "backbone": [getattr(module, name) for module, name in first],
        }
        return {"spectrum": {name: [spectrum(matrix) for matrix in group] for name, group in matrices.items()}}

    def exported_adapter(self, backbone: Backbone) -> ExportedAdapter:
        """The blocks as code that computes all tokens alike, so that it compiles as a whole."""
        block: Any = self.blocks[0]
        gate, inner, equation = "", "self.act(self.w_i(x))", "W_o act(W_i x)"
        plan = {name: "rowwise" if name == "w_o" else "colwise" for name, _ in block.named_children() if "w_" in name}
        modules = [_LINEAR.format(name, "inner, width" if name == "w_o" else "width, inner") for name in plan]
        if block.w_g is not None:
            inner, equation = "self.act(self.w_g(x)) * self.w_i(x)", "W_o (act(W_g x) * W_i x)"
        if block.gate is not None:
            modules.append(_GATE.format(block.gate.bias is not None))
            gate, bias = f"self.gate(x).{block.kind}() * ", "" if block.gate.bias is None else " + b"
            equation = f"{block.kind}(w . x{bias}) {equation}"
        values = {"activation": backbone.sites.activation, "equation": equation, "gate": gate, "inner": inner}
        template = Template(_EXPORTED.read_text(encoding="utf-8"))
        source = template.substitute(values, modules="\n        ".join(modules))
        return ExportedAdapter(source, block.w_i.out_features, [own.state_dict() for own in self.blocks], plan)


class VanillaAdapter(NeutralResidues):
    """The adapters without gate and local loss: the usual parallel adapter, as a baseline."""

    Config: ClassVar[type[GraftConfig]] = VanillaAdapterConfig
    label = "vanilla adapter"


def width_for(capacity: float, backbone: Backbone) -> int:
    """The inner width F at which all layers together hold `capacity` times the backbone's weights."""
    matrices = 3 if backbone.sites.family.gated else 2
    weights = capacity * backbone.parameter_count
    width = weights / (backbone.sites.n_layers * matrices * backbone.sites.width)
    # Tensor cores need rows of full 16 bytes. Rounding a narrow adapter would change its size by more than 1%.
    return round(width / 8) * 8 if width >= 512 else max(1, round(width))


def spectrum(weight: Tensor) -> list[float]:
    """Singular values of a matrix, largest first, divided by the largest; of stacked matrices their mean."""
    values = torch.linalg.svdvals(weight.detach().float())
    return (values / values[..., :1].clamp(min=1e-12)).view(-1, values.shape[-1]).mean(0).tolist()


def _tokens_of(call: Call, domain: int) -> Tensor:
    """(N,) True for the real tokens of rows with this domain mark."""
    assert call.domain is not None
    ids = call.input_ids if call.input_ids is not None else call.token_mask
    assert ids is not None, "a call needs input ids or a token mask to know its tokens"
    mask_BT = (call.domain == domain)[:, None].expand(ids.shape)
    return (mask_BT if call.token_mask is None else mask_BT & call.token_mask).reshape(-1)


def _count(call: Call, domains: tuple[int, ...]) -> Tensor:
    """The number of tokens of these domains: over the optimiser step where the call has totals, else in this pass."""
    if call.totals is not None:
        return call.totals[[1 + domain for domain in domains]].sum()
    return torch.stack([_tokens_of(call, domain).sum() for domain in domains]).sum().float()

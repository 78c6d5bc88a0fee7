"""Neutral residues: gated adapters in parallel to each FFN, which are silent on text that the backbone already models.

An adapter reads the FFN's input x and adds to the FFN's output, or to that of the norm which follows the FFN,

    r(x) = g(x) * A(x),    g(x) = act_g(w . x + b),    A(x) = W_o (act(W_g x) * W_i x)

with the backbone's own activation `act`. W_g is absent if the backbone's FFN is not a gated linear unit. Where a ReLU
gate is closed, r(x) and its gradient are exactly zero, so the adapter runs on open tokens only.

Shape suffixes: B rows, T tokens, N = B*T tokens, D the backbone's width, F the adapter's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Tap, may_read
from graftlm.grafts.base import Graft, GraftConfig, Trace, Traceable
from graftlm.grafts.exports import ExportedAdapter, ExportsAdapter
from graftlm.grafts.neutral_residues.adapter import GatedAdapter
from graftlm.grafts.neutral_residues.config import NeutralResiduesConfig, VanillaAdapterConfig
from graftlm.grafts.neutral_residues.exporting import exported_blocks
from graftlm.grafts.sizes import HasSizes, Sizes

_LARGEST = 4
"""The largest capacity."""


class _Pass(NamedTuple):
    """What the adapters of all layers share in a pass.

    Args:
        dtype: the dtype in which they compute.
        is_old: (N,) True for tokens of the old domain, for the local loss; None without it.
    """

    dtype: torch.dtype
    is_old: Tensor | None


class NeutralResidues(Graft, Traceable, ExportsAdapter, HasSizes):
    """Gated adapters in every layer of a backbone.

    Args:
        config: size, gate, local loss and initialization.
        backbone: the backbone whose FFNs the adapters are parallel to.
    """

    Config: ClassVar[type[GraftConfig]] = NeutralResiduesConfig
    label = "neutral residues"
    served_in_bfloat16 = True
    size_keys: ClassVar[Mapping[str, int]] = {"width": 1}
    takes_weight = True
    config: NeutralResiduesConfig

    def __init__(self, config: NeutralResiduesConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        sites = backbone.sites
        inner = config.width or width_for(config.capacity, backbone)
        blocks = []
        for _ in range(sites.n_layers):
            block = GatedAdapter(
                width=sites.width,
                inner=inner,
                activation=sites.activation,
                gated_ffn=sites.family.gated,
                config=config,
                layers=sites.n_layers,
            )
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks).to(backbone.device)

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        own = cast("NeutralResiduesConfig", config)
        per_width = _weights_per_width(backbone)
        gate = 0
        if own.gate != "none":
            gate = backbone.sites.width + (own.gate_init == "open")
        gates = backbone.sites.n_layers * gate
        return Sizes(
            key="width",
            values=range(1, 2 + _LARGEST * backbone.parameter_count // per_width),
            parameters=lambda width: per_width * width + gates,
            config=lambda width: own.model_copy(update={"width": width}),
        )

    def _adapters(self) -> list[GatedAdapter]:
        return cast("list[GatedAdapter]", list(self.blocks))

    @property
    def decodes_in_one_graph(self) -> bool:
        return True

    def taps(self) -> list[Tap]:
        return [self._tap(layer, block) for layer, block in enumerate(self._adapters())]

    def _tap(self, layer: int, block: GatedAdapter) -> Tap:
        return Tap(
            site=Site("ffn", layer),
            when="after",
            act="add",
            function=partial(self._add, layer, block),
        )

    def prepare(self, call: Call) -> None:
        has_l1_loss = self.config.has_auxiliary_loss and self.config.loss_kind() == "l1"
        is_old_N = None
        if has_l1_loss and call.domain is not None:
            is_old_N = _tokens_of(call, 0)
            if may_read(is_old_N) and not is_old_N.any():
                is_old_N = None
        call.scratch[self] = _Pass(call.working_dtype(self), is_old_N)

    def _add(self, layer: int, block: GatedAdapter, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return r(x) of one layer, in the shape of `outputs` (B, T, D); None if all gates are closed."""
        if self not in call.scratch:  # a layer that runs outside of a pass
            self.prepare(call)
        dtype, is_old_N = call.scratch[self]
        x_ND = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
        scores_N1 = block.scores(x_ND)
        call.scratch[self, layer] = scores_N1
        readable = may_read(x_ND)
        if readable and block.is_closed(scores_N1):
            return None
        select = readable or (inputs.shape[1] > 1 and not torch.compiler.is_compiling())
        out_ND = block.residue(x_ND, scores_N1, select=select)
        if is_old_N is not None:
            # |r(x)|_1 / D, summed over the old domain's tokens, for the local loss. A mask instead of indices keeps the
            # number of these tokens on the device.
            l1_N = out_ND.float().abs().sum(-1)
            call.scratch[self, "l1", layer] = (l1_N * is_old_N).sum() / out_ND.shape[-1]
        return out_ND.view(outputs.shape).to(outputs.dtype)

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """Compute alpha * l_local.

        `l1` is |r(x)|_1 / D, averaged over the old domain's tokens and the layers. `cross-entropy` is that of the gate
        as a classifier of the domain, averaged over tokens and layers.

        Args:
            call: the pass; without `domain` there is no loss.

        Returns:
            A scalar; None without domains, without a local loss, or for `l1` without tokens of the old domain.
        """
        if call.domain is None or not self.config.has_auxiliary_loss:
            return None
        if self.config.loss_kind() == "l1":
            terms = list(self._l1_terms(call))
            domains = [0]
        else:
            terms = list(self._cross_entropy_terms(call))
            domains = [0, 1]
        if not terms:
            return None
        total = torch.stack(terms).sum()
        count = _count(call, domains)
        return self.config.alpha * total / (count * len(self.blocks)).clamp(min=1)

    def _l1_terms(self, call: Call) -> Iterator[Tensor]:
        for layer in range(len(self.blocks)):
            key = (self, "l1", layer)
            if key in call.scratch:
                yield call.scratch[key]

    def _cross_entropy_terms(self, call: Call) -> Iterator[Tensor]:
        new = _tokens_of(call, 1)
        known = _tokens_of(call, 0) | new
        labels = new[known].float()
        for scores_N in self._scores(call):
            scores = scores_N[known].float()
            yield functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")

    def _scores(self, call: Call) -> list[Tensor]:
        """Return the scores (N,) of every layer's gate; an empty list if a layer has no gate or did not run."""
        scores = []
        for layer in range(len(self.blocks)):
            scores_N1 = call.scratch.get((self, layer))
            if scores_N1 is None:
                return []
            scores.append(scores_N1.squeeze(-1))
        return scores

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Return `open_share` (layers,), the share of real tokens whose gate is open.

        A ReLU gate is open above 0, a sigmoid gate above one half. Without gates, the dict is empty.
        """
        scores = self._scores(call)
        if not scores:
            return {}
        real = slice(None) if call.token_mask is None else call.token_mask.reshape(-1)
        shares = []
        for scores_N in scores:
            is_open = scores_N[real] > 0
            shares.append(is_open.float().mean())
        return {"open_share": torch.stack(shares)}

    def forward_trace(self, call: Call) -> Trace | None:
        """Return the trace `open`, the share of layers whose gate is open at each token.

        Without gates or token ids, the result is None.
        """
        scores = self._scores(call)
        if call.input_ids is None or not scores:
            return None
        is_open = [(scores_N > 0).float() for scores_N in scores]
        shares_N = torch.stack(is_open).mean(0)
        return Trace(["open"], shares_N.view(*call.input_ids.shape, 1))

    def describe(self, backbone: Backbone) -> dict[str, object]:
        """Return `spectrum`: the relative singular values of each gating matrix, of the graft and of the backbone."""
        graft_spectra = []
        for block in self._adapters():
            linear = block.w_i if block.w_g is None else block.w_g
            graft_spectra.append(spectrum(linear.weight))
        backbone_spectra = []
        for layer in range(backbone.sites.n_layers):
            module, name = backbone.sites.ffn_weights(layer)[0]
            backbone_spectra.append(spectrum(getattr(module, name)))
        return {"spectrum": {"graft": graft_spectra, "backbone": backbone_spectra}}

    def exported_adapter(self, backbone: Backbone) -> ExportedAdapter:
        return exported_blocks(self._adapters(), backbone.sites.activation)


class VanillaAdapter(NeutralResidues):
    """Adapters without gate and local loss: the usual parallel adapter, as a baseline."""

    Config: ClassVar[type[GraftConfig]] = VanillaAdapterConfig
    label = "vanilla adapter"


def width_for(capacity: float, backbone: Backbone) -> int:
    """Return the inner width F at which the adapters' matrices have `capacity` times the backbone's weights.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        backbone: the backbone, which gets an adapter in each layer.

    Returns:
        The nearest width that is at least 1; widths from 512 on are rounded to multiples of 8.
    """
    weights = capacity * backbone.parameter_count
    width = weights / _weights_per_width(backbone)
    if width >= 512:
        # Tensor cores need rows of full 16 bytes. Rounding a narrow adapter would change its size by more than 1%.
        return round(width / 8) * 8
    return max(1, round(width))


def _weights_per_width(backbone: Backbone) -> int:
    """Return the number of weights of the adapters' matrices for each unit of their width."""
    matrices = 3 if backbone.sites.family.gated else 2
    return backbone.sites.n_layers * matrices * backbone.sites.width


def spectrum(weight: Tensor) -> list[float]:
    """Return the singular values of a matrix, in descending order, divided by the largest.

    Args:
        weight: (rows, columns), or (matrices, rows, columns), whose spectra are averaged.
    """
    values = torch.linalg.svdvals(weight.detach().float())
    relative = values / values[..., :1].clamp(min=1e-12)
    return relative.view(-1, values.shape[-1]).mean(0).tolist()


def _tokens_of(call: Call, domain: int) -> Tensor:
    """Return (N,), True for the real tokens of rows of this domain."""
    assert call.domain is not None
    ids = call.input_ids if call.input_ids is not None else call.token_mask
    assert ids is not None, "the shape of the batch is that of its input ids or token mask"
    mask_B = call.domain == domain
    mask_BT = mask_B[:, None].expand(ids.shape)
    if call.token_mask is not None:
        mask_BT = mask_BT & call.token_mask
    return mask_BT.reshape(-1)


def _count(call: Call, domains: Sequence[int]) -> Tensor:
    """Return the number of tokens of these domains: of the optimizer step if the call has totals, else of this pass."""
    if call.totals is not None:
        columns = [1 + domain for domain in domains]
        return call.totals[columns].sum()
    counts = [_tokens_of(call, domain).sum() for domain in domains]
    return torch.stack(counts).sum().float()

"""Composition: a frozen anchor cross-attends to frozen augmenting models.

After a layer j of the anchor (the backbone) that is paired with layer i of an augmenting model:

    H'_Bj = H_Bj + sum over augmenting models of f_cross(f_proj(H_Ai), H_Bj)

Only f_proj and f_cross (`attention.py`) are trained, and the gate of a readout (`readout.py`). Position t of the anchor
sees what the augmenting model has read up to t (`alignment.py`).

Shape suffixes: B rows, T anchor tokens, S augmenting tokens, D the anchor's width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import GraftError
from graftlm.grafts.base import Graft, GraftConfig, ReadsModels
from graftlm.grafts.composition.attention import CrossAttention
from graftlm.grafts.composition.augmenting import AugmentingModel, AugmentingStates, load_augmenting
from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig, Pair
from graftlm.grafts.composition.readout import MixtureGate, mix, output_width


class Composition(Graft, ReadsModels):
    """Projections and cross-attentions from a backbone to augmenting models.

    Args:
        config: the graft keeps a copy with the pairs that result from its strides.
        backbone: the anchor.
        augmenting: models that are already loaded, by their names in the config; the others are loaded.

    Raises GraftError if layers, widths or tokenizers do not fit, and BackboneError if a model can't be loaded.
    """

    Config: ClassVar[type[GraftConfig]] = CompositionConfig
    label = "composition"
    config: CompositionConfig
    blocks: Any
    """A `CrossAttention` per augmenting model and pair."""

    def __init__(
        self, config: CompositionConfig, backbone: Backbone, augmenting: Mapping[str, Backbone] | None = None
    ) -> None:
        super().__init__()
        sites = backbone.sites
        heads = config.heads or int(sites.config.num_attention_heads)
        check_heads(heads, sites.width, even=config.positions != "none")
        self._models: dict[str, AugmentingModel] = {}
        self.blocks = nn.ModuleDict()
        resolved: dict[str, AugmentingConfig] = {}
        for name, model_config in config.augmenting.items():
            model = (augmenting or {}).get(name) or load_augmenting(name, model_config, backbone.device)
            pairs: list[Pair] = []
            if config.cross:  # those that are listed, or result from strides
                pairs = model_config.pairs or pairs_of(config, name, model, backbone)
                model_config = model_config.model_copy(update={"pairs": check_pairs(name, pairs, model, backbone)})
            resolved[name] = model_config
            self._models[name] = AugmentingModel(name, model, [i for i, _ in pairs], backbone, config)
            block = partial(CrossAttention, norm=config.norm, init=config.init, positions=config.positions)
            blocks = [block(sites.width, model.sites.width, heads, qk_norm=config.qk_norm) for _ in pairs]
            self.blocks[name] = nn.ModuleList(blocks)
        self.readout: MixtureGate | None = None
        if config.readout == "mixture":
            widths = [output_width(f"The augmenting model {name}", m.backbone) for name, m in self._models.items()]
            self.readout = MixtureGate([output_width("The backbone", backbone), *widths])
        self.config = config.model_copy(update={"augmenting": resolved})
        self.to(backbone.device)

    def pairs(self, name: str) -> list[Pair]:
        """The pairs of an augmenting model that have a cross-attention."""
        return list(self.config.augmenting[name].pairs or ()) if self.config.cross else []

    def frozen_models(self) -> Mapping[str, Backbone]:
        return {name: model.backbone for name, model in self._models.items()}

    def taps(self) -> list[Tap]:
        sources: dict[int, list[tuple[str, int]]] = {}  # anchor layer -> (augmenting model, number of its pair)
        for name in self._models:
            for number, (_, layer) in enumerate(self.pairs(name)):
                sources.setdefault(layer, []).append((name, number))
        taps = [Tap(Site("layer", at), "after", "add", partial(self._add, sources[at])) for at in sorted(sources)]
        return taps if self.readout is None else [*taps, Tap(Site("head"), "after", "replace", self._read_out)]

    def prepare(self, call: Call) -> None:
        for name, model in self._models.items():
            call.scratch[self, name] = model.read(call)

    def _add(self, sources: list[tuple[str, int]], call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        anchor = outputs.to(call.working_dtype(self))
        crossed = (self._cross(call, name, number, anchor) for name, number in sources)
        updates = [update for update in crossed if update is not None]
        return sum(updates[1:], updates[0]).to(outputs.dtype) if updates else None

    def _cross(self, call: Call, name: str, number: int, anchor_BTD: Tensor) -> Tensor | None:
        """The update of one pair; None if the augmenting model has read nothing."""
        augmenting: AugmentingStates = call.scratch[self, name]
        if augmenting.is_empty:
            return None
        states = None if augmenting.states is None else augmenting.states[number].to(anchor_BTD.dtype)
        weights: list[Tensor] | None = [] if call.observing else None
        cache = augmenting.caches[number] if augmenting.caches else None
        block = self.blocks[name][number]
        update = block(anchor_BTD, states, augmenting.visibility, augmenting.positions, cache, weights)
        if weights is not None:
            call.scratch[self, "statistics", name, number] = statistics(anchor_BTD, update, weights[0], call.token_mask)
        return update

    def _read_out(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Log-probabilities of the mixture for the last tokens, as many as the output layer has logits for."""
        assert self.readout is not None
        columns = outputs.shape[1]
        last = {name: call.scratch[self, name].last[:, -columns:] for name in self._models}
        dtype = call.working_dtype(self)
        shares = self.readout([states.to(dtype) for states in (inputs, *last.values())])
        if call.observing:
            real = slice(None) if call.token_mask is None else call.token_mask[:, -columns:]
            call.scratch[self, "shares"] = shares[real].flatten(0, -2).mean(0)
        return mix(outputs, [model.logits(last[name]) for name, model in self._models.items()], shares)

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Per augmenting model, `<name>_<quantity>` with one value per pair, and `<name>_gate` with one value.

        `written`: norm of the update over the norm of the anchor's states. `attention_here`: attention mass on the last
        visible token. `attention_before`: mass on the earlier tokens. `attention_bits`: entropy of the weights.
        `gate`: the mean share of its distribution in the readout's mixture.
        """
        means: dict[str, Tensor] = {}
        for index, name in enumerate(self._models):
            pairs = [call.scratch.get((self, "statistics", name, n), {}) for n in range(len(self.pairs(name)))]
            for quantity in pairs[0] if pairs else ():
                means[f"{name}_{quantity}"] = torch.stack([pair[quantity] for pair in pairs if pair])
            if (self, "shares") in call.scratch:
                means[f"{name}_gate"] = call.scratch[self, "shares"][index + 1 : index + 2]
        return means

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """The pairs, and the number of parameters beside the paper's formula, which omits W_O."""
        description: dict[str, Any] = {}
        d = backbone.sites.width
        for name in self._models:
            pairs, width = self.pairs(name), self._models[name].backbone.sites.width
            description |= {
                f"{name}: pairs of layers": ", ".join(f"{i} to {j}" for i, j in pairs),
                f"{name}: parameters": sum(p.numel() for p in self.blocks[name].parameters()),
                f"{name}: paper's n(D_A D_B + 3 D_B^2)": len(pairs) * (width * d + 3 * d * d),
                f"{name}: and W_O's n D_B^2": len(pairs) * d * d,
            }
        if self.readout is not None:
            description["readout: parameters"] = sum(p.numel() for p in self.readout.parameters())
        return description

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for model in self._models.values():  # not submodules, but they move with the graft
            model.backbone.model._apply(fn)
        return super()._apply(fn, recurse)


def pairs_of(config: CompositionConfig, name: str, augmenting: Backbone, anchor: Backbone) -> list[Pair]:
    """Pairs by stride: every stride-th layer of the augmenting model, with evenly spaced layers of the anchor.

    The last layers of both models are among them.
    """
    stride = config.augmenting[name].stride or config.stride
    n_A, n_B = augmenting.sites.n_layers, anchor.sites.n_layers
    count = n_A // stride
    if count == 0:
        raise GraftError(
            f"A stride of {stride} skips all {n_A} layers of {name}: set stride to {n_A} or less, or list pairs."
        )
    if count > n_B:
        raise GraftError(
            f"A stride of {stride} pairs {count} layers of {name}, but the anchor has {n_B}: "
            f"set stride to {-(-n_A // n_B)} or more, or list pairs."
        )
    return [(n_A - 1 - stride * (count - 1 - k), (k + 1) * n_B // count - 1) for k in range(count)]


def check_pairs(name: str, pairs: list[Pair], augmenting: Backbone, anchor: Backbone) -> list[Pair]:
    """The pairs, after a check that both models have these layers."""
    for i, j in pairs:
        for model, layer, count in ((name, i, augmenting.sites.n_layers), ("the anchor", j, anchor.sites.n_layers)):
            if not 0 <= layer < count:
                raise GraftError(
                    f"The pair [{i}, {j}] of {name} names layer {layer} of {model}, which has layers 0 to {count - 1}: "
                    "correct pairs (the augmenting model's layer comes first)."
                )
    if len(set(pairs)) < len(pairs):
        repeated = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise GraftError(f"The pair {list(repeated)} of {name} is listed twice: remove one.")
    return pairs


def check_heads(heads: int, width: int, *, even: bool) -> None:
    """Raise `GraftError` unless `heads` divides the anchor's width; rotary positions need an even head width."""
    step = 2 if even else 1
    if width % (heads * step):
        fitting = [n for n in range(1, 2 * heads + 1) if width % (n * step) == 0]
        raise GraftError(
            f"{heads} heads do not divide the anchor's width {width}{' evenly' if even else ''}: set heads to one of "
            f"{', '.join(map(str, fitting[-4:]))}."
        )


def statistics(
    anchor_BTD: Tensor, update_BTD: Tensor, weights_BHTS: Tensor, real_BT: Tensor | None
) -> dict[str, Tensor]:
    """Statistics of one pair in a pass, as means over its tokens; see `Composition.observe`."""
    if real_BT is None:
        real_BT = torch.ones(anchor_BTD.shape[:2], dtype=torch.bool, device=anchor_BTD.device)
    weights = weights_BHTS.mean(1)[real_BT]  # (tokens, S)
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), -1).amax(-1)
    here = weights.gather(-1, last.clamp(min=0)[:, None]).squeeze(-1)
    per_head = weights_BHTS.transpose(1, 2)[real_BT]
    bits = -(per_head * per_head.clamp(min=1e-30).log2()).sum(-1)
    norms = update_BTD.float().norm(dim=-1)[real_BT] / anchor_BTD.float().norm(dim=-1)[real_BT].clamp(min=1e-12)
    return {
        "written": norms.mean(),
        "attention_here": here.mean(),
        "attention_before": (weights.sum(-1) - here).mean(),
        "attention_bits": bits.mean(),
    }

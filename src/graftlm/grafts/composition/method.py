"""Composition: a frozen anchor cross-attends to frozen augmenting models.

After some layers j of the anchor (the backbone), with i the layer of the augmenting model that is paired with j:

    H'_Bj = H_Bj + sum over augmenting models of f_cross(f_proj(H_Ai), H_Bj)

f_proj and f_cross (see `attention.py`) are all that trains. Position t of the anchor sees what the augmenting model has
read up to there, and no more (see `alignment.py`, and `spelling.py` for two tokenizers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import GraftError
from graftlm.grafts.base import Graft, GraftConfig, ReadsModels
from graftlm.grafts.composition.attention import CrossAttention
from graftlm.grafts.composition.augmenting import Augmenting, load_augmenting
from graftlm.grafts.composition.config import CompositionConfig, Pair


class Composition(Graft, ReadsModels):
    """Projections and cross-attentions from a backbone to augmenting models.

    Args:
        config: its config; the pairs that a stride gives are written into the graft's own copy.
        backbone: the anchor.
        augmenting: models that are loaded already, by their names in the config; others are loaded.

    Raises:
        GraftError: layers, widths or tokenizers do not fit.
        BackboneError: an augmenting model can't be loaded.
    """

    Config: ClassVar[type[GraftConfig]] = CompositionConfig
    label = "composition"
    config: CompositionConfig

    def __init__(
        self, config: CompositionConfig, backbone: Backbone, augmenting: Mapping[str, Backbone] | None = None
    ) -> None:
        super().__init__()
        sites = backbone.sites
        heads = config.heads or int(sites.config.num_attention_heads)
        check_heads(heads, sites.width, even=config.positions != "none")
        self._models: dict[str, Augmenting] = {}
        self.blocks = nn.ModuleDict()
        resolved = {}
        for name, chosen in config.augmenting.items():
            live = (augmenting or {}).get(name) or load_augmenting(name, chosen, backbone.device)
            pairs = check_pairs(name, chosen.pairs or pairs_of(config, name, live, backbone), live, backbone)
            self._models[name] = Augmenting(name, live, [i for i, _ in pairs], backbone, config)
            width = live.sites.width
            self.blocks[name] = nn.ModuleList(
                CrossAttention(sites.width, width, heads, config.norm, config.init, config.positions) for _ in pairs
            )
            resolved[name] = chosen.model_copy(update={"pairs": pairs})
        self.config = config.model_copy(update={"augmenting": resolved})
        self.to(backbone.device)

    def frozen_models(self) -> Mapping[str, Backbone]:
        return {name: model.backbone for name, model in self._models.items()}

    def taps(self) -> list[Tap]:
        return [Tap(Site("layer", layer), "after", "add", self._tap(found)) for layer, found in self._at_layers()]

    def _at_layers(self) -> Iterable[tuple[int, list[tuple[str, int]]]]:
        """Each paired layer of the anchor, with the (augmenting model, number of its pair) that write there."""
        found: dict[int, list[tuple[str, int]]] = {}
        for name, chosen in self.config.augmenting.items():
            for number, (_, layer) in enumerate(chosen.pairs or ()):
                found.setdefault(layer, []).append((name, number))
        return sorted(found.items())

    def prepare(self, call: Call) -> None:
        for name, model in self._models.items():
            call.scratch[self, name] = model.read(call)

    def _tap(self, sources: list[tuple[str, int]]) -> Any:
        def add(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
            anchor = outputs.to(call.working_dtype(self))
            written = [self._cross(call, name, number, anchor) for name, number in sources]
            some = [one for one in written if one is not None]
            return sum(some[1:], some[0]).to(outputs.dtype) if some else None

        return add

    def _cross(self, call: Call, name: str, number: int, anchor_BTD: Tensor) -> Tensor | None:
        """What one pair writes; None when nothing was read yet."""
        read = call.scratch[self, name]
        if read.nothing:
            return None
        states = None if read.states is None else read.states[number].to(anchor_BTD.dtype)
        seen: list[Tensor] | None = [] if call.observing else None
        cache: CacheLayerMixin | None = read.keys_and_values[number] if read.keys_and_values else None
        written = self._blocks(name)[number](anchor_BTD, states, read.visible, read.places, cache, seen)
        if seen is not None:
            call.scratch[self, "seen", name, number] = observed(anchor_BTD, written, seen[0], call.token_mask)
        return written

    def _blocks(self, name: str) -> nn.ModuleList:
        blocks = self.blocks[name]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def observe(self, call: Call) -> dict[str, Tensor]:
        """For each augmenting model, one value a pair: `<name>_...`

        `written`: the norm of what is written over that of the anchor's states. `attention_here`: the mass on what was
        read last; `attention_before`: on the rest; `attention_bits`: the entropy of the weights.
        """
        found: dict[str, Tensor] = {}
        for name, chosen in self.config.augmenting.items():
            pairs = [call.scratch.get((self, "seen", name, number)) for number in range(len(chosen.pairs or ()))]
            for quantity in (pairs[0] or {}) if pairs else {}:
                found[f"{name}_{quantity}"] = torch.stack([one[quantity] for one in pairs if one is not None])
        return found

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """The pairs, and the number of parameters beside the paper's formula, which leaves W_O out."""
        described: dict[str, Any] = {}
        d = backbone.sites.width
        for name, chosen in self.config.augmenting.items():
            pairs, width = chosen.pairs or [], self._models[name].backbone.sites.width
            described |= {
                f"{name}: pairs of layers": ", ".join(f"{i} to {j}" for i, j in pairs),
                f"{name}: parameters": sum(p.numel() for p in self._blocks(name).parameters()),
                f"{name}: paper's n(D_A D_B + 3 D_B^2)": len(pairs) * (width * d + 3 * d * d),
                f"{name}: and W_O's n D_B^2": len(pairs) * d * d,
            }
        return described

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for model in self._models.values():  # which are no modules of this graft's, but go where it goes
            model.backbone.model._apply(fn)
        return super()._apply(fn, recurse)


def pairs_of(config: CompositionConfig, name: str, augmenting: Backbone, anchor: Backbone) -> list[Pair]:
    """Every stride-th layer of the augmenting model, the last included, and as many of the anchor's, evenly spaced.

    Raises:
        GraftError: the stride is longer than the model, or the anchor has fewer layers than there are pairs.
    """
    stride = config.augmenting[name].stride or config.stride
    n_A, n_B = augmenting.sites.n_layers, anchor.sites.n_layers
    count = n_A // stride
    if count == 0:
        raise GraftError(
            f"A stride of {stride} passes over all {n_A} layers of {name}: set stride to {n_A} or less, or name pairs."
        )
    if count > n_B:
        raise GraftError(
            f"A stride of {stride} pairs {count} layers of {name}, but the anchor has {n_B}: "
            f"set stride to {-(-n_A // n_B)} or more, or name pairs."
        )
    return [(n_A - 1 - stride * (count - 1 - k), (k + 1) * n_B // count - 1) for k in range(count)]


def check_pairs(name: str, pairs: list[Pair], augmenting: Backbone, anchor: Backbone) -> list[Pair]:
    """The pairs, if both models have such layers.

    Raises:
        GraftError: a layer is out of range, or a pair is named twice.
    """
    for i, j in pairs:
        for what, layer, count in ((name, i, augmenting.sites.n_layers), ("the anchor", j, anchor.sites.n_layers)):
            if not 0 <= layer < count:
                raise GraftError(
                    f"The pair [{i}, {j}] of {name} names layer {layer} of {what}, which has layers 0 to {count - 1}: "
                    "correct pairs (the augmenting model's layer comes first)."
                )
    if len(set(pairs)) < len(pairs):
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise GraftError(f"The pair {list(twice)} of {name} is named twice: leave one out.")
    return pairs


def check_heads(heads: int, width: int, *, even: bool) -> None:
    """Raise `GraftError` unless `heads` divide the anchor's width, into heads of an even width where positions turn."""
    step = 2 if even else 1
    if width % (heads * step):
        fitting = [n for n in range(1, width + 1) if width % (n * step) == 0 and n <= 2 * heads]
        raise GraftError(
            f"{heads} heads do not divide the anchor's width {width}{' evenly' if even else ''}: set heads to one of "
            f"{', '.join(map(str, fitting[-4:]))}."
        )


def observed(anchor: Tensor, written: Tensor, weights_BHTS: Tensor, real_BT: Tensor | None) -> dict[str, Tensor]:
    """What one pair did in a pass, as means over its tokens; see `Composition.observe`."""
    real = real_BT if real_BT is not None else torch.ones(anchor.shape[:2], dtype=torch.bool, device=anchor.device)
    weights = weights_BHTS.mean(1)[real]  # (tokens, S)
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), -1).amax(-1)
    here = weights.gather(-1, last.clamp(min=0)[:, None]).squeeze(-1)
    per_head = weights_BHTS.transpose(1, 2)[real]
    bits = -(per_head * per_head.clamp(min=1e-30).log2()).sum(-1)
    norms = written.float().norm(dim=-1)[real] / anchor.float().norm(dim=-1)[real].clamp(min=1e-12)
    return {
        "written": norms.mean(),
        "attention_here": here.mean(),
        "attention_before": (weights.sum(-1) - here).mean(),
        "attention_bits": bits.mean(),
    }

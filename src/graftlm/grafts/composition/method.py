"""Composition: a frozen anchor cross-attends to frozen augmenting models.

After a layer j of the anchor (the backbone) that is paired with layer i of an augmenting model:

    H'_Bj = H_Bj + sum over augmenting models of f_cross(f_proj(H_Ai), H_Bj)

Only f_proj and f_cross (`attention.py`) and the gate of a readout (`readout.py`) are trained. Position t of the anchor
sees what the augmenting model has read up to t (`alignment.py`).

Shape suffixes: B rows, T anchor tokens, S augmenting tokens, D the anchor's width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts.base import Graft, GraftConfig, ReadsModels
from graftlm.grafts.composition.augmenting import AugmentingModel, AugmentingStates, load_augmenting
from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig, Pair
from graftlm.grafts.composition.pairs import check_heads, resolve_pairs
from graftlm.grafts.composition.readout import MixtureGate, mix, output_width
from graftlm.grafts.composition.sizes import new_attention, number_of_heads, stride_sizes
from graftlm.grafts.composition.statistics import statistics
from graftlm.grafts.sizes import HasSizes, Sizes


class Composition(Graft, ReadsModels, HasSizes):
    """Projections and cross-attentions from a backbone to augmenting models.

    Args:
        config: configuration; the graft keeps a copy in which strides are replaced by the pairs that result from them.
        backbone: the anchor.
        augmenting: models that are already loaded, by their names in the config; the others are loaded. Names that are
            not in the config are ignored. The models' parameters are frozen.

    Raises:
        GraftError: layers, heads or tokenizers do not fit together, an augmenting model is the anchor itself or not
            causal, or the readout does not support a model.
        BackboneError: a model can't be loaded, or has no tokenizer although tokens are matched by characters.
    """

    Config: ClassVar[type[GraftConfig]] = CompositionConfig
    accepts_added_tokens: ClassVar[bool] = False
    has_decode_state = True
    label = "composition"
    observed_place = "pair"
    config: CompositionConfig
    blocks: Any
    """A `CrossAttention` for each augmenting model and pair."""

    def __init__(
        self,
        config: CompositionConfig,
        backbone: Backbone,
        augmenting: Mapping[str, Backbone] | None = None,
    ) -> None:
        super().__init__()
        loaded = augmenting or {}
        heads = number_of_heads(config, backbone)
        check_heads(heads, backbone.sites.width, even=config.positions != "none")
        self._models: dict[str, AugmentingModel] = {}
        self.blocks = nn.ModuleDict()
        resolved: dict[str, AugmentingConfig] = {}
        for name, model_config in config.augmenting.items():
            model = loaded.get(name) or load_augmenting(name, model_config, backbone)
            pairs: list[Pair] = []
            resolved[name] = model_config
            if config.cross:
                pairs = resolve_pairs(config, name, model, backbone)
                resolved[name] = model_config.model_copy(update={"pairs": pairs})
            layers = [layer for layer, _ in pairs]
            self._models[name] = AugmentingModel(name, model, layers, anchor=backbone, config=config)
            self.blocks[name] = nn.ModuleList(
                new_attention(config, model.sites.width, backbone.sites.width, heads) for _ in pairs
            )
        self.readout: MixtureGate | None = None
        if config.readout == "mixture":
            self.readout = self._new_gate(backbone)
        self.config = config.model_copy(update={"augmenting": resolved})
        self.to(backbone.device)

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        return stride_sizes(cast("CompositionConfig", config), backbone)

    def _new_gate(self, backbone: Backbone) -> MixtureGate:
        widths = []
        for name, model in self._models.items():
            widths.append(output_width(f"The augmenting model {name}", model.backbone))
        anchor_width = output_width("The backbone", backbone)
        return MixtureGate([anchor_width, *widths])

    def pairs(self, name: str) -> list[Pair]:
        """Return the pairs of an augmenting model that have a cross-attention: (its layer, layer of the anchor).

        Args:
            name: name of the augmenting model, which must be one of the config.

        Returns:
            The pairs, counted from 0; an empty list if `cross` is false.
        """
        if not self.config.cross:
            return []
        return list(self.config.augmenting[name].pairs or ())

    def frozen_models(self) -> Mapping[str, Backbone]:
        return {name: model.backbone for name, model in self._models.items()}

    @property
    def decodes_in_one_graph(self) -> bool:
        return not any(model.reads_characters for model in self._models.values())

    def taps(self) -> list[Tap]:
        sources: dict[int, list[tuple[str, int]]] = {}  # anchor layer -> (augmenting model, number of its pair)
        for name in self._models:
            for number, (_, layer) in enumerate(self.pairs(name)):
                sources.setdefault(layer, []).append((name, number))
        taps = []
        for layer in sorted(sources):
            tap = Tap(
                site=Site("layer", layer),
                when="after",
                act="add",
                function=partial(self._add, sources[layer]),
            )
            taps.append(tap)
        if self.readout is not None:
            tap = Tap(
                site=Site("head"),
                when="after",
                act="replace",
                function=self._read_out,
                takes_selection=True,
            )
            taps.append(tap)
        return taps

    def prepare(self, call: Call) -> None:
        for name, model in self._models.items():
            call.scratch[self, name] = model.read(call)

    def _add(self, sources: list[tuple[str, int]], call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return the sum of the updates of all pairs of an anchor layer; None if no augmenting model has read."""
        anchor_BTD = outputs.to(call.working_dtype(self))
        total_BTD: Tensor | None = None
        for name, number in sources:
            update_BTD = self._cross(call, name, number, anchor_BTD)
            if total_BTD is None:
                total_BTD = update_BTD
            elif update_BTD is not None:
                total_BTD = total_BTD + update_BTD
        if total_BTD is None:
            return None
        return total_BTD.to(outputs.dtype)

    def _cross(self, call: Call, name: str, number: int, anchor_BTD: Tensor) -> Tensor | None:
        """Return the update of one pair, (B, T, D); None if the augmenting model has read nothing."""
        augmenting: AugmentingStates = call.scratch[self, name]
        if augmenting.is_empty:
            return None
        states_BSA: Tensor | None = None
        if augmenting.states is not None:
            states_BSA = augmenting.states[number].to(anchor_BTD.dtype)
        weights: list[Tensor] | None = [] if call.observing else None
        update_BTD = self.blocks[name][number](
            anchor_BTD,
            states_BSA,
            augmenting.visibility,
            positions=augmenting.positions,
            cache=augmenting.caches[number] if augmenting.caches else None,
            attention_weights=weights,
        )
        if weights is not None:
            call.scratch[self, "statistics", name, number] = statistics(
                anchor_BTD,
                update_BTD,
                weights_BHTS=weights[0],
                real_BT=call.token_mask,
            )
        return update_BTD

    def _read_out(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return log-probabilities of the mixture for the tokens that the output layer receives."""
        assert self.readout is not None
        columns = outputs.shape[1]
        dtype = call.working_dtype(self)
        last = {name: call.at_head(call.scratch[self, name].last, columns) for name in self._models}
        gate_inputs = [states.to(dtype) for states in (inputs, *last.values())]
        shares_BKN = self.readout(gate_inputs)
        if call.observing:
            real = slice(None) if call.token_mask is None else call.at_head(call.token_mask, columns)
            call.scratch[self, "shares"] = shares_BKN[real].flatten(0, -2).mean(0)
        others = [model.logits(last[name]) for name, model in self._models.items()]
        return mix(outputs, others, shares_BKN)

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Return statistics of a pass for each augmenting model.

        Args:
            call: the pass.

        Returns:
            `<name>_<quantity>` with one value for each pair:

            - `written`: norm of the update over the norm of the anchor's states.
            - `attention_here`: attention to the last visible token.
            - `attention_before`: attention to the earlier tokens.
            - `attention_bits`: entropy of the attention weights.

            And `<name>_gate` with one value: the mean share of the model in the mixture of the readout.
        """
        means: dict[str, Tensor] = {}
        shares = call.scratch.get((self, "shares"))
        for index, name in enumerate(self._models, start=1):
            observed = []
            for number in range(len(self.pairs(name))):
                key = (self, "statistics", name, number)
                if key in call.scratch:
                    observed.append(call.scratch[key])
            if observed:
                for quantity in observed[0]:
                    means[f"{name}_{quantity}"] = torch.stack([pair[quantity] for pair in observed])
            if shares is not None:
                means[f"{name}_gate"] = shares[index : index + 1]
        return means

    def describe(self, backbone: Backbone) -> dict[str, object]:
        """Return the pairs and the numbers of parameters, and for comparison the paper's formula, which omits W_O.

        Args:
            backbone: the anchor.

        Returns:
            Texts and numbers by keys that begin with the augmenting model's name, or with `readout`.
        """
        description: dict[str, object] = {}
        d = backbone.sites.width
        for name, model in self._models.items():
            pairs = self.pairs(name)
            width = model.backbone.sites.width
            description[f"{name}: pairs of layers"] = ", ".join(f"{i} to {j}" for i, j in pairs)
            description[f"{name}: parameters"] = _parameter_count(self.blocks[name])
            description[f"{name}: paper's n(D_A D_B + 3 D_B^2)"] = len(pairs) * (width * d + 3 * d * d)
            description[f"{name}: and W_O's n D_B^2"] = len(pairs) * d * d
        if self.readout is not None:
            description["readout: parameters"] = _parameter_count(self.readout)
        return description

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The augmenting models are not submodules, but they move with the graft.
        for model in self._models.values():
            model.backbone.model._apply(fn)
        return super()._apply(fn, recurse)


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

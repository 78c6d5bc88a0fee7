"""Sites: the locations in a backbone where taps act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from graftlm.errors import TapError, UnknownFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from graftlm.backbone.families import FAMILIES, PROVEN_FAMILIES, Family, Sublayer, family_row
from graftlm.backbone.modules import ffn_activation, has_experts, has_module, linear_sizes, outer_linears, same_function
from graftlm.backbone.structure import structure_of

SiteKind = Literal["embedding", "layer", "attention", "ffn", "norm", "head", "module"]


@dataclass(frozen=True)
class Site:
    """A location in a backbone where taps act.

    Layers, attentions and FFNs have the index of a layer, negative ones count from the end; `module` has its path.
    """

    kind: SiteKind
    layer: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        detail = self.path if self.kind == "module" else self.layer
        return self.kind if detail is None else f"{self.kind} {detail}"


class Sites:
    """The sites of a live model; UnknownFamilyError if its structure is unknown, or its family's row does not fit."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model_type: str = model.config.model_type
        self.family = _family(model)
        self._model, self._base = model, model.base_model
        self.config = getattr(model.config, self.family.text_config or "", model.config)
        self.body = self._resolve(self._base, self.family.body)
        self.layers: Any = self._resolve(self._base, self.family.layers)
        if not isinstance(self.layers, nn.ModuleList):
            raise UnknownFamilyError(f"{self.family.layers} of {type(model).__name__} is not a list of layers.")
        self._check()

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        """The model's hidden size d."""
        return int(self.config.hidden_size)

    @property
    def activation(self) -> str:
        """The FFN's activation, by its name in transformers' ACT2FN."""
        return str(getattr(self.config, self.family.activation, self.family.activation))

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer's FFN is a mixture of experts."""
        return has_experts(self.module(Site("ffn", layer))[0])

    def ffn_linears(self, layer: int) -> list[nn.Module]:
        """The Linears of a dense FFN: those that read its input, the activated one first, then the last."""
        if self.is_mixture(layer):
            raise TapError(
                f"The FFN of layer {layer} of this {self.model_type} model is a mixture of experts: choose the "
                "attention, or a graft that stands beside the whole FFN."
            )
        return [self._resolve(self.layers[layer], path) for path in (*self.family.ffn_in, self.family.ffn_out)]

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """The sizes, by path, of the Linears of a layer's attention and dense FFN that read its tokens alone."""
        names = {module: name for name, module in self._model.named_modules()}
        attends = has_module(self.layers[layer], self.family.attention.entry)
        roots = [] if self.is_mixture(layer) else self.ffn_linears(layer)
        roots += list(self.module(Site("attention", layer))) if attends else []
        sizes = {names[linear]: linear_sizes(linear) for root in roots for linear in outer_linears(root)}
        return {path: size for path, size in sizes.items() if size and not self.reads_positions(path)}

    def reads_positions(self, path: str) -> bool:
        """Whether the module at a path also reads embeddings of relative positions, which belong to no token."""
        return any(path.endswith(f".{name}") for name in self.family.reads_positions)

    def ffn_weights(self, layer: int) -> list[tuple[nn.Module, str]]:
        """The matrices of a layer's FFN as modules and parameters' names, the activated one first, without a router."""
        if not self.is_mixture(layer):
            return [(linear, "weight") for linear in self.ffn_linears(layer)]
        ffn = self.module(Site("ffn", layer))[0]
        linears = {m for name, m in ffn.named_modules() if linear_sizes(m) and not name.endswith(("gate", "router"))}
        owned = [(m, name, p) for m in ffn.modules() for name, p in m.named_parameters(recurse=False)]
        return [(m, name) for m, name, p in owned if p.dim() == 3 or (m in linears and name == "weight")]

    def _check(self) -> None:
        """Compare the row with the widths of the FFNs, and with the activation if it is a module."""
        from transformers.activations import ACT2FN

        problem = ""
        for layer in (layer for layer in range(self.n_layers) if not self.is_mixture(layer)):
            sizes: list[Any] = [linear_sizes(linear) for linear in self.ffn_linears(layer)]
            if None in sizes:  # a quantiser hides them
                continue
            (inner, written), readers = sizes[-1], sizes[:-1]
            widths = (inner, 2 * inner) if len(readers) == 1 else (inner,)  # one Linear may hold both halves
            if written != self.width or any(read != self.width or size not in widths for read, size in readers):
                paths = ", ".join((*self.family.ffn_in, self.family.ffn_out))
                problem = f"{paths} of layer {layer} have the sizes {sizes} in a model of the width {self.width}"
        own = ffn_activation(self.layers[0], self.family.ffn)
        if self.activation not in ACT2FN or (own is not None and not same_function(ACT2FN[self.activation], own)):
            problem = f"its activation is {self.activation}, and the FFN computes {own or 'no function of that name'}"
        if problem:
            raise UnknownFamilyError(f"The row of model type {self.model_type!r} does not fit: {problem}; correct it.")

    def norms(self, layer: int) -> list[Site]:
        """The norms inside a layer, in the order in which they act; empty where the family's row names none."""
        names = {module: name for name, module in self._model.named_modules()}
        modules = [self._resolve(self.layers[layer], path) for path in self.family.norms]
        return [Site("module", path=names[module]) for module in modules]

    def positions(self, mask: Tensor) -> Tensor | None:
        """Position ids (B, T) that count the real tokens of a mask (B, T); None where the model derives its own."""
        return None if self.family.counts_positions else (mask.long().cumsum(-1) - 1).clamp(min=0)

    def module(self, site: Site) -> tuple[nn.Module, nn.Module]:
        """The entry and exit modules of a site. Raises TapError if the backbone has no such site."""
        if site.kind in ("layer", "attention", "ffn"):
            return self._layer_modules(site)
        if site.kind == "head":
            module = self._model.get_output_embeddings()
        elif site.kind == "module":
            module = self._resolve(self._model, site.path or "")
        else:
            path = self.family.embedding if site.kind == "embedding" else self.family.norm
            module = self._resolve(self._base, path) if path else None
        if module is None:
            raise TapError(f"A {self.model_type} model has no {site}: choose another site for this tap.")
        return module, module

    def _layer_modules(self, site: Site) -> tuple[nn.Module, nn.Module]:
        if site.layer is None or not -self.n_layers <= site.layer < self.n_layers:
            raise TapError(
                f"There is no layer {site.layer}: this {self.model_type} model has layers 0 to {self.n_layers - 1}."
            )
        if site.kind == "layer" and not self.family.one_stream:
            raise TapError(
                f"The layers of a {self.model_type} model pass several streams of hidden states: choose a graft that "
                "stands beside the attention or the FFN."
            )
        if site.kind == "attention" and not has_module(self.layers[site.layer], self.family.attention.entry):
            raise TapError(
                f"Layer {site.layer} of this {self.model_type} model has no attention: choose other layers, or a graft "
                "that stands beside the FFN."
            )
        layer = self.layers[site.layer]
        sublayer = Sublayer("") if site.kind == "layer" else getattr(self.family, site.kind)
        return self._resolve(layer, sublayer.entry), self._resolve(layer, sublayer.exit or sublayer.entry)

    def _resolve(self, root: nn.Module, path: str) -> nn.Module:
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise TapError(
                f"{type(root).__name__} of this {self.model_type} model has no module {path!r}: "
                "correct the path, or describe the family with graftlm.backbone.register_family."
            ) from None


def _family(model: PreTrainedModel) -> Family:
    """The row of a model's type, the one that its class declares in `graft_sites`, or the one that is found."""
    model_type = model.config.model_type
    row = FAMILIES.get(model_type)
    declared: dict[str, Any] | None = getattr(type(model), "graft_sites", None)
    if row is None and declared is not None:
        return family_row(declared)
    if row is not None and row is PROVEN_FAMILIES.get(model_type):
        return row
    return structure_of(model).family(row)

"""Sites: the locations in a backbone where taps act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from graftlm.backbone.families import FAMILIES, PROVEN_FAMILIES, Family, Sublayer, family_row
from graftlm.backbone.modules import (
    exit_path,
    ffn_activation,
    has_experts,
    has_module,
    linear_sizes,
    outer_linears,
    same_function,
)
from graftlm.backbone.structure import structure_of
from graftlm.errors import TapError, UnknownFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SiteKind = Literal["embedding", "layer", "attention", "ffn", "norm", "head", "module"]


@dataclass(frozen=True)
class Site:
    """A location in a backbone where taps act.

    Attributes:
        kind: `embedding`; `layer`, or its `attention` or `ffn`; `norm` for the norm after the last layer; `head` for
            the output layer; `module` for any other module.
        layer: index of the layer for `layer`, `attention` and `ffn`; negative numbers count from the end.
        path: path of the module for `module`, relative to the model.
    """

    kind: SiteKind
    layer: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        detail = self.path if self.kind == "module" else self.layer
        return self.kind if detail is None else f"{self.kind} {detail}"


class Sites:
    """The sites of a live model.

    Args:
        model: the live model, possibly without weights.

    Attributes:
        model_type: the `model_type` of the model's config.
        family: where the architecture keeps its modules.
        config: the config of the text model.
        body: the module that the head calls.
        layers: the list of layers.

    Raises:
        UnknownFamilyError: the structure is unknown, or the model's registered family does not fit.
        TapError: the family names a module that the model does not have.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model_type: str = model.config.model_type
        self.family = _family(model)
        self._model = model
        self._base: nn.Module = model.base_model
        text_config = self.family.text_config or ""
        self.config: Any = getattr(model.config, text_config, model.config)
        self.body = self._resolve(self._base, self.family.body)
        self.layers: Any = self._resolve(self._base, self.family.layers)
        if not isinstance(self.layers, nn.ModuleList):
            raise UnknownFamilyError(
                f"{self.family.layers} of {type(model).__name__} is of type {type(self.layers).__name__}, but an "
                "nn.ModuleList is expected: set layers of the family to the path of one."
            )
        self._check()

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """The model's hidden size d."""
        return int(self.config.hidden_size)

    @property
    def activation(self) -> str:
        """Name of the FFN's activation in transformers' ACT2FN."""
        return str(getattr(self.config, self.family.activation, self.family.activation))

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer's FFN is a mixture of experts.

        Args:
            layer: index of the layer; negative numbers count from the end.

        Raises:
            TapError: there is no such layer.
        """
        ffn, _ = self.module(Site("ffn", layer))
        return has_experts(ffn)

    def ffn_linears(self, layer: int) -> list[nn.Module]:
        """Return the Linears of a dense FFN.

        Args:
            layer: index of the layer; negative numbers count from the end.

        Returns:
            Those that read its input, the activated one first, then the one that writes its output.

        Raises:
            TapError: there is no such layer, or its FFN is a mixture of experts.
        """
        if self.is_mixture(layer):
            raise TapError(
                f"The FFN of layer {layer} of this {self.model_type} model is a mixture of experts, but a dense "
                "FFN is needed: adapt the attention if the graft allows it, or use a graft that runs parallel to the "
                "whole FFN."
            )
        paths = (*self.family.ffn_in, self.family.ffn_out)
        return [self._resolve(self.layers[layer], path) for path in paths]

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return the Linears of a layer's attention and dense FFN that read only the layer's tokens.

        Args:
            layer: index of the layer; negative numbers count from the end.

        Returns:
            The numbers (inputs, outputs) of features of each Linear, by its path in the model.

        Raises:
            TapError: there is no such layer.
        """
        roots: list[nn.Module] = []
        if not self.is_mixture(layer):
            roots.extend(self.ffn_linears(layer))
        if has_module(self.layers[layer], self.family.attention.entry):
            roots.extend(self.module(Site("attention", layer)))
        names = self._names()
        sizes: dict[str, tuple[int, int]] = {}
        for root in roots:
            for linear in outer_linears(root):
                path = names[linear]
                size = linear_sizes(linear)
                if size and not self.reads_positions(path):
                    sizes[path] = size
        return sizes

    def reads_positions(self, path: str) -> bool:
        """Return whether a module also reads embeddings of relative positions, which belong to no token.

        Args:
            path: path of the module in the model.
        """
        return any(path.endswith(f".{name}") for name in self.family.reads_positions)

    def ffn_weights(self, layer: int) -> list[tuple[nn.Module, str]]:
        """Return the matrices of a layer's FFN, without the one by which a mixture of experts chooses its experts.

        Args:
            layer: index of the layer; negative numbers count from the end.

        Returns:
            The module and the name of each parameter; in a dense FFN the activated one comes first.

        Raises:
            TapError: there is no such layer.
        """
        if not self.is_mixture(layer):
            return [(linear, "weight") for linear in self.ffn_linears(layer)]
        ffn, _ = self.module(Site("ffn", layer))
        weights = []
        for path, module in ffn.named_modules():
            is_expert_linear = linear_sizes(module) and not path.endswith(("gate", "router"))
            for name, parameter in module.named_parameters(recurse=False):
                is_stack_of_experts = parameter.dim() == 3
                if is_stack_of_experts or (is_expert_linear and name == "weight"):
                    weights.append((module, name))
        return weights

    def _names(self) -> dict[nn.Module, str]:
        """Return the paths of all modules of the model."""
        return {module: name for name, module in self._model.named_modules()}

    def _check(self) -> None:
        """Compare the family with the widths of the FFNs, and with the activation if it is a module.

        Raises:
            UnknownFamilyError: the family does not fit.
        """
        problem = ""
        for layer in range(self.n_layers):
            if not self.is_mixture(layer):
                problem = self._width_problem(layer) or problem
        problem = self._activation_problem() or problem
        if problem:
            raise UnknownFamilyError(
                f"The family of the model type {self.model_type!r} does not fit: {problem}. Register a corrected "
                "family with graftlm.backbone.register_family."
            )

    def _width_problem(self, layer: int) -> str:
        """Describe what is wrong with the widths of a dense FFN; empty if they fit or are hidden by a quantizer."""
        all_sizes = [linear_sizes(linear) for linear in self.ffn_linears(layer)]
        sizes = [size for size in all_sizes if size is not None]
        if len(sizes) < len(all_sizes):
            return ""
        *readers, (inner, written) = sizes
        inner_widths = [inner]
        if len(readers) == 1:
            inner_widths.append(2 * inner)  # One Linear may compute both halves of a gated linear unit.
        fits = written == self.width
        for width, size in readers:
            fits = fits and width == self.width and size in inner_widths
        if fits:
            return ""
        paths = ", ".join((*self.family.ffn_in, self.family.ffn_out))
        return f"{paths} of layer {layer} have the sizes {sizes} in a model of the width {self.width}"

    def _activation_problem(self) -> str:
        """Describe the difference between the activation of the family and that of the FFN; empty without one."""
        from transformers.activations import ACT2FN

        module = ffn_activation(self.layers[0], self.family.ffn)
        if self.activation in ACT2FN and (module is None or same_function(ACT2FN[self.activation], module)):
            return ""
        computed = module or "no function of that name"
        return f"its activation is {self.activation}, but the FFN computes {computed}"

    def norms(self, layer: int) -> list[Site]:
        """Return the sites of the norms inside a layer in the order in which they act; empty if the family names none.

        Args:
            layer: index of the layer; negative numbers count from the end.

        Raises:
            TapError: the layer lacks a norm of the family.
        """
        names = self._names()
        modules = [self._resolve(self.layers[layer], path) for path in self.family.norms]
        return [Site("module", path=names[module]) for module in modules]

    def positions(self, mask: Tensor) -> Tensor | None:
        """Return the position ids of a padded batch: each token's number of real tokens before it.

        Args:
            mask: (B, T), 1 for real tokens.

        Returns:
            (B, T) int64 position ids, 0 for padding on the left; None if the model derives them from its input ids.
        """
        if self.family.counts_positions:
            return None
        return (mask.long().cumsum(-1) - 1).clamp(min=0)

    def module(self, site: Site) -> tuple[nn.Module, nn.Module]:
        """Return the modules at which a site begins and ends.

        Returns:
            The module whose input is the site's input, and the one whose output is the site's output; often the same.

        Raises:
            TapError: the backbone has no such site.
        """
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
            raise TapError(f"This {self.model_type} model has no {site}: choose another site for this tap.")
        return module, module

    def _layer_modules(self, site: Site) -> tuple[nn.Module, nn.Module]:
        """Return the entry and exit modules of a layer, an attention or an FFN."""
        if site.layer is None or not -self.n_layers <= site.layer < self.n_layers:
            named = "no layer" if site.layer is None else f"the layer {site.layer}"
            raise TapError(
                f"The site {site.kind} names {named}, but this {self.model_type} model has the layers 0 to "
                f"{self.n_layers - 1}: name one of them."
            )
        layer = self.layers[site.layer]
        if site.kind == "layer":
            if not self.family.one_stream:
                raise TapError(
                    f"The layers of a {self.model_type} model pass several streams of hidden states: choose a graft in "
                    "parallel to the attention or the FFN."
                )
            return layer, layer
        if site.kind == "attention":
            sublayer = self.family.attention
            if not has_module(layer, sublayer.entry):
                raise TapError(
                    f"Layer {site.layer} of this {self.model_type} model has no attention: choose other layers, or a "
                    "graft in parallel to the FFN."
                )
        else:
            sublayer = self.family.ffn
        return self._sublayer_modules(layer, sublayer)

    def _sublayer_modules(self, layer: nn.Module, sublayer: Sublayer) -> tuple[nn.Module, nn.Module]:
        entry = self._resolve(layer, sublayer.entry)
        exit_ = self._resolve(layer, exit_path(layer, sublayer))
        return entry, exit_

    def _resolve(self, root: nn.Module, path: str) -> nn.Module:
        """Return the module at a path below `root`."""
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise TapError(
                f"{type(root).__name__} of this {self.model_type} model has no module {path!r}: name one of its "
                "modules, or describe the family with graftlm.backbone.register_family."
            ) from None


def _family(model: PreTrainedModel) -> Family:
    """Return where a model's architecture keeps its modules.

    This is the family of the model's type, else the family that the model's class declares in `graft_sites`, else the
    structure that is found in a pass without weights.
    """
    model_type = model.config.model_type
    registered = FAMILIES.get(model_type)
    declared: dict[str, object] | None = getattr(type(model), "graft_sites", None)
    if registered is None and declared is not None:
        return family_row(declared)
    if registered is not None and registered is PROVEN_FAMILIES.get(model_type):
        return registered
    return structure_of(model).family(registered)

"""Model families: where each architecture keeps its layers, attention, FFN, embedding and head.

A family that `structure.py` can't find has a row in `families.yaml`. Paths are relative to `model.base_model`; paths of
a layer's modules are relative to the layer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from graftlm.config import read_yaml
from graftlm.errors import TapError, UnknownFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RUNTIME_FIELDS = {  # config fields that describe how a model is run, not what it is
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation", "name_or_path",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict", "quantization_config",
    "architectures", "experts_implementation",
}  # fmt: skip
SiteKind = Literal["embedding", "layer", "attention", "ffn", "norm", "head", "module"]


@dataclass(frozen=True)
class Sublayer:
    """An attention or FFN sublayer: its input is the first input of `entry`, its output the output of `exit`.

    In most decoders both are one module, and `exit` may be left out. BERT's FFN enters at `intermediate` and leaves at
    `output.dense`, before the residual sum.
    """

    entry: str
    exit: str = ""


@dataclass(frozen=True)
class Family:
    """Where one architecture keeps the modules that grafts need.

    Args:
        norm: the norm after the last layer; None for encoders that normalise inside each layer.
        attention, ffn: the sublayers of one layer.
        ffn_in: the Linears that read the FFN's input; the gating one is first in a gated linear unit. Layers with a
            mixture of experts need none.
        ffn_out: the Linear that writes the FFN's output.
        gated: the FFN is W_o(act(W_g x) * W_i x) rather than W_o act(W_i x).
        activation: the config field that names the activation, or the activation's own name.
        text_config: the config field that holds the text model's config in multimodal models.
        causal: no token attends to a later one.
        norms: the norms of one layer over the model's width, in the order in which they act.
        counts_positions: the model derives positions from the ids that are not padding, and reserves the first
            `pad_token_id + 1` positions, as RoBERTa does.
        body: the module that the head calls, where it is not `model.base_model` itself, as in OPT.
        one_stream: a layer maps (B, T, d) to (B, T, d). Gemma 3n's layers pass several streams of hidden states.
        separates_documents: where `position_ids` restart in a row, attention stays inside each document.
        reads_positions: Linears of a layer that also read embeddings of relative positions, which belong to no token.
    """

    layers: str
    embedding: str
    norm: str | None
    attention: Sublayer
    ffn: Sublayer
    ffn_in: tuple[str, ...]
    ffn_out: str
    gated: bool
    activation: str = "hidden_act"
    text_config: str | None = None
    causal: bool = True
    norms: tuple[str, ...] = ()
    counts_positions: bool = False
    body: str = ""
    one_stream: bool = True
    separates_documents: bool = True
    reads_positions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in _texts(vars(self)):  # they come from files, and stand in the code of exported models
            if not re.fullmatch(r"[\w.]*", text):
                raise UnknownFamilyError(
                    f"A family has {text!r}, but names of modules and fields are expected: letters, digits, _ and dots."
                )


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested fields."""
    fields = vars(value) if isinstance(value, Sublayer) else value
    if isinstance(fields, str):
        yield fields
    elif isinstance(fields, Mapping | Iterable):
        for inner in fields.values() if isinstance(fields, Mapping) else fields:
            yield from _texts(inner)


def register_family(model_type: str, family: Family | Mapping[str, Any] | str) -> None:
    """Add an architecture to `FAMILIES`; `model_type` is the one in its config.

    `family` is a row, a dict of its fields where a path stands for a sublayer, or another model type that has the row.
    """
    if isinstance(family, str) and family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownFamilyError(
            f"There is no row for the model type {family!r} (other models' parts are found without one): name one of "
            f"{known}, or give fields."
        )
    FAMILIES[model_type] = FAMILIES[family] if isinstance(family, str) else _row(family)


def user_row(model_type: str) -> dict[str, Any] | None:
    """The row that a user gave a model type, as a recipe writes it; None for a row of GraftLM's own and for no row."""
    row = FAMILIES.get(model_type)
    return None if row is None or row is _PROVEN.get(model_type) else json.loads(json.dumps(dataclasses.asdict(row)))


def _row(family: Family | Mapping[str, Any]) -> Family:
    """A row from a dict of its fields."""
    if isinstance(family, Family):
        return family
    if not isinstance(family, Mapping):
        raise UnknownFamilyError(f"The family is {type(family).__name__}: give a model type, or fields in a dict.")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in family.items()}
    try:
        for name in {"attention", "ffn"} & values.keys():
            path = values[name]
            values[name] = Sublayer(**path) if isinstance(path, Mapping) else Sublayer(path)
        return Family(**values)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(Family))
        raise UnknownFamilyError(f"The fields {family} describe no family ({error}): give {fields}.") from None


FAMILIES: dict[str, Family] = {
    model_type: _row(values) for model_type, values in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
_PROVEN = dict(FAMILIES)  # tests prove these rows; others are checked by a pass without weights


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
        sizes = {names[linear]: linear_sizes(linear) for root in roots for linear in _outer_linears(root)}
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
        return _row(declared)
    if row is not None and row is _PROVEN.get(model_type):
        return row
    structure: Any = import_module("graftlm.backbone.structure")  # it imports this file, and is rarely needed
    return structure.structure_of(model).family(row)


def architecture(config: Any) -> str:
    """What a config says of a model, without how it is run, as JSON."""
    values = {key: value for key, value in config.to_dict().items() if key not in RUNTIME_FIELDS}
    return json.dumps(values, sort_keys=True, default=str)


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at a path."""
    return path in dict(root.named_modules())


def has_experts(ffn: nn.Module) -> bool:
    """Whether an FFN is a mixture of experts, which are stacked in parameters or listed."""
    stacked = any(parameter.dim() == 3 for parameter in ffn.parameters())
    return stacked or any(isinstance(module, nn.ModuleList) for module in ffn.modules())


def _outer_linears(module: nn.Module) -> Iterator[nn.Module]:
    """The Linears in a module, without those inside of others, as PEFT's adapters are."""
    inner = (linear for child in module.children() for linear in _outer_linears(child))
    yield from [module] if linear_sizes(module) else inner


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a Linear or of GPT-2's transposed one; None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.nf)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (int(sizes[0]), int(sizes[1])) if None not in sizes else None  # type: ignore[arg-type]  # any library's Linear


def ffn_activation(layer: nn.Module, ffn: Sublayer) -> nn.Module | None:
    """The module that is an FFN's activation; None where it is a function."""
    roots = [layer.get_submodule(path) for path in (ffn.entry, ffn.exit or ffn.entry)]
    modules = [module for root in roots for module in root.named_modules()]
    if linear_sizes(roots[0]):  # the FFN's Linears stand in the layer itself
        modules += layer.named_children()
    # Not every "act": adapters inside an FFN have factors.
    return next((module for name, module in modules if re.search(r"(^|[._])act[^.]*$|gelu", name)), None)


def same_function(first: nn.Module, second: nn.Module) -> bool:
    """Whether two activations without parameters are equal."""
    if any(True for module in (first, second) for _ in module.parameters()):
        return type(first) is type(second)
    x = torch.linspace(-6, 6, 49, device="cpu")
    return torch.allclose(first(x), second(x), atol=1e-6)

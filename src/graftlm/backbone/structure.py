"""The structure of a model whose family has no row: found in one pass on tensors without storage, and checked there.

The pass runs on the meta device, from the config alone, before any weights are loaded. A layer has an attention and an
FFN, which read and write hidden states (B, T, d). What is activated and what the head reads is seen from the tensors.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from graftlm.backbone.families import Family, Sublayer
from graftlm.backbone.modules import architecture, ffn_activation, has_experts, has_module, linear_sizes, same_function
from graftlm.backbone.patching import replaced_attributes
from graftlm.errors import UnknownFamilyError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _TOKENS = 2, 3
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_OTHER_MIXER = re.compile("linear_?attn|linear_?attention|delta|mamba|conv|recurrent|rwkv", re.IGNORECASE)
_SEPARATE = "find_packed_sequence_indices"  # the function by which transformers' masks keep documents apart


class _Visit(NamedTuple):
    """The first call of a module: its place in the order of calls, first input, other tensors, and first output."""

    number: int
    entering: Any
    others: tuple[Tensor, ...]
    leaving: Any = None


class _MisfitError(Exception):
    """What is missing from a structure, as the end of a sentence."""


class Structure:
    """The modules of one architecture, and the tensors that they pass on."""

    def __init__(self, model_class: Callable[[Any], PreTrainedModel], config: Any) -> None:
        self._error: str | None = None
        self._separates = False
        self._visits: dict[nn.Module, _Visit] = {}
        with torch.device("meta"):
            self._model = model_class(copy.deepcopy(config)).eval()
        self._base: Any = self._model.base_model
        self._names = {module: name for name, module in self._base.named_modules()}
        self._text: Any = self._model.config.get_text_config()
        try:
            self._run()
        except Exception as error:  # whatever a model's code raises on tensors without storage
            self._error = first_line(error)

    def _run(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers import masking_utils

        for module in self._model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)
        separate_documents = getattr(masking_utils, _SEPARATE)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._separates = True
            return separate_documents(*args, **kwargs)

        watched = replaced_attributes(masking_utils, **{_SEPARATE: recorded})
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"), watched:
            self._model(input_ids=torch.zeros(_ROWS, _TOKENS, dtype=torch.long), use_cache=False)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        others = tuple(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v is not first)
        self._visits.setdefault(module, _Visit(len(self._visits), first, others))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._visits[module].leaving is None:
            leaving = output[0] if isinstance(output, tuple) else output
            self._visits[module] = self._visits[module]._replace(leaving=leaving)

    def family(self, row: Family | None) -> Family:
        """A row after a check, or the row that is found; `UnknownFamilyError` if there is none."""
        if row is not None and self._error is not None:
            return row  # widths and activation are checked in the live model
        try:
            if self._error is not None:
                raise _MisfitError(f"its pass without weights fails ({self._error})")
            family = row or self._find()
            layers = self._check(family)
            if row is not None:
                self._check_row(row, layers)
        except _MisfitError as error:
            kind = f"the model type {self._model.config.model_type!r} ({type(self._model).__name__})"
            no_row = f"GraftLM has no row for {kind}, and finds no structure: {error}; describe it"
            raise UnknownFamilyError(
                f"{no_row if row is None else f'The row of {kind} does not fit: {error}; correct it'} with "
                "graftlm.backbone.register_family or with the key backbone.family of a recipe, from the paths that "
                "print(model.base_model) shows."
            ) from None
        whole = all(has_module(layer, family.attention.entry) for layer in layers)
        return replace(family, separates_documents=family.separates_documents and self._separates and whole)

    def _find(self) -> Family:
        layers = self._layers()
        attention, ffn = self._attention(layers), _common([self._ffn(layer) for layer in layers])
        dense = next((m for m in layers if not has_experts(m.get_submodule(ffn.entry))), None)
        ffn_in, ffn_out, gated = ((), "", True) if dense is None else self._linears(dense, ffn)
        owner = next(m for m in layers if has_module(m, attention.entry)).get_submodule(attention.entry)
        norms = self._children(layers[-1], lambda name, m: _is_norm(m) and self._maps(m))
        return Family(
            layers=self._names[layers],
            norm=self._last_norm(layers),
            attention=attention,
            ffn=ffn,
            ffn_in=ffn_in,
            ffn_out=ffn_out,
            gated=gated,
            activation=self._activation(layers[-1], ffn),
            norms=tuple(sorted(norms, key=lambda name: self._visits[layers[-1].get_submodule(name)].number)),
            one_stream=self._maps(layers[0]),
            **self._plain_fields(layers, owner),
        )

    def _plain_fields(self, layers: Any, attention: nn.Module) -> dict[str, Any]:
        """The fields of a row that its other fields don't decide."""
        path = self._names[layers].split(".")
        around = (".".join(path[:count]) for count in range(len(path)))  # the outermost first
        return {
            "embedding": self._names[self._model.get_input_embeddings()],
            "body": next(part for part in around if self._base.get_submodule(part) in self._visits),
            "text_config": next((k for k, v in vars(self._model.config).items() if v is self._text), None),
            "causal": bool(getattr(attention, "is_causal", self._model.can_generate())),
            "counts_positions": self._reserves_positions(),
        }

    def _layers(self) -> Any:
        """The outermost list of as many modules as the config names layers, all of which ran."""
        count = getattr(self._text, "num_hidden_layers", 0)
        for module in self._base.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and all(m in self._visits for m in module):
                return module
        raise _MisfitError(f"no list of {count} layers runs")

    def _attention(self, layers: Any) -> Sublayer:
        """The attention that most layers have."""
        counts = Counter(self._children(layer, self._is_attention) for layer in layers)
        names = Counter({names[0]: count for names, count in counts.items() if len(names) == 1})
        if not names:
            raise _MisfitError(f"its layers have {', '.join(layers[0]._modules)}, and one attention is expected")
        name = names.most_common(1)[0][0]
        return _common([self._span(layer, name) for layer in layers if has_module(layer, name)])

    def _is_attention(self, name: str, module: nn.Module) -> bool:
        names = f"{name} {type(module).__name__}"
        return bool(_ATTENTION.search(names)) and not _OTHER_MIXER.search(names) and _has_matrices(module)

    def _children(self, layer: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> tuple[str, ...]:
        return tuple(n for n, child in layer.named_children() if child in self._visits and wanted(n, child))

    def _ffn(self, layer: nn.Module) -> Sublayer:
        """The largest module that reads and writes hidden states and is no attention, or two Linears in the layer."""
        names = self._children(layer, self._may_be_ffn)
        sizes = {name: sum(p.numel() for p in layer.get_submodule(name).parameters()) for name in names}
        if names and max(sizes.values()) >= 0.9 * sum(sizes.values()):
            return self._span(layer, max(sizes, key=lambda name: sizes[name]))
        linears = self._children(layer, lambda name, module: linear_sizes(module) is not None)
        if not names and len(linears) == 2:
            return Sublayer(linears[0], linears[1])
        raise _MisfitError(f"its layers have {', '.join(layer._modules)}, and one FFN is expected")

    def _may_be_ffn(self, name: str, module: nn.Module) -> bool:
        names, visit = f"{name} {type(module).__name__}", self._visits[module]
        mixes = _ATTENTION.search(names) or _OTHER_MIXER.search(names) or linear_sizes(module)
        return self._is_hidden(visit.entering, visit.leaving) and not mixes and _has_matrices(module)

    def _span(self, layer: nn.Module, name: str) -> Sublayer:
        """A module of a layer; where it adds the residual stream itself, it ends at its last Linear."""
        module = layer.get_submodule(name)
        inside = self._in_order(module)
        linears = [m for m in inside if linear_sizes(m)]
        if linears and any(_is_norm(m) for m in inside[inside.index(linears[-1]) :]):
            raise _MisfitError(f"{name} of its layers normalises what it writes")
        paths = {m: path for path, m in layer.named_modules()}
        return Sublayer(name, "" if self._maps(module) or not linears else paths[linears[-1]])

    def _linears(self, layer: nn.Module, ffn: Sublayer) -> tuple[tuple[str, ...], str, bool]:
        """The Linears that read an FFN's input, the one that writes its output, and whether the FFN is gated."""
        paths = {m: path for path, m in layer.named_modules()}
        roots = [layer.get_submodule(path) for path in (ffn.entry, ffn.exit or ffn.entry)]
        *readers, writer = [m for m in self._in_order(*roots) if linear_sizes(m)]
        readers = [m for m in readers if self._is_hidden(self._visits[m].entering)]
        own = ffn_activation(layer, ffn)
        activated = self._visits[own].entering if own in self._visits else None
        readers.sort(key=lambda m: self._visits[m].leaving is not activated)
        if len(readers) != 1 and (len(readers) != 2 or self._visits[readers[0]].leaving is not activated):
            raise _MisfitError(f"{ffn.entry} does not apply its activation to the first of one or two Linears")
        doubled = linear_sizes(readers[0])[1] == 2 * linear_sizes(writer)[0]  # type: ignore[index]  # they are Linears
        return tuple(paths[m] for m in readers), paths[writer], len(readers) == 2 or doubled

    def _in_order(self, *roots: nn.Module) -> list[nn.Module]:
        """The modules below that ran, in their order."""
        modules = {m for root in roots for m in root.modules() if m in self._visits}
        return sorted(modules, key=lambda m: self._visits[m].number)

    def _activation(self, layer: nn.Module, ffn: Sublayer) -> str:
        """The config field that names the activation, or its name in ACT2FN."""
        from transformers.activations import ACT2FN

        own, named = ffn_activation(layer, ffn), self._text.to_dict()
        names = [*(key for key, value in named.items() if isinstance(value, str) and value in ACT2FN), *ACT2FN]
        if own is None:
            return names[0]
        return next((name for name in names if same_function(ACT2FN[named.get(name, name)], own)), "")

    def _last_norm(self, layers: Any) -> str | None:
        last, inside = self._visits[layers[-1]].number, set(layers.modules())
        after = (m for m, v in self._visits.items() if v.number > last and m not in inside and m in self._names)
        return next((self._names[m] for m in after if _is_norm(m) and self._is_hidden(self._visits[m].leaving)), None)

    def _check(self, row: Family) -> Any:
        """The list of layers, if the row fits."""
        for name in ("body", "embedding", "norm", "layers"):
            path = getattr(row, name)
            if path is not None and not has_module(self._base, path):
                raise _MisfitError(f"{name} names {path!r}, and there is no such module")
            if path is not None and name != "layers" and self._base.get_submodule(path) not in self._visits:
                raise _MisfitError(f"{name} names {path or type(self._base).__name__}, which a pass never calls")
        layers: Any = self._base.get_submodule(row.layers)
        if not isinstance(layers, nn.ModuleList) or not all(layer in self._visits for layer in layers):
            raise _MisfitError(f"layers names {row.layers}, which is not a list of layers that run")
        for layer in layers:
            self._check_span(layer, row.ffn, "ffn")
        for layer in [m for m in layers if has_module(m, row.attention.entry)] or layers[:1]:
            self._check_span(layer, row.attention, "attention")
        if row.one_stream and not self._maps(layers[0]):
            raise _MisfitError(f"{row.layers}.0 does not map one hidden state to another")
        if row.norm and self._visits[self._base.get_submodule(row.norm)].number < self._visits[layers[-1]].number:
            raise _MisfitError(f"norm names {row.norm}, which runs before the last layer")
        return layers

    def _check_row(self, row: Family, layers: Any) -> None:
        """Raise unless what a user's row says of embedding, head, attention, FFN and norms is what the pass shows."""
        layer = next((m for m in layers if has_module(m, row.attention.entry)), layers[-1])
        attention = layer.get_submodule(row.attention.entry)
        actual = self._plain_fields(layers, attention)
        if row.norms:
            norms = [m for m in self._in_order(layers[-1]) if _is_norm(m) and self._maps(m)]
            paths = {m: path for path, m in layers[-1].named_modules() if f"{row.attention.entry}." not in path}
            actual["norms"] = tuple(paths[norm] for norm in norms if norm in paths)
        dense = next((m for m in layers if not has_experts(m.get_submodule(row.ffn.entry))), None)
        if dense is not None:
            inside = _modules(dense, row.ffn)
            for path in (*row.ffn_in, row.ffn_out):
                if not has_module(dense, path) or dense.get_submodule(path) not in inside:
                    raise _MisfitError(f"ffn_in and ffn_out name {path!r}, which is not in {row.ffn.entry}")
            if ffn_activation(dense, row.ffn) in self._visits:
                actual |= dict(zip(("ffn_in", "ffn_out", "gated"), self._linears(dense, row.ffn), strict=True))
        for name, value in actual.items():
            if getattr(row, name) != value:
                raise _MisfitError(f"{name} is {getattr(row, name)!r}, and a pass shows {value!r}")
        if sum(p.dim() > 1 for p in attention.parameters()) < 2 or attention in _modules(layer, row.ffn):
            raise _MisfitError(f"attention names {row.attention.entry}, which is no attention")
        if _ATTENTION.search(row.ffn.entry) and not _ATTENTION.search(row.attention.entry):
            raise _MisfitError(f"attention names {row.attention.entry}, and ffn {row.ffn.entry}")

    def _reserves_positions(self) -> bool:
        """Whether an embedding of positions keeps a row for padding, as RoBERTa's does."""
        own = self._model.get_input_embeddings()
        embeddings = [m for m in self._base.modules() if isinstance(m, nn.Embedding) and m is not own]
        size = getattr(self._text, "max_position_embeddings", None)
        return any(m.padding_idx is not None and m.num_embeddings == size for m in embeddings)

    def _check_span(self, layer: nn.Module, span: Sublayer, name: str) -> None:
        paths = (span.entry, span.exit or span.entry)
        if any(not has_module(layer, path) or layer.get_submodule(path) not in self._visits for path in paths):
            raise _MisfitError(f"{name} names {span.entry!r}, which does not run in each layer")
        entry, leave = (layer.get_submodule(path) for path in paths)
        hidden = self._is_hidden(self._visits[entry].entering, self._visits[leave].leaving)
        if not hidden or (entry is leave and not self._maps(entry)):
            raise _MisfitError(f"{name} ({span.entry}) does not map one hidden state to another")

    def _is_hidden(self, *values: Any) -> bool:
        shapes = [(_ROWS, _TOKENS, self._text.hidden_size), (_ROWS * _TOKENS, self._text.hidden_size)]
        return all(isinstance(value, Tensor) and tuple(value.shape) in shapes for value in values)

    def _maps(self, module: nn.Module) -> bool:
        """Whether a module maps one hidden state to another."""
        visit = self._visits[module]
        return self._is_hidden(visit.entering, visit.leaving) and not any(map(self._is_hidden, visit.others))


def _common(spans: list[Sublayer]) -> Sublayer:
    if len(set(spans)) > 1:
        raise _MisfitError(f"its layers differ ({', '.join(sorted({span.entry for span in spans}))})")
    return spans[0]


def _modules(layer: nn.Module, span: Sublayer) -> set[nn.Module]:
    return {m for path in (span.entry, span.exit or span.entry) for m in layer.get_submodule(path).modules()}


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


_STRUCTURES: dict[tuple[type, str], Structure] = {}


def structure_of(model: PreTrainedModel) -> Structure:
    """The structure of a live model; computed once for each architecture."""
    key = type(model), architecture(model.config)
    if key not in _STRUCTURES:
        _STRUCTURES[key] = Structure(type(model), model.config)
    return _STRUCTURES[key]

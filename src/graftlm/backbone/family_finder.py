"""Find the structure of a model without a registered family.

A layer has an attention and an FFN, which read and write hidden states (B, T, d). The tensors of a recorded pass show
which Linear is activated, and what the head reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from graftlm.backbone.families import Family, Sublayer
from graftlm.backbone.module_trace import MisfitError, ModuleTrace
from graftlm.backbone.modules import (
    exit_path,
    ffn_activation,
    has_experts,
    has_module,
    is_norm,
    linear_sizes,
    same_function,
)

ATTENTION_NAME = re.compile("attn|attention", re.IGNORECASE)

_OTHER_MIXER = re.compile("linear_?attn|linear_?attention|delta|mamba|conv|recurrent|rwkv", re.IGNORECASE)


class FfnLinears(NamedTuple):
    """The Linears of a dense FFN, as in `Family`.

    Attributes:
        ffn_in: paths in the layer of the Linears that read the FFN's input; of two, the activated one is the first.
        ffn_out: path in the layer of the Linear that writes the FFN's output.
        gated: whether the FFN is a gated linear unit.
    """

    ffn_in: tuple[str, ...]
    ffn_out: str
    gated: bool


def find_family(trace: ModuleTrace) -> Family:
    """Find where an architecture keeps its modules.

    Args:
        trace: the recorded pass of a model of this architecture, which did not fail.

    Raises:
        MisfitError: no list of layers, attention, FFN or Linears of an FFN is found, or the layers differ.
    """
    layers = _find_layers(trace)
    attention = _find_attention(trace, layers)
    ffn = _common_sublayer([_find_ffn(trace, layer) for layer in layers])
    dense_layer = find_dense_layer(layers, ffn)
    if dense_layer is None:
        linears = FfnLinears(ffn_in=(), ffn_out="", gated=True)
    else:
        linears = find_ffn_linears(trace, dense_layer, ffn)
    layer_with_attention = next(layer for layer in layers if has_module(layer, attention.entry))
    attention_module = layer_with_attention.get_submodule(attention.entry)
    return Family(
        layers=trace.names[layers],
        norm=_find_last_norm(trace, layers),
        attention=attention,
        ffn=with_norm_after(trace, layers, ffn),
        ffn_in=linears.ffn_in,
        ffn_out=linears.ffn_out,
        gated=linears.gated,
        activation=_find_activation(trace, layers[-1], ffn),
        norms=_find_norms(trace, layers[-1]),
        one_stream=trace.maps_hidden_states(layers[0]),
        **plain_fields(trace, layers, attention_module),
    )


def plain_fields(trace: ModuleTrace, layers: nn.ModuleList, attention: nn.Module) -> dict[str, Any]:
    """Return the fields of a family that don't depend on its other fields.

    Args:
        trace: the recorded pass of a model of this architecture.
        layers: the list of layers.
        attention: the attention of one layer, which shows whether the model is causal.
    """
    return {
        "embedding": trace.names[trace.model.get_input_embeddings()],
        "body": _find_body(trace, layers),
        "text_config": _text_config_field(trace),
        "causal": bool(getattr(attention, "is_causal", trace.model.can_generate())),
        "counts_positions": _reserves_positions(trace),
    }


def _find_body(trace: ModuleTrace, layers: nn.ModuleList) -> str:
    """Return the path of the outermost module around the layers that ran."""
    path = trace.names[layers].split(".")
    outer_paths = [".".join(path[:length]) for length in range(len(path))]
    return next(outer for outer in outer_paths if trace.base.get_submodule(outer) in trace.visits)


def _text_config_field(trace: ModuleTrace) -> str | None:
    """Return the config field that holds the config of the text model; None if it is the config itself."""
    for name, value in vars(trace.model.config).items():
        if value is trace.text_config:
            return name
    return None


def _reserves_positions(trace: ModuleTrace) -> bool:
    """Return whether an embedding of positions keeps a row for padding, as RoBERTa's does."""
    tokens = trace.model.get_input_embeddings()
    positions = getattr(trace.text_config, "max_position_embeddings", None)
    for module in trace.base.modules():
        if not isinstance(module, nn.Embedding) or module is tokens:
            continue
        if module.padding_idx is not None and module.num_embeddings == positions:
            return True
    return False


def _find_layers(trace: ModuleTrace) -> nn.ModuleList:
    """Return the outermost module list that has as many layers as the config says, all of which ran."""
    count = getattr(trace.text_config, "num_hidden_layers", 0)
    for module in trace.base.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != count:
            continue
        if count and all(layer in trace.visits for layer in module):
            return module
    raise MisfitError(f"no list of {count} layers runs")


def _find_attention(trace: ModuleTrace, layers: nn.ModuleList) -> Sublayer:
    """Return the attention that most layers have."""
    counts: Counter[str] = Counter()
    for layer in layers:
        names = trace.children(layer, _is_attention)
        if len(names) == 1:
            counts[names[0]] += 1
    if not counts:
        children = ", ".join(layers[0]._modules)
        raise MisfitError(f"its layers have {children}, but a single attention is expected")
    name = counts.most_common(1)[0][0]
    return _common_sublayer([_find_extent(trace, layer, name) for layer in layers if has_module(layer, name)])


def _is_attention(name: str, module: nn.Module) -> bool:
    names = f"{name} {type(module).__name__}"
    return bool(ATTENTION_NAME.search(names)) and not _OTHER_MIXER.search(names) and _has_matrices(module)


def _find_ffn(trace: ModuleTrace, layer: nn.Module) -> Sublayer:
    """Return a layer's FFN.

    This is the largest child that maps hidden states and is not an attention, or two Linears of the layer itself.
    """

    def may_be_ffn(name: str, module: nn.Module) -> bool:
        names = f"{name} {type(module).__name__}"
        if ATTENTION_NAME.search(names) or _OTHER_MIXER.search(names) or linear_sizes(module):
            return False
        visit = trace.visits[module]
        return trace.is_hidden(visit.entering) and trace.is_hidden(visit.leaving) and _has_matrices(module)

    def is_linear(name: str, module: nn.Module) -> bool:
        return linear_sizes(module) is not None

    sizes = {name: _parameter_count(layer.get_submodule(name)) for name in trace.children(layer, may_be_ffn)}
    if sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] >= 0.9 * sum(sizes.values()):
            return _find_extent(trace, layer, largest)
    else:
        linears = trace.children(layer, is_linear)
        if len(linears) == 2:
            return Sublayer(entry=linears[0], exit=linears[1])
    raise MisfitError(f"its layers have {', '.join(layer._modules)}, but a single FFN is expected")


def _find_extent(trace: ModuleTrace, layer: nn.Module, name: str) -> Sublayer:
    """Return a child of a layer as a sublayer. If it adds the residual stream itself, it ends at its last Linear."""
    module = layer.get_submodule(name)
    inside = trace.in_order(module)
    linears = [inner for inner in inside if linear_sizes(inner)]
    if not linears:
        return Sublayer(name)
    last = linears[-1]
    after_last = inside[inside.index(last) :]
    if any(is_norm(inner) for inner in after_last):
        raise MisfitError(f"{name} of its layers normalizes what it writes")
    if trace.maps_hidden_states(module):
        return Sublayer(name)
    return Sublayer(name, exit=_paths(layer)[last])


def _common_sublayer(sublayers: Sequence[Sublayer]) -> Sublayer:
    """Return the sublayer that is the same in all layers."""
    if len(set(sublayers)) > 1:
        found = sorted({f"{part.entry} to {part.exit}" if part.exit else part.entry for part in sublayers})
        raise MisfitError(
            f"its layers have different sublayers ({', '.join(found)}), but the same one is expected in all"
        )
    return sublayers[0]


def with_norm_after(trace: ModuleTrace, layers: nn.ModuleList, ffn: Sublayer) -> Sublayer:
    """Return the FFN with its exit at the norm that reads its output; the FFN itself without such a norm.

    Args:
        trace: the recorded pass, in which the layers ran.
        layers: the layers of the model.
        ffn: the FFN of each layer.

    Raises:
        MisfitError: layers have different norms after the FFN, or a layer uses the norm for something else.
    """
    ends = []
    for layer in layers:
        name = _norm_after(trace, layer, ffn)
        if name is not None:
            ends.append(Sublayer(ffn.entry, exit=name))
    if not ends:
        return ffn
    end = _common_sublayer(ends)
    for layer in layers:
        if has_module(layer, end.exit) and _norm_after(trace, layer, ffn) is None:
            raise MisfitError(f"{end.exit} normalizes what {ffn.entry} writes in some of its layers only")
    return end


def _norm_after(trace: ModuleTrace, layer: nn.Module, ffn: Sublayer) -> str | None:
    """Return the name of the norm that reads the output of a layer's FFN; None without one."""
    written = trace.visits[layer.get_submodule(exit_path(layer, ffn))].leaving

    def reads_output(name: str, module: nn.Module) -> bool:
        return is_norm(module) and trace.visits[module].entering is written

    names = trace.children(layer, reads_output)
    return names[0] if len(names) == 1 else None


def find_dense_layer(layers: Iterable[nn.Module], ffn: Sublayer) -> nn.Module | None:
    """Return the first layer whose FFN is not a mixture of experts; None if all are.

    Args:
        layers: the layers of a model, in order.
        ffn: the FFN of each layer.
    """
    for layer in layers:
        if not has_experts(layer.get_submodule(ffn.entry)):
            return layer
    return None


def find_ffn_linears(trace: ModuleTrace, layer: nn.Module, ffn: Sublayer) -> FfnLinears:
    """Find the Linears that read the input of a dense FFN, and the one that writes its output.

    Args:
        trace: the recorded pass, in which the layer ran.
        layer: a layer with a dense FFN.
        ffn: the FFN of the layer.

    Raises:
        MisfitError: the FFN is neither a gated linear unit nor two Linears around an activation.
    """
    roots = [layer.get_submodule(path) for path in (ffn.entry, exit_path(layer, ffn))]
    linears = [module for module in trace.in_order(*roots) if linear_sizes(module)]
    if not linears:
        raise MisfitError(f"{ffn.entry} has no Linear")
    writer = linears[-1]
    readers = [linear for linear in linears[:-1] if trace.is_hidden(trace.visits[linear].entering)]
    activation = ffn_activation(layer, ffn)
    activated = trace.visits[activation].entering if activation in trace.visits else None

    def is_activated(linear: nn.Module) -> bool:
        return trace.visits[linear].leaving is activated

    readers.sort(key=is_activated, reverse=True)
    paths = _paths(layer)
    names = [paths[reader] for reader in readers]
    if not names:
        raise MisfitError(f"{ffn.entry} has no Linear that reads its input, apart from its last Linear")
    if len(names) > 2:
        raise MisfitError(
            f"{ffn.entry} has {len(names)} Linears that read its input ({', '.join(names)}), but one or two are "
            "expected"
        )
    if len(names) == 2 and not is_activated(readers[0]):
        found = "its activation is not a module" if activation is None else "its activation follows neither of them"
        raise MisfitError(
            f"{ffn.entry} has two Linears that read its input ({', '.join(names)}), but {found}: an activation module "
            "after one of them is expected"
        )
    _, inner_width = linear_sizes(readers[0])  # type: ignore[misc]  # a Linear has sizes
    written_from, _ = linear_sizes(writer)  # type: ignore[misc]
    return FfnLinears(
        ffn_in=tuple(names),
        ffn_out=paths[writer],
        gated=len(readers) == 2 or inner_width == 2 * written_from,
    )


def _find_activation(trace: ModuleTrace, layer: nn.Module, ffn: Sublayer) -> str:
    """Return the config field that names the activation, or its name in ACT2FN; empty if neither is found."""
    from transformers.activations import ACT2FN

    values = trace.text_config.to_dict()
    fields = [name for name, value in values.items() if isinstance(value, str) and value in ACT2FN]
    candidates = [*fields, *ACT2FN]
    module = ffn_activation(layer, ffn)
    if module is None:
        return candidates[0]
    for name in candidates:
        function = ACT2FN[values.get(name, name)]
        if same_function(function, module):
            return name
    return ""


def _find_last_norm(trace: ModuleTrace, layers: nn.ModuleList) -> str | None:
    """Return the path of the first norm after the last layer; None without one."""
    last = trace.visits[layers[-1]].number
    inside = set(layers.modules())
    for module, visit in trace.visits.items():
        if visit.number <= last or module in inside or module not in trace.names:
            continue
        if is_norm(module) and trace.is_hidden(visit.leaving):
            return trace.names[module]
    return None


def _find_norms(trace: ModuleTrace, layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the norms among a layer's children, in the order in which they ran."""

    def is_norm_of_width(name: str, module: nn.Module) -> bool:
        return is_norm(module) and trace.maps_hidden_states(module)

    names = trace.children(layer, is_norm_of_width)
    return tuple(sorted(names, key=lambda name: trace.visits[layer.get_submodule(name)].number))


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _paths(layer: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in layer.named_modules()}

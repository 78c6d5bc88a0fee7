"""Compare a family with the pass of a model without weights."""

from __future__ import annotations

from torch import nn

from graftlm.backbone.families import Family, Sublayer
from graftlm.backbone.family_finder import (
    ATTENTION_NAME,
    find_dense_layer,
    find_ffn_linears,
    plain_fields,
    with_norm_after,
)
from graftlm.backbone.module_trace import MisfitError, ModuleTrace
from graftlm.backbone.modules import exit_path, ffn_activation, has_module, is_norm


def check_paths(trace: ModuleTrace, family: Family) -> nn.ModuleList:
    """Check that the modules of a family exist, run, and map hidden states.

    Args:
        trace: the recorded pass of a model.
        family: the family of the model's architecture.

    Returns:
        The list of layers.

    Raises:
        MisfitError: the family does not fit.
    """
    _check_runs(trace, "body", family.body)
    _check_runs(trace, "embedding", family.embedding)
    _check_runs(trace, "norm", family.norm)
    layers = _find_layers(trace, family)
    for field, sublayer in (("ffn", family.ffn), ("attention", family.attention)):
        if sublayer.exit and not any(has_module(layer, sublayer.exit) for layer in layers):
            raise MisfitError(f"{field} ends at {sublayer.exit!r}, which no layer has")
    for layer in layers:
        _check_sublayer(trace, layer, family.ffn, "ffn")
    for layer in _layers_with_attention(layers, family) or layers[:1]:
        _check_sublayer(trace, layer, family.attention, "attention")
    if family.one_stream and not trace.maps_hidden_states(layers[0]):
        raise MisfitError(f"{family.layers}.0 does not map one hidden state to another")
    if family.norm:
        norm = trace.base.get_submodule(family.norm)
        last_layer = layers[-1]
        if trace.visits[norm].number < trace.visits[last_layer].number:
            raise MisfitError(f"norm is {family.norm}, which runs before the last layer")
    return layers


def _check_runs(trace: ModuleTrace, field: str, path: str | None) -> None:
    """Raise `MisfitError` unless a field of a family is None or the path of a module that runs."""
    if path is None:
        return
    _check_exists(trace, field, path)
    module = trace.base.get_submodule(path)
    if module not in trace.visits:
        name = path or type(module).__name__
        raise MisfitError(f"{field} is {name}, which is not called in a pass")


def _check_exists(trace: ModuleTrace, field: str, path: str) -> None:
    if not has_module(trace.base, path):
        raise MisfitError(f"{field} is {path!r}, but there is no such module")


def _find_layers(trace: ModuleTrace, family: Family) -> nn.ModuleList:
    _check_exists(trace, "layers", family.layers)
    layers = trace.base.get_submodule(family.layers)
    if isinstance(layers, nn.ModuleList) and all(layer in trace.visits for layer in layers):
        return layers
    raise MisfitError(f"layers is {family.layers}, which is not an nn.ModuleList whose modules all run")


def _layers_with_attention(layers: nn.ModuleList, family: Family) -> list[nn.Module]:
    return [layer for layer in layers if has_module(layer, family.attention.entry)]


def _check_sublayer(trace: ModuleTrace, layer: nn.Module, sublayer: Sublayer, field: str) -> None:
    """Raise `MisfitError` unless a sublayer of a layer runs and maps hidden states."""
    end = exit_path(layer, sublayer)
    if not trace.has_run(layer, sublayer.entry) or not trace.has_run(layer, end):
        raise MisfitError(f"{field} is {sublayer.entry!r}, which does not run in every layer")
    entry = layer.get_submodule(sublayer.entry)
    exit_ = layer.get_submodule(end)
    if entry is exit_:
        fits = trace.maps_hidden_states(entry)
    else:
        entering = trace.visits[entry].entering
        leaving = trace.visits[exit_].leaving
        fits = trace.is_hidden(entering) and trace.is_hidden(leaving)
        if trace.visits[exit_].number < trace.visits[entry].number:
            raise MisfitError(f"{field} ends at {end}, which runs before {sublayer.entry}")
    if not fits:
        raise MisfitError(f"{field} ({sublayer.entry}) does not map one hidden state to another")


def check_values(trace: ModuleTrace, family: Family, layers: nn.ModuleList) -> None:
    """Check that the fields of a user's family that `check_paths` does not check are what the pass shows.

    Args:
        trace: the recorded pass of a model.
        family: a family whose paths were checked.
        layers: the list of layers.

    Raises:
        MisfitError: the family does not fit.
    """
    _check_norm_after(trace, family, layers)
    layer = _layers_with_attention(layers, family)[0]
    attention = layer.get_submodule(family.attention.entry)
    actual = plain_fields(trace, layers, attention)
    if family.norms:
        actual["norms"] = _norms_outside(trace, layers[-1], family.attention)
    dense_layer = find_dense_layer(layers, family.ffn)
    if dense_layer is not None:
        _check_linears(dense_layer, family)
        if ffn_activation(dense_layer, family.ffn) in trace.visits:
            linears = find_ffn_linears(trace, dense_layer, family.ffn)
            actual.update(linears._asdict())
    for field, value in actual.items():
        given = getattr(family, field)
        if given != value:
            raise MisfitError(f"{field} is {given!r}, but {value!r} was found in a forward pass")
    _check_attention(layer, attention, family)


def _check_norm_after(trace: ModuleTrace, family: Family, layers: nn.ModuleList) -> None:
    """Check that an FFN does not end before a norm of its output."""
    found = with_norm_after(trace, layers, family.ffn)
    if found != family.ffn:
        raise MisfitError(
            f"ffn ends before {found.exit}, but the last norm before the residual sum is expected as its exit, such as "
            f"{{entry: {found.entry}, exit: {found.exit}}}"
        )


def _norms_outside(trace: ModuleTrace, layer: nn.Module, attention: Sublayer) -> tuple[str, ...]:
    """Return the norms of a layer over the model's width that are not inside the attention, in their order."""
    paths = {module: path for path, module in layer.named_modules()}
    norms = []
    for module in trace.in_order(layer):
        path = paths[module]
        is_inside = f"{attention.entry}." in path
        if not is_inside and is_norm(module) and trace.maps_hidden_states(module):
            norms.append(path)
    return tuple(norms)


def _check_linears(layer: nn.Module, family: Family) -> None:
    """Check that the Linears of a family are inside its FFN."""
    inside = _modules_of(layer, family.ffn)
    paths = (*family.ffn_in, family.ffn_out)
    for path in paths:
        is_inside = has_module(layer, path) and layer.get_submodule(path) in inside
        if not is_inside:
            raise MisfitError(f"ffn_in and ffn_out have {path!r}, which is not in {family.ffn.entry}")


def _check_attention(layer: nn.Module, attention: nn.Module, family: Family) -> None:
    """Check that the attention of a family is not another module."""
    name = family.attention.entry
    matrices = [parameter for parameter in attention.parameters() if parameter.dim() > 1]
    if len(matrices) < 2:
        raise MisfitError(f"attention is {name}, which has fewer than two weight matrices")
    if attention in _modules_of(layer, family.ffn):
        raise MisfitError(f"attention is {name}, which is part of the FFN")
    if ATTENTION_NAME.search(family.ffn.entry) and not ATTENTION_NAME.search(name):
        raise MisfitError(f"attention is {name}, but ffn is {family.ffn.entry}, which is named like an attention")


def _modules_of(layer: nn.Module, sublayer: Sublayer) -> set[nn.Module]:
    entry = layer.get_submodule(sublayer.entry)
    exit_ = layer.get_submodule(exit_path(layer, sublayer))
    return {*entry.modules(), *exit_.modules()}

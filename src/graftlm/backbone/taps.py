"""Taps: the only code that touches a live model.

A tap is a forward hook on one of the backbone's own modules. Nothing is renamed, replaced or copied; removing the hooks
gives the bare backbone back. What one forward pass carries is a `Call`; it lives on a stack of the running thread, so
that interleaved generations and threads never see each other's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graftlm.backbone.bias import biased_mask, check_takes_bias
from graftlm.backbone.sites import Site, Sites
from graftlm.errors import TapConflictError, TapError


@dataclass
class Call:
    """One forward pass.

    Attributes:
        input_ids: (B, T) token ids, None when the caller gave embeddings.
        attention_mask: (B, T_past + T), 1 for real tokens; None when all are real.
        position_ids: (B, T) or None.
        cache: the key-value cache of this generation, or None.
        domain: (B,) domain mark of each sequence (0 old, 1 new), or None when the batch does not say.
        token_mask: (B, T) True for tokens that are not padding; None when all are real.
        totals: (1 + domains,) counts over the whole optimiser step: target tokens, then input tokens of each domain.
        prompt: (B, T) True for tokens that were given rather than to be predicted; None when the batch does not say.
        extras: whatever else the batch says (task, context), by name.
        scratch: what a graft keeps between its taps in this pass, by the graft's own keys.
        training: whether this pass will be differentiated for training.
        observing: whether this pass is run for `Graft.observe`, which may cost more.
        parts: the rows of several owners, where taps act on some rows each, see `parts.py`.
    """

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cache: Cache | None = None
    domain: Tensor | None = None
    token_mask: Tensor | None = None
    totals: Tensor | None = None
    prompt: Tensor | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    scratch: dict[Any, Any] = field(default_factory=dict)
    training: bool = False
    observing: bool = False
    parts: tuple[Any, ...] = ()

    def working_dtype(self, graft: nn.Module) -> torch.dtype:
        """The dtype that a graft computes in: autocast's, or that of its weights.

        A graft casts its inputs to it once, where autocast would cast them in each Linear.
        """
        key = (graft, "dtype")
        if key not in self.scratch:
            weight = next(graft.parameters())
            autocast = torch.is_autocast_enabled(weight.device.type)
            self.scratch[key] = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        return self.scratch[key]


Action = Literal["add", "replace", "bias"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Keep torch's compiler out: taps act on what Python holds of the running pass."""
    return torch.compiler.disable(function)  # type: ignore[return-value]  # it gives a callable of the same form


@dataclass(frozen=True)
class Tap:
    """A declared place where a graft reads or writes the backbone's activations.

    Args:
        site: where.
        when: `before` acts on the site's input, `after` on its output.
        act: `add` returns what is added to the hidden states, and any number of grafts may add at one site; `replace`
            returns new hidden states, and only one graft may replace at a site; `bias`, before an attention alone,
            returns what is added to its scores, (B or 1, H or 1, T, S) of S keys, and any number may. Each may return
            None: nothing changes, to the bit.
        function: `before`: f(call, inputs); `after`: f(call, inputs, outputs); tensors are (B, T, d).
    """

    site: Site
    when: Literal["before", "after"]
    act: Action
    function: Callable[..., Tensor | None]


class _Local(threading.local):
    """What one thread has under way: the passes it is in, innermost last, and what was announced of the next ones."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.announced: tuple[dict[str, Any], list[Call]] | None = None


class Wiring:
    """The hooks that carry taps on one live model.

    Args:
        model: the live model.
        taps: each owner's taps, in the order in which they act.
        prepare: called with the `Call` before each forward pass.

    Raises:
        TapError: a tap names a place that the model does not have.
        TapConflictError: two owners replace at one site.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sites,
        taps: Mapping[Any, Sequence[Tap]],
        prepare: Callable[[Call], None],
    ) -> None:
        self._check(sites, taps)
        self._model = model
        self._prepare = prepare
        self._local = _Local()
        self._handles: list[RemovableHandle] = []
        try:
            base = model.base_model
            self._handles.append(base.register_forward_pre_hook(self._open_call, with_kwargs=True))
            for owner, owner_taps in taps.items():
                for tap in owner_taps:
                    self._connect(sites, owner, tap)
            self._handles.append(base.register_forward_hook(self._close_call, with_kwargs=True, always_call=True))
        except BaseException:
            self.remove()
            raise
        _forget_compiled()

    def _check(self, sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
        check_conflicts(sites, taps)

    def remove(self) -> None:
        """Take every hook off; the model is bare again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _forget_compiled()

    @contextmanager
    def announce(self, **values: Any) -> Iterator[list[Call]]:
        """Give the next forward passes of this thread what the batch says; yields the calls that were made."""
        calls: list[Call] = []
        outer = self._local.announced
        self._local.announced = (values, calls)
        try:
            yield calls
        finally:
            self._local.announced = outer

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """`context_fn` for torch's activation checkpointing: recomputation sees the call of its own forward pass."""
        return nullcontext(), self._resume(self._local.calls[-1])

    @contextmanager
    def _resume(self, call: Call) -> Iterator[None]:
        # A recomputed block must not count twice in what the forward pass gathered.
        gathered = dict(call.scratch)
        self._local.calls.append(call)
        try:
            yield
        finally:
            self._local.calls.pop()
            call.scratch.clear()
            call.scratch.update(gathered)

    @_untraced
    def _open_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values, made = self._local.announced or ({}, [])
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        ids = kwargs.get("input_ids", args[0] if args else None)
        call = Call(ids, mask, kwargs.get("position_ids"), kwargs.get("past_key_values"), **values)
        if call.token_mask is None and mask is not None:
            length = ids.shape[1] if ids is not None else mask.shape[1]
            call.token_mask = mask[:, -length:].bool()
        made.append(call)
        self._local.calls.append(call)
        self._prepare(call)

    @_untraced
    def _close_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._local.calls:
            self._local.calls.pop()

    def _connect(self, sites: Sites, owner: Any, tap: Tap) -> None:
        enter, leave = sites.module(tap.site)
        if tap.act == "bias":
            self._handles.append(enter.register_forward_pre_hook(self._biasing(sites, owner, tap), with_kwargs=True))
        elif tap.when == "before":
            self._handles.append(enter.register_forward_pre_hook(self._before(owner, tap), with_kwargs=True))
        elif enter is leave:
            self._handles.append(leave.register_forward_hook(self._after(owner, tap), with_kwargs=True))
        else:
            key = ("input of", id(leave), id(tap))
            self._handles.append(enter.register_forward_pre_hook(self._remember(key), with_kwargs=True))
            self._handles.append(leave.register_forward_hook(self._after(owner, tap, key), with_kwargs=True))

    def _ask(self, owner: Any, tap: Tap, *tensors: Tensor) -> Tensor | None:
        """What a tap returns of a module's hidden states, in the pass under way."""
        return tap.function(self._current(), *tensors)

    def _before(self, owner: Any, tap: Tap) -> Callable[..., Any]:
        @_untraced
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = _hidden(args, kwargs)
            result = self._ask(owner, tap, hidden)
            if result is None:
                return None
            new = hidden + result if tap.act == "add" else result
            if args:
                return (new, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": new}

        return hook

    def _biasing(self, sites: Sites, owner: Any, tap: Tap) -> Callable[..., Any]:
        if tap.when != "before" or tap.site.kind != "attention":
            raise TapError(f"A tap adds to scores {tap.when} {tap.site}: it can do so before an attention alone.")
        check_takes_bias(self._model, str(tap.site))
        causal = sites.family.causal

        @_untraced
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bias = self._ask(owner, tap, _hidden(args, kwargs))
            if bias is None:
                return None
            return args, kwargs | {"attention_mask": biased_mask(kwargs.get("attention_mask"), bias, causal)}

        return hook

    def _remember(self, key: Any) -> Callable[..., None]:
        @_untraced
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._current().scratch[key] = _hidden(args, kwargs)

        return hook

    def _after(self, owner: Any, tap: Tap, key: Any = None) -> Callable[..., Any]:
        @_untraced
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            inputs = self._current().scratch.pop(key) if key is not None else _hidden(args, kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            result = self._ask(owner, tap, inputs, hidden)
            if result is None:
                return None
            new = hidden + result if tap.act == "add" else result
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def _current(self) -> Call:
        # A module called on its own, outside the model's forward pass, still meets its taps.
        calls = self._local.calls
        return calls[-1] if calls else Call()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _forget_compiled() -> None:
    """Drop what torch compiled: it guards on everything but hooks, and would go on as if they had not changed."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def check_conflicts(sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
    """Raise `TapConflictError` if two owners replace at one site."""
    taken: dict[tuple[nn.Module, str], Any] = {}
    for owner, owner_taps in taps.items():
        for tap in owner_taps:
            if tap.act != "replace":
                continue
            enter, leave = sites.module(tap.site)  # one place has several names, such as a layer from either end
            other = taken.setdefault((enter if tap.when == "before" else leave, tap.when), owner)
            if other != owner:
                raise TapConflictError(
                    f"The grafts {other!r} and {owner!r} both replace what happens {tap.when} {tap.site}: "
                    "attach one of them, or train one with other layers."
                )

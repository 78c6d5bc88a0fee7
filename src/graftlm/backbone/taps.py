"""Taps: hooks by which grafts change what a live model computes.

A tap is a forward hook on one of the backbone's own modules. It renames, replaces and copies nothing, and removing the
hooks restores the bare backbone. Grafts that replace modules, such as LoRA, do so in `graftlm.grafted.model`. A `Call`
holds the state of one forward pass. Each thread has its own stack of calls, so interleaved generations and threads
share no state.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from graftlm.backbone.attention_bias import additive_mask, biased_mask, check_bias_site, static_columns
from graftlm.backbone.call import Call
from graftlm.backbone.compiled_code import forget_compiled
from graftlm.backbone.generation_prompt import GenerationPrompt, PromptMarking
from graftlm.backbone.masks import column_mask_of, newest_tokens_of, token_mask_of
from graftlm.backbone.modules import is_norm
from graftlm.backbone.sites import Site, Sites
from graftlm.backbone.token_count import TokenCount
from graftlm.errors import TapConflictError, TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_READER_KEY = "_graft_reader"
"""The attribute of a cache that stores the number of the `TapHooks` whose taps were active when it was filled."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Tap:
    """A declared hook: where a graft reads or writes the backbone's activations.

    Args:
        site: the location in the backbone.
        when: `before` acts on the site's input, `after` on its output.
        act: how the returned tensor is used. `add` adds it to the hidden states; several grafts may add at one site.
            `replace` uses it as the new hidden states; only one graft may replace at a site. `bias` adds it to the
            scores of an attention, (B or 1, H or 1, T, S) for S keys; it acts `before`, and several grafts may add a
            bias at one site. None changes nothing, bit for bit.
        function: `before`: f(call, inputs); `after`: f(call, inputs, outputs); hidden states are (B, T, d).
        takes_selection: whether an `after` tap of the output layer accepts some tokens of all rows, (1, N, d), and
            finds their other values by `Call.at_head`. Without it, training computes the logits of all tokens.
        reads_call: whether the function reads the call. Without it, a tap after the body computes the same for each
            chunk of tokens, so that training needs no logits of all tokens at once.
    """

    site: Site
    when: Literal["before", "after"]
    act: Literal["add", "replace", "bias"]
    function: Callable[..., Tensor | None]
    takes_selection: bool = False
    reads_call: bool = True


class _CallStack(threading.local):
    """The state of one thread.

    Attributes:
        calls: the running passes, innermost last.
        outer: for each running pass of a whole model with its head, the number of calls before it.
        entered: inputs of sublayers that were called outside of a pass, and have not ended yet.
        announced: fields of the calls of the next passes, and the list that collects these calls.
        generation: the prompt of the running generation.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outer: list[int] = []
        self.entered: dict[Hashable, Tensor] = {}
        self.announced: tuple[dict[str, Any], list[Call]] | None = None
        self.generation: GenerationPrompt | None = None


class TapHooks:
    """Registers the taps of several owners, in their order, as forward hooks on one live model.

    Args:
        model: the live model, on which hooks are registered.
        sites: the sites of this model.
        taps: taps by owner; without taps, no hook is registered.
        prepare: called before each forward pass with its `Call`.

    Raises:
        TapError: a tap uses a site that the model does not have, or adds a bias where the model takes none.
        TapConflictError: taps of two owners replace the hidden states of the same site.

    Attributes:
        takes_selection: whether the output layer may receive some tokens only.
        acts_after_body: whether a tap that reads the call acts on the output layer, or elsewhere after the body.
    """

    takes_selection = True
    acts_after_body = False
    _replaces_once = True

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sites,
        taps: Mapping[Any, Sequence[Tap]],
        prepare: Callable[[Call], None],
    ) -> None:
        if self._replaces_once:
            check_conflicts(sites, taps)
        self._model = model
        self._prepare = prepare
        self._stack = _CallStack()
        self._number = next(_numbers)  # Unlike an id, a number is never used again.
        self._handles: list[RemovableHandle] = []
        self._prompt_marking: PromptMarking | None = None
        if not taps:
            return
        try:
            self._register(sites, [tap for owner_taps in taps.values() for tap in owner_taps])
        except BaseException:
            self.remove()
            raise
        forget_compiled()

    def _register(self, sites: Sites, taps: Sequence[Tap]) -> None:
        self._watch_head(sites, taps)
        self._handles.append(sites.body.register_forward_pre_hook(self._open_call, with_kwargs=True))
        # Of taps at the exit of an FFN, those of the module itself, such as a norm, act before those of the whole FFN.
        for tap in sorted(taps, key=lambda tap: tap.site.kind != "module"):
            self._connect(sites, tap)
        self._handles.append(sites.body.register_forward_hook(self._close_call, always_call=True))

    def remove(self) -> None:
        """Remove all hooks, which restores the bare model. Hooks that were removed can't be registered again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._prompt_marking is not None:
            self._prompt_marking.remove()
            self._prompt_marking = None
        self._prepare = _prepare_nothing  # The owner's method would form a reference cycle that keeps copies alive.
        forget_compiled()

    def mark_prompts(self) -> None:
        """Mark the prompt in every generation of the live model until `remove`, also where a pipeline generates."""
        if hasattr(self._model, "generate"):
            self._prompt_marking = PromptMarking(self._model, self.generation)

    @contextmanager
    def announce(self, **values: Any) -> Iterator[list[Call]]:
        """Set fields of the `Call`s of this thread's next forward passes.

        Args:
            values: the fields by name.

        Yields:
            The calls of these passes, a list that grows with each pass.
        """
        calls: list[Call] = []
        outer = self._stack.announced
        self._stack.announced = (values, calls)
        try:
            yield calls
        finally:
            self._stack.announced = outer

    @contextmanager
    def generation(self, prompt: GenerationPrompt | None) -> Iterator[None]:
        """Mark a prompt in the `Call`s of this thread's next passes, which belong to one generation.

        Args:
            prompt: the prompt; None if it is unknown.
        """
        outer = self._stack.generation
        self._stack.generation = prompt
        try:
            yield
        finally:
            self._stack.generation = outer

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of torch's activation checkpointing, as its `context_fn`: forward pass, recomputation.

        A block is recomputed with the call of its own forward pass. This must be called during a forward pass.
        """
        return nullcontext(), self._resume(self._stack.calls[-1])

    @contextmanager
    def _resume(self, call: Call) -> Iterator[None]:
        # A recomputed block must not add to the scratch values a second time.
        self._stack.calls.append(replace(call, scratch=dict(call.scratch)))
        try:
            yield
        finally:
            self._stack.calls.pop()

    def check_cache(self, call: Call) -> None:
        """Check that the cache of a pass contains no tokens that were read without these taps.

        Args:
            call: the pass. Compiled passes are not checked.

        Raises:
            TapError: the cache contains such tokens.
        """
        if call.cache is None or torch.compiler.is_compiling():
            return
        if vars(call.cache).get(_READER_KEY) == self._number:
            return
        if call.past():
            raise TapError(
                "The cache contains tokens that were read without these grafts "
                f"(number of tokens: {call.past()}): pass the whole text, with an empty cache or none."
            )

    def _open_call(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Push the call of a pass that begins."""
        values: dict[str, Any]
        announced, calls = self._stack.announced or ({}, [])
        values = dict(announced)
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        inputs = ids if ids is not None else kwargs.get("inputs_embeds")
        length = 0 if inputs is None else inputs.shape[1]
        count = TokenCount(cache, length)
        mask = values.pop("attention_mask", kwargs.get("attention_mask"))
        call = Call(
            input_ids=ids,
            position_ids=kwargs.get("position_ids"),
            cache=cache,
            count=count,
            model=self._model,
            **values,
        )
        call.attention_mask = partial(token_mask_of, mask, call, length)
        if values.get("column_mask") is None:
            call.column_mask = partial(column_mask_of, mask, call)
        if values.get("token_mask") is None:
            call.token_mask = partial(newest_tokens_of, call, length)
        if count.is_known:  # With a static cache, the masks are read only when a graft needs them.
            _ = call.token_mask
        if inputs is not None:
            self._mark_prompt(call, inputs, length)
        calls.append(call)
        self._stack.calls.append(call)
        self._prepare(call)

    def _mark_prompt(self, call: Call, inputs: Tensor, length: int) -> None:
        """Set `call.prompt` in a pass of a generation. Passes inside other passes belong to grafts."""
        generation = self._stack.generation
        if generation is None or self._stack.calls:
            return
        prompt_1T = generation.mark(length, inputs.device, cached=call.cache is not None)
        call.prompt = None if prompt_1T is None else prompt_1T.expand(len(inputs), -1)

    def _close_call(self, module: nn.Module, args: _Args, output: object) -> None:
        """Pop the call of a pass that ends, unless taps act on modules that run after the body."""
        calls = self._stack.calls
        if calls:
            self._note_cache(calls[-1], output)
        outer = self._stack.outer
        head_follows = bool(outer) and len(calls) == outer[-1] + 1
        if not head_follows:
            del calls[-1:]

    def _note_cache(self, call: Call, output: object) -> None:
        """Store in the cache which taps filled it, and its number of tokens."""
        cache = call.cache
        if cache is None:
            cache = getattr(output, "past_key_values", None)  # a cache that the model made in this pass
        if isinstance(cache, Cache):
            setattr(cache, _READER_KEY, self._number)
        if call.count is not None:
            call.count.keep()

    def _watch_head(self, sites: Sites, taps: Sequence[Tap]) -> None:
        """If a tap reads the call after the body has run, keep the call of a pass open until the model returns."""
        inside = set(sites.body.modules())
        outside = [tap for tap in taps if tap.reads_call and not inside.issuperset(sites.module(tap.site))]
        if not outside:
            return
        self.acts_after_body = True
        self.takes_selection = all(tap.when == "before" or tap.takes_selection for tap in outside)
        self._handles.append(self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._leave_model, always_call=True))

    def _enter_model(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        self._stack.outer.append(len(self._stack.calls))
        if isinstance(kwargs.get("logits_to_keep"), Tensor):
            raise TapError(
                "A graft acts on the output layer, which does not receive all tokens if logits_to_keep is a tensor: "
                "pass the number of last tokens instead."
            )

    def _leave_model(self, module: nn.Module, args: _Args, output: Any) -> None:
        calls_before = self._stack.outer.pop()
        del self._stack.calls[calls_before:]

    def _connect(self, sites: Sites, tap: Tap) -> None:
        """Register the hooks of a tap."""
        if tap.act == "bias":
            check_bias_site(self._model, tap.site, tap.when)
        entry, exit_ = sites.module(tap.site)
        if tap.act == "bias":
            self._add_pre_hook(entry, self._bias_hook(tap, causal=sites.family.causal))
        elif tap.when == "before":
            self._add_pre_hook(entry, self._before_hook(tap))
        else:
            input_key = None
            if entry is not exit_:
                input_key = ("input of", id(exit_), id(tap))
                self._add_pre_hook(entry, self._input_hook(input_key))
            hook = self._after_hook(tap, input_key)
            self._handles.append(exit_.register_forward_hook(hook, with_kwargs=True))

    def _add_pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    # The hooks run in each layer for each new token, so they are closures with few operations.

    def _input_hook(self, key: Hashable) -> Callable[..., None]:
        """Return a hook that stores a sublayer's input for the tap at its exit."""

        def store(module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
            self._entered()[key] = _in_rows(self._current(), _hidden(args, kwargs))

        return store

    def _before_hook(self, tap: Tap) -> Callable[..., object]:
        """Return a hook that changes the input of a module."""
        adds = tap.act == "add"
        function = tap.function

        def before(module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
            call = self._current()
            given = _hidden(args, kwargs)
            hidden = _in_rows(call, given)
            result = function(call, hidden)
            if result is None:
                return None
            new = _in_shape(hidden + result if adds else result, given)
            if args:
                return (new, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": new}

        return before

    def _bias_hook(self, tap: Tap, *, causal: bool) -> Callable[..., object]:
        """Return a hook that adds a bias to the scores of an attention."""
        site = tap.site
        function = tap.function

        def before(module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
            call = self._current()
            bias = function(call, _in_rows(call, _hidden(args, kwargs)))
            if bias is None:
                return None
            columns = static_columns(call, site, bias.shape[-2])
            mask = additive_mask(self._model, site, kwargs)
            mask = biased_mask(mask, bias, causal=causal, columns=columns)
            return args, kwargs | {"attention_mask": mask}

        return before

    def _after_hook(self, tap: Tap, input_key: Hashable | None) -> Callable[..., object]:
        """Return a hook that changes the output of a module.

        Args:
            tap: the tap.
            input_key: where the input of the sublayer is stored, if it enters at another module.
        """
        adds = tap.act == "add"
        function = tap.function
        site = tap.site

        def after(module: nn.Module, args: _Args, kwargs: _Kwargs, output: Any) -> Any:
            call = self._current()
            if input_key is None:
                inputs = _in_rows(call, _hidden(args, kwargs))
            else:
                inputs = self._entered().pop(input_key, None)
                if inputs is None:
                    raise TapError(
                        f"The module at which {site} ends was called without that at which it begins: call the layer."
                    )
            is_tuple = isinstance(output, tuple)
            written = output[0] if is_tuple else output
            hidden = _in_rows(call, written)
            result = function(call, inputs, hidden)
            if result is None:
                return None
            new = _in_shape(hidden + result if adds else result, written)
            return (new, *output[1:]) if is_tuple else new

        return after

    def _entered(self) -> dict[Hashable, Tensor]:
        """Return where the inputs of sublayers are kept until they end. Those of a pass that fails go with its call."""
        calls = self._stack.calls
        return calls[-1].scratch if calls else self._stack.entered

    def _current(self) -> Call:
        # Taps also act on a module that is called outside the model's forward pass.
        calls = self._stack.calls
        return calls[-1] if calls else Call()


def acts_after_norm(sites: Sites, taps: Sequence[Tap]) -> bool:
    """Return whether a tap acts after an FFN that ends at a norm."""
    ends = [sites.module(tap.site)[1] for tap in taps if tap.site.kind == "ffn" and tap.when == "after"]
    return any(is_norm(end) for end in ends)


def check_conflicts(sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
    """Check that no two owners replace the hidden states of the same site.

    Args:
        sites: the sites of the model.
        taps: taps by owner.

    Raises:
        TapConflictError: taps of two owners replace the hidden states of one site.
        TapError: a tap uses a site that the model does not have.
    """
    owners: dict[tuple[nn.Module, str], object] = {}
    for owner, owner_taps in taps.items():
        for tap in owner_taps:
            if tap.act != "replace":
                continue
            entry, exit_ = sites.module(tap.site)  # Sites can't be compared: layers 1 and -1 may be the same.
            module = entry if tap.when == "before" else exit_
            other = owners.setdefault((module, tap.when), owner)
            if other != owner:
                raise TapConflictError(
                    f"The grafts {other!r} and {owner!r} both replace the hidden states {tap.when} {tap.site}: attach "
                    "one of them, or train one with other layers."
                )


def _hidden(args: _Args, kwargs: _Kwargs) -> Tensor:
    """Return the hidden states among the arguments of a module."""
    return args[0] if args else kwargs["hidden_states"]


def _in_rows(call: Call, hidden: Tensor) -> Tensor:
    """Return hidden states as (B, T, d); the FFNs of some models receive (B * T, d)."""
    ids = call.input_ids
    if ids is None or hidden.dim() != 2 or not hidden.is_floating_point():
        return hidden
    return hidden.unflatten(0, tuple(ids.shape))


def _in_shape(hidden: Tensor, like: Tensor) -> Tensor:
    """Return hidden states in the shape of those that they replace, from which `_in_rows` made rows.

    Their width may be another one, as of logits with those of added tokens.
    """
    return hidden if hidden.shape[:-1] == like.shape[:-1] else hidden.view(*like.shape[:-1], hidden.shape[-1])


def _prepare_nothing(call: Call) -> None:
    """Replace `prepare` of removed hooks."""

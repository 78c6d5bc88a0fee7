"""Taps: the only code that changes what a live model computes.

A tap is a forward hook on one of the backbone's own modules. Nothing is renamed, replaced or copied, and removing the
hooks restores the bare backbone. A `Call` holds the state of one forward pass. Each thread has a stack of calls, so
interleaved generations and threads don't share any.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from graftlm.backbone.cache import counted_tokens, is_static_layer
from graftlm.backbone.sites import Site, Sites
from graftlm.errors import TapConflictError, TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNT_KEY = "_graft_count"
_READER_KEY = "_graft_reader"
_numbers = itertools.count()


def may_read(tensor: Tensor) -> bool:
    """Whether Python may branch on values of a tensor: on a CPU, outside compiled code.

    On an accelerator, a read waits for all work that is queued there.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class TokenCount:
    """The number of tokens that a cache holds when a pass of `new` tokens begins; the host reads it when it is needed.

    A static cache counts its tokens on its device. So that decoding does not wait for it, a count that was read is kept
    in the cache with the new tokens of the pass, and is valid until something else changes the cache. Compiled code
    takes the length of a graft's layer that `counts_tokens`.
    """

    def __init__(self, cache: Cache | None, new: int) -> None:
        self._cache, self._new, self._version = cache, new, 0
        self._count: Any = 0 if cache is None else cache.get_seq_length()
        if cache is None or not isinstance(self._count, Tensor):
            return
        if torch.compiler.is_compiling():
            known = counted_tokens(cache)
        else:
            self._version = _version(self._count)
            noted, version = getattr(cache, COUNT_KEY, (None, None))
            known = noted if version == self._version else None
        if may_read(self._count):
            known = int(self._count)
        self._count = self._count.clone() if known is None else known

    @property
    def is_known(self) -> bool:
        """Whether `read` waits for nothing."""
        return not isinstance(self._count, Tensor)

    def read(self) -> int:
        """The number of tokens."""
        self._count = int(self._count)
        return self._count

    def keep(self) -> None:
        """Keep the count in the cache at the end of the pass, if it is known."""
        count: Any = None if self._cache is None or torch.compiler.is_compiling() else self._cache.get_seq_length()
        if self.is_known and isinstance(count, Tensor) and _version(count) == self._version + 1:  # the pass alone did
            setattr(self._cache, COUNT_KEY, (self._count + self._new, self._version + 1))


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not tell."""
    return -2 if tensor.is_inference() else tensor._version


class _Deferred:
    """A field of a dataclass that may be given a function; the first read calls it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Tensor | None:
        if instance is None:
            return None  # the field's default
        value: Any = getattr(instance, self._key)
        if callable(value):
            value = value()
            setattr(instance, self._key, value)
        return value

    def __set__(self, instance: Any, value: Tensor | Callable[[], Tensor | None] | None) -> None:
        setattr(instance, self._key, value)


@dataclass
class Call:
    """The state of one forward pass.

    Attributes:
        input_ids: (B, T) token ids, None when the caller gave embeddings.
        attention_mask: (B, T_past + T), 1 for real tokens; None when all are real.
        position_ids: (B, T) or None.
        cache: the key-value cache of this generation, or None.
        domain: (B,) domain of each sequence, 0 = old, 1 = new; None when the batch names none.
        token_mask: (B, T), True for real tokens; None when all are real.
        totals: (1 + domains,) counts over the whole optimiser step: target tokens, then input tokens of each domain.
        prompt: (B, T), True for prompt tokens; None when the batch names none. In a generation, only passes that read
            the prompt have it.
        extras: other values of the batch, such as the task, by name.
        scratch: values that a graft keeps between its taps in this pass, by keys of the graft.
        training: whether this pass will be differentiated for training.
        observing: whether this pass runs for `Observable.observe`, which may cost more.
        row_scopes: which owner's taps act on which rows; see `row_hooks.py`.
        count: the tokens in the cache before this pass, which `past` reads.
        model: the live model of this pass, which may be a copy of the backbone.
    """

    input_ids: Tensor | None = None
    attention_mask: _Deferred = _Deferred()
    position_ids: Tensor | None = None
    cache: Cache | None = None
    domain: Tensor | None = None
    token_mask: _Deferred = _Deferred()
    totals: Tensor | None = None
    prompt: Tensor | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    scratch: dict[Any, Any] = field(default_factory=dict)
    training: bool = False
    observing: bool = False
    row_scopes: tuple[Any, ...] = ()
    count: TokenCount | None = None
    model: PreTrainedModel | None = None

    def past(self) -> int:
        """The number of tokens in the cache before this pass."""
        return (self.count or TokenCount(self.cache, 0)).read()

    def working_dtype(self, graft: nn.Module) -> torch.dtype:
        """The dtype that a graft computes in: autocast's, or that of its weights.

        A graft casts its inputs to it once, where autocast would cast them in each Linear.
        """
        if (graft, "dtype") not in self.scratch:
            weight = next(graft.parameters())
            autocast = torch.is_autocast_enabled(weight.device.type)
            self.scratch[graft, "dtype"] = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        return self.scratch[graft, "dtype"]

    def document_numbers(self) -> Tensor | None:
        """(B, T) the number of each token's document in its row; None for one document per row.

        A document starts where `position_ids` restart. As in transformers, this needs no attention mask and no cache.
        """
        positions = self.position_ids
        if positions is None or self.attention_mask is not None or self.cache is not None:
            return None
        starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
        return starts.cumsum(-1) if bool(starts.any()) else None

    def positions_in_documents(self) -> Tensor | None:
        """(B, T) each token's position in its document, from 0 and without padding; None where they are the columns.

        The backbone's own `position_ids` are not used, as some families count from another number.
        """
        if self.attention_mask is not None:
            assert self.input_ids is not None, "their number tells which positions are new"
            positions = self.attention_mask.long().cumsum(-1) - 1
            return positions.clamp(min=0)[:, -self.input_ids.shape[1] :]
        document_BT = self.document_numbers()
        if document_BT is None:
            return None
        columns = torch.arange(document_BT.shape[1], device=document_BT.device).expand_as(document_BT)
        is_first = torch.diff(document_BT, prepend=document_BT[:, :1] - 1, dim=-1) != 0
        return columns - torch.where(is_first, columns, 0).cummax(-1).values


@dataclass(frozen=True)
class Tap:
    """A declared hook: where a graft reads or writes the backbone's activations.

    Args:
        when: `before` acts on the site's input, `after` on its output.
        act: what the returned tensor does. `add` adds it to the hidden states; several grafts may add at one site.
            `replace` makes it the new hidden states; only one graft may replace at a site. `bias` adds it to the scores
            of an attention, (B or 1, H or 1, T, S) for S keys; it acts `before`, and several grafts may. None changes
            nothing, bit for bit.
        function: `before`: f(call, inputs); `after`: f(call, inputs, outputs); tensors are (B, T, d).
    """

    site: Site
    when: Literal["before", "after"]
    act: Literal["add", "replace", "bias"]
    function: Callable[..., Tensor | None]


@dataclass
class GenerationPrompt:
    """Marks the prompt in the passes of one generation, whose shapes do not tell it: drafts, chunks, no cache.

    `columns` counts the prompt's, padding included, and `read` those that a cache of the caller holds already.
    """

    columns: int
    read: int = 0

    def mark(self, length: int, device: torch.device, *, cached: bool) -> Tensor | None:
        """(1, T) True at the prompt's columns in the next pass of `length` = T columns; None where it has none."""
        start = self.read if cached else 0
        if start >= self.columns:
            return None  # and nothing changes any more, which compiled code would have to guard
        if cached:
            self.read += length
        return (torch.arange(start, start + length, device=device) < self.columns)[None]


class _CallStack(threading.local):
    """One thread's running passes, innermost last, and the values announced for its next passes."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outer: list[int] = []  # the number of calls before each running pass of a whole model with its head
        self.announced: tuple[dict[str, Any], list[Call]] | None = None
        self.generation: GenerationPrompt | None = None


class TapHooks:
    """Registers each owner's taps, in their order, as forward hooks on one live model.

    Before each forward pass, `prepare` is called with its `Call`.

    Raises TapError if a tap names a site that the model lacks, and TapConflictError if two owners replace at one site.
    """

    _replaces_once = True

    def __init__(
        self, model: PreTrainedModel, sites: Sites, taps: Mapping[Any, Sequence[Tap]], prepare: Callable[[Call], None]
    ) -> None:
        if self._replaces_once:
            check_conflicts(sites, taps)
        self._model, self._prepare, self._stack = model, prepare, _CallStack()
        self._number = next(_numbers)  # an id may return
        self._handles: list[RemovableHandle] = []
        self._replaced: dict[str, Any] = {}  # attributes of the live model that `mark_prompts` replaced
        if not taps:  # a bare model needs no hooks
            return
        try:
            body = sites.body
            self._watch_head(sites, taps)
            self._handles.append(body.register_forward_pre_hook(self._open_call, with_kwargs=True))
            for tap in itertools.chain.from_iterable(taps.values()):
                self._connect(sites, tap)
            self._handles.append(body.register_forward_hook(self._close_call, always_call=True))
        except BaseException:
            self.remove()
            raise
        _forget_compiled()

    def remove(self) -> None:
        """Remove every hook; the model is bare again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name, value in self._replaced.items():
            vars(self._model).pop(name)
            if value is not None:
                setattr(self._model, name, value)
        self._replaced.clear()
        self._prepare = lambda call: None  # the owner's method is a reference circle, which keeps trained copies alive
        _forget_compiled()

    def mark_prompts(self) -> None:
        """Mark the prompt in every generation of the live model, however it is called, until `remove`.

        transformers' continuous batching, in which it can't be told, is refused.
        """
        if not hasattr(self._model, "generate"):
            return
        self._model_generate: Any = self._model.generate
        for name, function in (("generate", self._generate), ("init_continuous_batching", _refuse_pages)):
            self._replaced[name] = vars(self._model).get(name)
            setattr(self._model, name, function)

    @contextmanager
    def announce(self, **values: Any) -> Iterator[list[Call]]:
        """Set fields of the `Call`s of this thread's next forward passes; yields the list of those calls."""
        outer, self._stack.announced = self._stack.announced, (values, calls := [])
        try:
            yield calls
        finally:
            self._stack.announced = outer

    def _generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, with the prompt marked in its passes."""
        ids, cache = kwargs.get("input_ids", inputs), kwargs.get("past_key_values")
        if ids is not None and not (isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel()):
            form = f"the shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"the type {type(ids).__name__}"
            raise TapError(
                f"The prompt has {form}, but token ids of (rows, tokens) are expected: tokenise the text with "
                "return_tensors='pt', and begin an empty one with a BOS token."
            )
        read = 0 if cache is None else int(cache.get_seq_length())
        continues = read and getattr(kwargs.get("generation_config"), "is_assistant", False)  # drafts change no token
        with self.generation(None if ids is None or continues else GenerationPrompt(ids.shape[1], read)):
            return self._model_generate(inputs, *args, **kwargs)

    @contextmanager
    def generation(self, prompt: GenerationPrompt | None) -> Iterator[None]:
        """Mark the prompt, if it is known, in the `Call`s of this thread's next passes, those of one generation."""
        outer, self._stack.generation = self._stack.generation, prompt
        try:
            yield
        finally:
            self._stack.generation = outer

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """`context_fn` of torch's activation checkpointing: recomputation gets the call of its own forward pass."""
        return nullcontext(), self._resume(self._stack.calls[-1])

    @contextmanager
    def _resume(self, call: Call) -> Iterator[None]:
        # A recomputed block must not add to the scratch values a second time.
        self._stack.calls.append(replace(call, scratch=dict(call.scratch)))
        try:
            yield
        finally:
            self._stack.calls.pop()

    def _open_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values: dict[str, Any]
        values, calls = self._stack.announced or ({}, [])
        ids, cache = kwargs.get("input_ids", args[0] if args else None), kwargs.get("past_key_values")
        inputs = ids if ids is not None else kwargs.get("inputs_embeds")
        length = 0 if inputs is None else inputs.shape[1]
        count = TokenCount(cache, length)
        positions = kwargs.get("position_ids")
        call = Call(ids, position_ids=positions, cache=cache, count=count, model=self._model, **values)
        if "attention_mask" not in values:
            call.attention_mask = partial(token_mask_of, kwargs.get("attention_mask"), call, length)
        if values.get("token_mask") is None:
            call.token_mask = lambda: None if (mask := call.attention_mask) is None else mask[:, -length:].bool()
        if count.is_known:  # otherwise a static cache waits until a graft reads the masks
            _ = call.token_mask
        if self._stack.generation is not None and inputs is not None and not self._stack.calls:
            prompt_1T = self._stack.generation.mark(length, inputs.device, cached=cache is not None)
            call.prompt = None if prompt_1T is None else prompt_1T.expand(len(inputs), -1)
        calls.append(call)
        self._stack.calls.append(call)
        self._prepare(call)

    def check_cache(self, call: Call) -> None:
        """Raise `TapError` if the cache of a pass holds tokens that were read without these taps."""
        if call.cache is None or torch.compiler.is_compiling() or vars(call.cache).get(_READER_KEY) == self._number:
            return
        if call.past():
            raise TapError(
                f"The cache holds {call.past()} tokens that were read without these grafts: give the whole text, with "
                "an empty cache or none."
            )

    def _close_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for call in self._stack.calls[-1:]:
            made = getattr(output, "past_key_values", None)  # in this pass, if the caller gave none
            cache = made if call.cache is None else call.cache
            if isinstance(cache, Cache):
                setattr(cache, _READER_KEY, self._number)
            if call.count is not None:
                call.count.keep()
        if not self._stack.outer or len(self._stack.calls) != self._stack.outer[-1] + 1:
            del self._stack.calls[-1:]

    def _watch_head(self, sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
        """Keep the call of a pass open for the modules that run behind the body, where a tap acts on one of them."""
        inside = set(sites.body.modules())
        if all(module in inside for own in taps.values() for tap in own for module in sites.module(tap.site)):
            return

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.outer.append(len(self._stack.calls))
            if isinstance(kwargs.get("logits_to_keep"), Tensor):
                raise TapError(
                    "A graft acts on the output layer, and the tensor logits_to_keep picks tokens that it can't tell "
                    "apart: give the number of last tokens instead."
                )

        def leave(*_: Any) -> None:
            del self._stack.calls[self._stack.outer.pop() :]

        self._handles.append(self._model.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(leave, always_call=True))

    def _connect(self, sites: Sites, tap: Tap) -> None:
        if tap.act == "bias":
            self._check_bias(tap)
        entry, exit_ = sites.module(tap.site)
        input_key = ("input of", id(exit_), id(tap))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = self._in_rows(_hidden(args, kwargs))
            if tap.when == "after":
                self._current().scratch[input_key] = hidden
                return None
            result = tap.function(self._current(), hidden)
            if result is None:
                return None
            if tap.act == "bias":
                columns = _static_columns(self._current(), tap.site, result.shape[-2])
                mask = biased_mask(self._additive_mask(tap, kwargs), result, sites.family.causal, columns)
                return args, kwargs | {"attention_mask": mask}
            new = (hidden + result if tap.act == "add" else result).view_as(_hidden(args, kwargs))
            return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": new})

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            inputs = self._in_rows(_hidden(args, kwargs)) if entry is exit_ else self._current().scratch.pop(input_key)
            written = output[0] if isinstance(output, tuple) else output
            hidden = self._in_rows(written)
            result = tap.function(self._current(), inputs, hidden)
            if result is None:
                return None
            new = (hidden + result if tap.act == "add" else result).view_as(written)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        if tap.when == "before" or entry is not exit_:
            self._handles.append(entry.register_forward_pre_hook(before, with_kwargs=True))
        if tap.when == "after":
            self._handles.append(exit_.register_forward_hook(after, with_kwargs=True))

    def _check_bias(self, tap: Tap) -> None:
        if tap.when != "before" or tap.site.kind != "attention":
            raise TapError(f"A tap adds to scores {tap.when} {tap.site}: it can do so only before an attention.")
        implementation = getattr(self._model.config, "_attn_implementation", None)
        if getattr(self._model, "_builds_own_masks", False) or implementation not in ("sdpa", "eager"):
            raise self._no_additive_mask(tap)

    def _additive_mask(self, tap: Tap, kwargs: dict[str, Any]) -> Tensor | None:
        """The mask that an attention is given, to which a tap may add."""
        mask = kwargs.get("attention_mask")
        is_boolean = mask is not None and mask.dtype == torch.bool
        if "attention_mask" not in kwargs or (is_boolean and self._model.config._attn_implementation == "eager"):
            raise self._no_additive_mask(tap)
        return mask

    def _no_additive_mask(self, tap: Tap) -> TapError:
        config, others = self._model.config, "sdpa or eager"
        if str(config._attn_implementation) in others:
            others = "sdpa" if config._attn_implementation == "eager" and self._model._supports_sdpa else ""
        remedy = f"load it with attn_implementation {others}, or leave" if others else "leave"
        return TapError(
            f"A tap adds to the scores of {tap.site}, but this {config.model_type} model's attention "
            f"({config._attn_implementation}) takes no additive mask: {remedy} out what adds to scores."
        )

    def _in_rows(self, hidden: Tensor) -> Tensor:
        """(B, T, d) of hidden states that a model keeps as (B * T, d) in its FFNs."""
        ids = self._current().input_ids
        if ids is None or hidden.dim() != 2 or not hidden.is_floating_point():
            return hidden
        return hidden.unflatten(0, tuple(ids.shape))

    def _current(self) -> Call:
        # Taps also act on a module that is called on its own, outside the model's forward pass.
        return self._stack.calls[-1] if self._stack.calls else Call()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _forget_compiled() -> None:
    """Drop compiled code: torch.compile guards on everything but hooks, and would run on with the old ones."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _refuse_pages(*_: Any, **__: Any) -> None:
    raise TapError(
        "transformers' continuous batching packs all requests into one row of pages, in which grafts can't tell them "
        "apart: use generate with a batch, or graft serve."
    )


def check_conflicts(sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
    """Raise `TapConflictError` if two owners replace at one site."""
    owners: dict[tuple[nn.Module, str], Any] = {}
    for owner, owner_taps in taps.items():
        for tap in owner_taps:
            if tap.act != "replace":
                continue
            entry, exit_ = sites.module(tap.site)  # compares modules, as layers 1 and -1 may be the same
            other = owners.setdefault((entry if tap.when == "before" else exit_, tap.when), owner)
            if other != owner:
                raise TapConflictError(
                    f"The grafts {other!r} and {owner!r} both replace what happens {tap.when} {tap.site}: "
                    "attach one of them, or train one with other layers."
                )


def token_mask_of(mask: Any, call: Call, length: int) -> Tensor | None:
    """(B, T_past + T) 1 for real tokens, from the mask that a model is given for `length` = T tokens; None without one.

    For a static cache, transformers' `generate` makes a mask of four dimensions, or one for each type of layer. In a
    layer without a window, the last query sees all real tokens so far. BLOOM's has a column for each token to come.

    Raises TapError if the mask does not tell which tokens are real.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        if mask is None or call.cache is None or not any(map(is_static_layer, call.cache.layers)):
            return mask
        return mask[:, : call.past() + length]
    if call.cache is not None and any(is_static_layer(layer, window=False) for layer in call.cache.layers):
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        if mask is None:
            return None
        if isinstance(mask, Tensor) and mask.dim() == 4:
            last = mask[:, 0, -1, : call.past() + length]
            return (last if last.dtype == torch.bool else last == 0).long()
    form = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
    raise TapError(
        f"The attention mask has {form}, from which a graft can't tell padding from text: pass one of (rows, tokens), "
        "with a dynamic cache where every layer has a sliding window."
    )


def biased_mask(mask: Tensor | None, bias: Tensor, causal: bool, columns: int | None = None) -> Tensor:
    """The additive mask (B, 1 or H, T, S) that keeps hidden keys hidden and adds `bias` to the other scores.

    As transformers passes it, a boolean mask is True at visible keys, a floating-point one is additive, and in causal
    models None hides only later tokens. The last T of the bias's S keys are the queries' own. A static cache has
    `columns`, those behind S for tokens to come; a wider mask has further keys before S. Neither get a bias.
    """
    queries, keys = bias.shape[-2:]
    behind = max(0, (columns or keys) - keys)
    if mask is None and causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)[None, None]
        mask = functional.pad(mask, (0, behind))
    bias = functional.pad(bias, (0, behind))
    if mask is None:
        return bias
    bias = functional.pad(bias, (max(0, mask.shape[-1] - bias.shape[-1]), 0))
    if mask.dtype != torch.bool:
        return mask + bias.to(mask.dtype)
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def _static_columns(call: Call, site: Site, queries: int) -> int | None:
    """The columns of a site's layer in a static cache; None in another cache."""
    layer, layers = site.layer, [] if call.cache is None else call.cache.layers  # lazy caches make them when needed
    if call.cache is None or layer is None or layer >= len(layers) or not is_static_layer(layers[layer]):
        return None
    return call.cache.get_mask_sizes(queries, layer)[0]


def left_padded(prompts: Sequence[Sequence[int]], padding: int, device: Any) -> dict[str, Any]:
    """Arguments of `generate` for B prompts that end together: ids and mask (B, T), and the padding's id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": padding}

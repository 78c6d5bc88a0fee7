"""The text that each token's route depends on, and the routing state in the cache of a generation.

The tokens of a document are counted from 0. The first n are the prompt; without a known prompt, n = 1. The route of
token i depends on the document up to token b(i), so that it changes every k tokens:

    b(i) = n - 1                            for i < n      (the whole prompt, which is known at once)
    b(i) = i - ((i + 1 - n) mod k)          for i >= n

For n = 1 this is i - (i mod k), and no token's route depends on a later token.

Shape suffixes: B rows, T tokens of this pass, P tokens before, S = P + T, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from graftlm.backbone import Call
from graftlm.backbone.cache import slots
from graftlm.backbone.cache_joining import join_columns
from graftlm.errors import GraftError
from graftlm.grafts.token_routing.config import TokenRoutingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RoutingState(NamedTuple):
    """The routing state of the tokens before this pass, as the cache of a generation keeps it.

    Args:
        ids: (B, P) token ids.
        weights: (B, P, E + 1) weights of the experts, and of the bare backbone at the end.
        prompt_length: (B,) number of prompt tokens.
    """

    ids: Tensor
    weights: Tensor
    prompt_length: Tensor


@dataclass
class RunningSum:
    """Sums of the embeddings of the tokens so far.

    Args:
        length: number of columns that the sums cover.
        sums: (B, d) sums.
        counts: (B, 1) numbers of tokens.
    """

    length: int = 0
    sums: Tensor | float = 0.0
    counts: Tensor | float = 0.0


class RoutingCacheLayer(DynamicLayer):
    """A cache layer with a `RoutingState`, to which beam search, cropping and batch selection apply.

    Keys are ids, (B, 1, S, 1). Values are weights and the prompt length, (B, 1, S, E + 2).
    """

    counts_tokens = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running_sum = RunningSum()
        self._summed_keys: Tensor | None = None

    @property
    def running_sum(self) -> RunningSum:
        """The running sum of the embedder.

        It is empty again after the rows or columns of the layer were changed by anything else than `append`.
        """
        is_current = self._summed_keys is self.keys  # such a change replaces the keys
        if not is_current:
            self._running_sum = RunningSum()
            self._summed_keys = self.keys
        return self._running_sum

    @property
    def state(self) -> RoutingState | None:
        """The stored state, or None before the first pass."""
        if not self.is_initialized or self.keys is None or self.values is None:
            return None
        if self.keys.numel() == 0:
            return None
        return RoutingState(
            ids=self.keys[:, 0, :, 0],
            weights=self.values[:, 0, :, :-1],
            prompt_length=self.values[:, 0, -1, -1].long(),
        )

    def append(self, spans: RouteSpans, weights_BTE: Tensor) -> None:
        """Store the tokens of a pass and their weights.

        Args:
            spans: the spans of the pass.
            weights_BTE: (B, T, E + 1) weights.
        """
        ids_BT = spans.ids[:, spans.past :]
        prompt_length_BT1 = spans.prompt_length[..., None].to(weights_BTE.dtype)
        values = torch.cat([weights_BTE, prompt_length_BT1], dim=-1)
        self.update(ids_BT[:, None, :, None], values[:, None])
        self._summed_keys = self.keys

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """Join the rows of several layers, as `backbone.cache_joining.join` requires.

        Args:
            layers: one layer for each generation, including this one.
            paddings: number of columns of padding before each layer.

        Returns:
            The layer of all rows.
        """
        joined = join_columns(layers, paddings)
        assert isinstance(joined, RoutingCacheLayer)
        joined._summed_keys = None
        return joined

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows.

        Args:
            indices: the rows.
        """
        super().batch_select_indices(indices)
        self._summed_keys = None


def cache_owner(graft: object) -> str:
    """Return the key of a graft's routing layer in a cache."""
    return f"token routing {id(graft)}"


def routing_layer(call: Call, graft: object, backbone_layers: int) -> RoutingCacheLayer | None:
    """Return the routing layer of the pass's cache, which the first pass appends.

    Args:
        call: the pass.
        graft: the graft that the layer belongs to.
        backbone_layers: number of layers of the backbone.

    Returns:
        The layer; None without a cache.

    Raises:
        GraftError: the cache was filled without this graft.
    """
    if call.cache is None:
        return None
    (index,) = slots(
        call.cache,
        owner=cache_owner(graft),
        count=1,
        backbone_layers=backbone_layers,
        make=RoutingCacheLayer,
    )
    layer = call.cache.layers[index]
    assert isinstance(layer, RoutingCacheLayer)
    if layer.get_seq_length() != call.past():
        raise GraftError(
            "The cache contains tokens that the routing has not read: start the generation again with the graft "
            "attached, and without guidance_scale, which uses a second cache."
        )
    return layer


@dataclass
class RouteSpans:
    """The span of text that determines the route of each token of one pass.

    Args:
        ids: (B, S) all token ids so far.
        start: (B, T) column in S of the first token of each token's document.
        end: (B, T) last column, inclusive, on which each token's route depends.
        prompt_length: (B, T) n of the module's equations.
        window: number of last tokens of the span on which the route depends; None for all.

    Attributes:
        columns: column (B, T) in this pass, counted from 1, where each span ends, or 0 if it ends before this pass.
    """

    ids: Tensor
    start: Tensor
    end: Tensor
    prompt_length: Tensor
    window: int | None

    def __post_init__(self) -> None:
        self.columns = (self.end - self.past).clamp(min=-1) + 1

    @property
    def past(self) -> int:
        """Number of columns P before this pass."""
        return self.ids.shape[1] - self.end.shape[1]

    @property
    def updates(self) -> Tensor:
        """Mask (B, T) of the tokens of this pass where new weights are computed, which are the ends of spans."""
        rows, length = self.end.shape
        if length == 1:
            return self.columns > 0
        no_updates = torch.zeros(rows, length + 1, dtype=torch.bool, device=self.end.device)
        updates = no_updates.scatter(1, self.columns, True)
        return updates[:, 1:]


def prefix_texts(
    spans: RouteSpans,
    tokenizer: PreTrainedTokenizerBase,
    *,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Return the text of each span that ends in this pass.

    Args:
        spans: the spans of the pass.
        tokenizer: the backbone's tokenizer, which decodes the text.
        skip_special_tokens: whether special tokens are left out, so that the texts on both sides of one are joined.

    Returns:
        A text for each True of `spans.updates`, row by row.
    """
    texts = []
    for row, token in spans.updates.nonzero().tolist():
        stop = spans.past + token + 1
        window = spans.window or stop
        first = max(int(spans.start[row, token]), stop - window)
        ids = spans.ids[row, first:stop]
        texts.append(str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)))
    return texts


def route_spans(call: Call, config: TokenRoutingConfig, state: RoutingState | None, *, causal: bool) -> RouteSpans:
    """Compute the spans of a pass.

    In training and in encoders, every route depends on the whole document.

    Args:
        call: the pass, which has token ids.
        config: configuration of the routing.
        state: state of the tokens in the cache; None without one.
        causal: whether the backbone is causal.

    Raises:
        GraftError: routes depend on the whole prompt, but the pass has only a later part of it.
    """
    ids_BT = call.input_ids
    assert ids_BT is not None
    past_ids = ids_BT[:, :0] if state is None else state.ids
    ids_BS = torch.cat([past_ids, ids_BT], dim=1)
    all_columns = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    columns = all_columns[past_ids.shape[1] :].expand_as(ids_BT)
    index = columns  # position of each token in its document
    positions = call.positions_in_documents()
    if positions is not None:
        index = positions.to(columns.device).expand_as(columns)
    start = columns - index
    if call.training or not causal:
        end = _document_ends(columns, start, _real_tokens(call, ids_BT))
        return RouteSpans(ids_BS, start, end, prompt_length=torch.ones_like(start), window=config.window)
    n = _prompt_lengths(call, config, state, start)
    generated = index + 1 - n
    b = torch.where(generated <= 0, n - 1, index - generated % config.every)
    if config.reads == "prompt":
        b = torch.where((n > 1) & (generated > 0), n - 1, b)
    return RouteSpans(ids_BS, start, end=start + b, prompt_length=n, window=config.window)


def _real_tokens(call: Call, ids_BT: Tensor) -> Tensor:
    """Return a mask (B, T) of the tokens of a pass, False at padding."""
    mask = call.token_mask
    if call.attention_mask is not None:
        mask = call.attention_mask[:, -ids_BT.shape[1] :]
    if mask is None:
        return torch.ones_like(ids_BT, dtype=torch.bool)
    return mask.bool().to(ids_BT.device)


def _document_ends(columns: Tensor, start: Tensor, real: Tensor) -> Tensor:
    """Return the last column (B, T) of each token's document, without padding."""
    same_document = start[:, :, None] == start[:, None, :]
    in_document = same_document & real[:, None, :]
    own_columns = torch.where(in_document, columns[:, None, :], start[:, :, None])
    return own_columns.amax(-1)


def _prompt_lengths(
    call: Call,
    config: TokenRoutingConfig,
    state: RoutingState | None,
    start: Tensor,
) -> Tensor:
    """Return n (B, T), the number of prompt tokens of each token's document, which is at least one."""
    length = start.shape[1]
    reads_whole_prompt = config.prompt == "whole"
    if state is not None:
        if call.prompt is not None and reads_whole_prompt and config.fixed is None:
            raise GraftError(
                "The prompt is read in several passes, but with prompt set to whole its routes depend on all of it: "
                "generate without prefill_chunk_size and without a filled cache, or set prompt to causal."
            )
        return state.prompt_length[:, None].expand(-1, length)
    assert call.input_ids is not None
    real = _real_tokens(call, call.input_ids)
    if call.prompt is not None and reads_whole_prompt:
        prompt = call.prompt.to(start.device) & real
        first = start.clamp(max=length - 1)
        counts = torch.zeros_like(start).scatter_add(1, first, prompt.long())
        return counts.gather(1, first).clamp(min=1)
    if call.cache is not None and reads_whole_prompt:  # the first pass of a generation
        return real.sum(1, keepdim=True).clamp(min=1).expand(-1, length)
    return torch.ones_like(start)


def check_inputs(call: Call) -> None:
    """Raise `GraftError` if a pass has no token ids."""
    if call.input_ids is None:
        raise GraftError("The pass has embeddings as inputs, but token routing reads token ids: pass input_ids.")
    if call.input_ids.shape[1] == 0:
        raise GraftError("The pass has no tokens, but token routing needs at least one: pass a longer text.")


def repeat_weights(fixed: Sequence[float], like_BT: Tensor) -> Tensor:
    """Return the same weights for every token, (B, T, E + 1).

    Each weight is filled on the device, because copying a list to a GPU would wait for the GPU.
    """
    bare = 1 - sum(fixed)
    columns = [torch.full((1,), weight, device=like_BT.device) for weight in (*fixed, bare)]
    return torch.cat(columns).expand(*like_BT.shape, len(columns))

"""Which text the route of each token reads.

Tokens of a document are counted from 0, its first n being given: those of the prompt, or one where no prompt is known.
The route of token i reads the document up to token b(i), so that it changes every k tokens:

    b(i) = n - 1                            for i < n      (the whole prompt, which is known at once)
    b(i) = i - ((i + 1 - n) mod k)          for i >= n

For n = 1 that is i - (i mod k), and no token's route depends on a later one.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, past ones among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.backbone import Call
from graftlm.grafts.token_routing.config import TokenRoutingConfig


@dataclass(frozen=True)
class Reading:
    """What the routes of one pass read.

    Attributes:
        ids: (B, S) all tokens so far.
        start: (B, T) the column in S where each token's document begins.
        until: (B, T) the column up to which, inclusive, its route reads.
        given: (B, T) n, as above.
    """

    ids: Tensor
    start: Tensor
    until: Tensor
    given: Tensor

    @property
    def past(self) -> int:
        """How many columns lie before this pass."""
        return self.ids.shape[1] - self.until.shape[1]

    @property
    def anew(self) -> Tensor:
        """(B, T) True at each token of this pass up to which some token's route reads."""
        length = self.until.shape[1]
        columns = (self.until - self.past).clamp(min=-1) + 1  # those before the pass fall into a column of their own
        found = torch.zeros(len(columns), length + 1, dtype=torch.bool, device=columns.device)
        return found.scatter(1, columns, True)[:, 1:]


def read(
    call: Call, config: TokenRoutingConfig, before: Before | None, *, whole: bool = False, begins: bool = False
) -> Reading:
    """The reading of a pass.

    Args:
        call: the pass, with its token ids.
        config: the routing's.
        before: what the cache holds of the tokens before; None for none.
        whole: whether each token reads its whole document, as in training and in encoders.
        begins: whether a generation begins with this pass, so that its tokens are the prompt.
    """
    ids_BT = call.input_ids
    assert ids_BT is not None
    past = before.ids if before is not None else ids_BT[:, :0]
    start, index, real = _documents(call, past.shape[1])
    ids_BS = torch.cat([past, ids_BT], dim=1)
    if whole:
        last = _last_of_document(start, real, past.shape[1])
        return Reading(ids_BS, start, last, torch.ones_like(start))
    given = _given(call, config, before, start, real, begins)
    since = index + 1 - given
    until = torch.where(since <= 0, given - 1, index - since % config.every)
    if config.reads == "prompt":
        until = torch.where((given > 1) & (since > 0), given - 1, until)
    return Reading(ids_BS, start, start + until, given)


@dataclass(frozen=True)
class Before:
    """What a generation's cache holds of the tokens before.

    Attributes:
        ids: (B, P) their ids.
        weights: (B, P, E + 1) their routes' weights, the bare backbone's last.
        given: (B,) how many tokens were given.
    """

    ids: Tensor
    weights: Tensor
    given: Tensor


def _documents(call: Call, past: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T) the column where each token's document begins, its place in it, and whether it is no padding."""
    ids = call.input_ids
    assert ids is not None
    rows, length = ids.shape
    columns = torch.arange(past, past + length, device=ids.device).expand(rows, -1)
    if call.attention_mask is not None:
        mask = call.attention_mask.to(ids.device)
        counted = mask.long().cumsum(-1)[:, -length:]
        index = (counted - 1).clamp(min=0)
        return columns - index, index, mask[:, -length:].bool()
    real = call.token_mask if call.token_mask is not None else torch.ones_like(ids, dtype=torch.bool)
    if past or call.position_ids is None or call.position_ids.shape[-1] != length:
        return torch.zeros_like(columns), columns, real
    places = call.position_ids.to(ids.device).expand(rows, -1)
    begins = torch.ones_like(real)
    begins[:, 1:] = places[:, 1:] != places[:, :-1] + 1
    start = torch.where(begins, columns, 0).cummax(dim=1).values
    return start, columns - start, real


def _given(
    call: Call, config: TokenRoutingConfig, before: Before | None, start: Tensor, real: Tensor, begins: bool
) -> Tensor:
    """(B, T) n: prompt tokens of each token's document, at least one."""
    length = start.shape[1]
    if before is not None:
        return before.given[:, None].expand(-1, length)
    if call.prompt is not None and config.prompt == "whole":
        prompt = call.prompt.to(start.device) & real
        counts = torch.zeros_like(start).scatter_add(1, start.clamp(max=length - 1), prompt.long())
        return counts.gather(1, start.clamp(max=length - 1)).clamp(min=1)
    if begins and config.prompt == "whole":
        return real.sum(1, keepdim=True).clamp(min=1).expand(-1, length)
    return torch.ones_like(start)


def _last_of_document(start: Tensor, real: Tensor, past: int) -> Tensor:
    """(B, T) the last column of each token's document that is no padding."""
    columns = torch.arange(past, past + start.shape[1], device=start.device).expand_as(start)
    same = start[:, :, None] == start[:, None, :]
    return torch.where(same & real[:, None, :], columns[:, None, :], start[:, :, None]).amax(-1)

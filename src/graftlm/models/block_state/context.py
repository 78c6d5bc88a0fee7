"""Context states: what a layer knows of all text before, as keys and values for the tokens of a window.

- `sh`: the state space's outputs at the window's tokens; a token sees those up to its own.
- `mh`: the same with an output, so a state, for each head.
- `mf`: the outputs of S state spaces at the end of the window before, with learned context IDs; the first window has
  learned states.
- state vectors of a recurrent layer: the same as `mf` for those who attend.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, I windows of the grid, w slots of a window, H heads, K
width of a head, S states, E channels, d hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.models.block_state.attention import (
    NEVER,
    Norm,
    Pieces,
    Remembered,
    attend,
    attend_so_far,
    heads,
    merge,
    windowed,
)
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.memory import LayerMemory
from graftlm.models.block_state.passes import Pass
from graftlm.models.block_state.sequence_ssm import WindowOutputs, token_outputs, window_outputs


class TokenContext(nn.Module):
    """Cross-attention of each token to the state space's outputs at the tokens of its window so far (`sh`, `mh`)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.count, self.window = config.num_attention_heads, config.window
        self.bidirectional = config.bidirectional
        multi = config.context == "mh"
        width, channels = config.hidden_size, config.state_width
        self.down = nn.Linear(width, channels, bias=False)
        outputs = self.count if multi else 1
        self.ssm = token_outputs(config, outputs, "state")
        self.back = token_outputs(config, outputs, "back") if config.bidirectional else None
        self.q = nn.Linear(width, width, bias=False)
        self.norm = Norm(channels, config)
        if multi:
            self.per_head = nn.Parameter(torch.empty(self.count, channels, 2 * config.head_size))
        else:
            self.kv = nn.Linear(channels, 2 * width, bias=False)
        self.multi = multi
        self.remembered = Remembered("contexts", config.window)

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, now: Pass, memory: LayerMemory | None) -> Pieces:
        """(B, I, w, d) for each slot, of hidden states; `kv_BG` is not read."""
        q, kv = now.onto_grid(self.q(x_BTd)), self._contexts(x_BTd, now, memory)
        if now.step and memory is not None:
            return self._step(q, self.remembered.step(kv, memory, self.training), now)
        _, grid = self.remembered.extend(kv, now, memory, self.training)
        width = min(self.window, now.slots)
        q, k, v = (heads(windowed(one, width), self.count) for one in (q, *grid.chunk(2, dim=-1)))
        return self._seeing_both_ways(q, k, v, now) if self.bidirectional else attend_so_far(q, k, v)

    def _step(self, q_B1d: Tensor, every: Tensor, now: Pass) -> Pieces:
        """(B, 1, 1, d): attention to the states of the token's window among the last W."""
        place = now.row_numbers([n % self.window for n in now.past])[:, None]
        seen = torch.arange(self.window - 1, -1, -1, device=q_B1d.device) <= place
        bias = torch.where(seen, 0.0, NEVER)[:, None, None]
        k, v = every.chunk(2, dim=-1)
        out = merge(attend(heads(q_B1d, self.count), heads(k, self.count), heads(v, self.count), bias))
        return Pieces([out[:, None]])

    def _contexts(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, G, 2d): keys and values."""
        u = now.onto_grid(self.down(x_BTd))
        y = self.ssm(u, now, memory)
        if self.back is not None:
            flipped = (u * now.holds[..., None]).flip(1)
            y = y + self.back(flipped, now.backwards(), None).flip(1)
        y = now.off_grid(y, x_BTd.shape[1]).to(
            x_BTd.dtype
        )  # so that every Linear of tokens sees columns, as taps expect
        if not self.multi:
            return now.onto_grid(self.kv(self.norm(y[..., 0])))
        kv = torch.einsum("bteh,hek->bthk", self._normed(y), self.per_head)
        k, v = kv.chunk(2, dim=-1)
        return now.onto_grid(torch.cat([k.flatten(-2), v.flatten(-2)], dim=-1))

    def _normed(self, y_BTEH: Tensor) -> Tensor:
        return self.norm(y_BTEH.transpose(-1, -2)).transpose(-1, -2)

    def _seeing_both_ways(self, q: Tensor, k: Tensor, v: Tensor, now: Pass) -> Pieces:
        """(B, I, w, d): attention to the states of all tokens of a window."""
        there = torch.where(windowed(now.holds, q.shape[-2]), 0.0, NEVER)
        return Pieces([merge(attend(q, k, v, there[:, :, None, None]))])


class FilterContext(nn.Module):
    """Cross-attention of each token to the outputs of S state spaces at the end of the window before (`mf`)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.window, width, channels = config.window, config.hidden_size, config.state_width
        self.down = nn.Linear(width, channels, bias=False)
        self.ssm = window_outputs(config, "state")
        self.back = window_outputs(config, "back") if config.bidirectional else None
        self.first = nn.Parameter(torch.empty(config.filters, channels))
        self.last = nn.Parameter(torch.empty(config.filters, channels)) if config.bidirectional else None
        self.lift = nn.Linear(channels, width, bias=False)
        self.norm = Norm(width, config)
        self.ids = nn.Parameter(torch.empty(config.filters * (2 if config.bidirectional else 1), width))
        self.reader = StateReader(config)

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, now: Pass, memory: LayerMemory | None) -> Pieces:
        """(B, I, w, d) for each slot, of hidden states; `kv_BG` is not read."""
        u = now.onto_grid(self.down(x_BTd))
        ends = self.ssm(u, now, memory).to(x_BTd.dtype)  # (B, I, S, E)
        states = before_windows(ends, self.first, now, memory, "context", self.training)
        if self.back is not None and self.last is not None:
            states = torch.cat([states, self._following(u, now, self.back, self.last)], dim=2)
        return self.reader(x_BTd, self.norm(self.lift(states)) + self.ids, now)

    def _following(self, u: Tensor, now: Pass, back: WindowOutputs, last: Tensor) -> Tensor:
        """(B, I, S, E): outputs of the systems that read backwards, at the first token of the window after."""
        flipped = (u * now.holds[..., None]).flip(1)
        ends = back(flipped, now.backwards(), None).to(u.dtype).flip(1)
        after = torch.cat([ends[:, 1:], ends[:, :1]], dim=1)
        width = min(self.window, now.slots)
        inside = torch.arange(width, now.slots + 1, width, device=u.device) < now.row_numbers(now.new)[:, None]
        return torch.where(inside[..., None, None], after, last)


def before_windows(
    ends_BI: Tensor, first: Tensor, now: Pass, memory: LayerMemory | None, name: str, detach: bool
) -> Tensor:
    """(B, I, ...): of what stands at the end of each window, that of the window before it.

    Before a row's first window stands `first` (...); before the grid's, what was remembered.
    """
    old = None if memory is None else memory.tensors.get(name)
    before = first.expand(ends_BI.shape[0], *first.shape).to(ends_BI.dtype) if old is None else old
    every = torch.cat([before[:, None], ends_BI], dim=1)
    if memory is not None:
        ended = now.row_numbers(now.ended)
        memory.keep(name, every[torch.arange(len(every), device=every.device), ended], detach=detach)
    return every[:, :-1]


class StateReader(nn.Module):
    """Cross-attention of a window's tokens to S states, all of them seen."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.count, self.window = config.num_attention_heads, config.window
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, states_BISd: Tensor, now: Pass) -> Pieces:
        """(B, I, w, d)."""
        return self.read(x_BTd, self.kv(states_BISd), now)

    def read(self, x_BTd: Tensor, kv_BIS: Tensor, now: Pass) -> Pieces:
        """(B, I, w, d) of the states' keys and values (B, I, S, 2d)."""
        q = heads(windowed(now.onto_grid(self.q(x_BTd)), min(self.window, now.slots)), self.count)
        k, v = (heads(one, self.count) for one in kv_BIS.chunk(2, dim=-1))
        return Pieces([merge(attend(q, k, v))])

"""What chooses among sentences: a classifier, and a pointer with beam search.

Shape suffixes: B documents, N sentences, K steps of the pointer, w width of a sentence's vector, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graftlm.models.sentence_selector.config import SentenceSelectorConfig


class ClassifierHead(nn.Module):
    """One logit a sentence: W_o [d_i; tanh(b_d + W_d mean(d))] + b_o (equations 2.1 and 2.2)."""

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.whole = nn.Linear(config.width, config.width)
        self.out = nn.Linear(2 * config.width, 1)

    def forward(self, d_BNw: Tensor, mask_BN: Tensor) -> Tensor:
        """(B, N)."""
        there = mask_BN[..., None].to(d_BNw.dtype)
        mean_Bw = (d_BNw * there).sum(1) / there.sum(1)
        whole_BNw = torch.tanh(self.whole(mean_Bw))[:, None].expand_as(d_BNw)
        return self.out(torch.cat([d_BNw, whole_BNw], dim=-1)).squeeze(-1)


@dataclass
class PointerState:
    """Hidden and cell states of the pointer's LSTM, (layers, B, h), and what it attended to last, (B, h)."""

    hidden: Tensor
    cell: Tensor
    attended: Tensor

    def rows(self, rows_B: Tensor) -> PointerState:
        """Some rows, in another order."""
        return PointerState(self.hidden[:, rows_B], self.cell[:, rows_B], self.attended[rows_B])


class PointerHead(nn.Module):
    """An LSTM that points at one sentence after another, fed with the last one's vector s and what it attended to.

    a_t = softmax over i of (W_a h_t) · d_i, c_t = Σ a_ti d_i, and h̃_t = tanh(W_c [c_t; h_t]) goes into the next step.
    """

    def __init__(self, config: SentenceSelectorConfig, inputs: int) -> None:
        super().__init__()
        dropout = config.dropout if config.num_layers > 1 else 0.0
        hidden = config.hidden_size
        self.start = nn.Parameter(torch.zeros(inputs))
        self.lstm = nn.LSTM(inputs + hidden, hidden, config.num_layers, batch_first=True, dropout=dropout)
        self.begin = nn.Linear(config.width, hidden)
        self.query = nn.Linear(hidden, config.width, bias=False)
        self.attend = nn.Linear(config.width + hidden, hidden)

    def state(self, d_BNw: Tensor, mask_BN: Tensor) -> PointerState:
        """Before the first step: all layers begin with tanh(W mean(d) + b)."""
        there = mask_BN[..., None].to(d_BNw.dtype)
        first = torch.tanh(self.begin((d_BNw * there).sum(1) / there.sum(1)))
        hidden = first.expand(self.lstm.num_layers, -1, -1).contiguous()
        return PointerState(hidden, torch.zeros_like(hidden), torch.zeros_like(first))

    def step(self, last_Bs: Tensor, state: PointerState, d_BNw: Tensor, mask_BN: Tensor) -> tuple[Tensor, PointerState]:
        """Log-probabilities of the next sentence, (B, N), after the one whose vector s is `last_Bs`."""
        inputs = torch.cat([last_Bs, state.attended], dim=-1)[:, None]
        h_B1h, (hidden, cell) = self.lstm(inputs, (state.hidden, state.cell))
        scores_BN = torch.einsum("bw,bnw->bn", self.query(h_B1h[:, 0]), d_BNw).masked_fill(~mask_BN, float("-inf"))
        a_BN = scores_BN.softmax(-1)
        c_Bw = torch.einsum("bn,bnw->bw", a_BN, d_BNw)
        attended_Bh = torch.tanh(self.attend(torch.cat([c_Bw, h_B1h[:, 0]], dim=-1)))
        return scores_BN.log_softmax(-1), PointerState(hidden, cell, attended_Bh)

    def forward(self, s_BNs: Tensor, d_BNw: Tensor, mask_BN: Tensor, targets_BK: Tensor) -> Tensor:
        """Log-probabilities at each step, (B, K, N), given the right sentences before it; −1 in targets is padding."""
        state, last_Bs = self.state(d_BNw, mask_BN), self.start.expand(len(s_BNs), -1)
        steps = []
        for target_B in targets_BK.unbind(1):
            found_BN, state = self.step(last_Bs, state, d_BNw, mask_BN)
            steps.append(found_BN)
            last_Bs = s_BNs[torch.arange(len(s_BNs), device=s_BNs.device), target_B.clamp(min=0)]
        return torch.stack(steps, dim=1)

    def search(self, s_Ns: Tensor, d_Nw: Tensor, steps: int, beams: int) -> tuple[list[int], list[float], Tensor]:
        """The likeliest sequence of different sentences of one document that beam search finds.

        Returns:
            its sentences, their log-probabilities, and log-probabilities of all at the step after it, (N,).
        """
        everywhere = torch.ones(1, len(d_Nw), dtype=torch.bool, device=d_Nw.device)
        state = self.state(d_Nw[None], everywhere)
        last = self.start[None]
        taken: list[list[int]] = [[]]
        gains: list[list[float]] = [[]]
        totals = torch.zeros(1, device=d_Nw.device)
        for _ in range(min(steps, len(d_Nw))):
            found, state = self._step_all(last, state, d_Nw)
            for row, chosen in enumerate(taken):
                found[row, chosen] = float("-inf")
            best = (totals[:, None] + found).flatten().topk(min(beams, int(found.isfinite().sum())))
            rows, columns = best.indices // len(d_Nw), best.indices % len(d_Nw)
            pairs = list(zip(rows.tolist(), columns.tolist(), strict=True))
            taken, gains = (
                [[*taken[row], column] for row, column in pairs],
                [[*gains[row], float(found[row, column])] for row, column in pairs],
            )
            totals, state, last = best.values, state.rows(rows), s_Ns[columns]
        after, _ = self._step_all(last[:1], state.rows(torch.zeros(1, dtype=torch.long, device=d_Nw.device)), d_Nw)
        return taken[0], gains[0], after[0]

    def _step_all(self, last: Tensor, state: PointerState, d_Nw: Tensor) -> tuple[Tensor, PointerState]:
        """A step of several beams on one document."""
        mask = torch.ones(len(last), len(d_Nw), dtype=torch.bool, device=d_Nw.device)
        return self.step(last, state, d_Nw.expand(len(last), -1, -1), mask)

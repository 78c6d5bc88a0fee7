"""Heads of sentence selectors: a classifier and a pointer.

Shape suffixes: B documents or beams, N sentences, K steps of the pointer, s size of sentence vectors, w width of the
document encoder, h hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.encoders import build_lstm


def _masked_mean(d_BNw: Tensor, mask_BN: Tensor) -> Tensor:
    """Return the mean vector (B, w) of each document's sentences."""
    weights = mask_BN[..., None].to(d_BNw.dtype)
    return (d_BNw * weights).sum(1) / weights.sum(1)


class ClassifierHead(nn.Module):
    """A classifier with a logit for each sentence: W_o [d_i; tanh(b_d + W_d mean(d))] + b_o.

    Args:
        config: config of the model.
    """

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.document_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(2 * config.width, 1)

    def forward(self, d_BNw: Tensor, mask_BN: Tensor) -> Tensor:
        """Compute the logits (B, N).

        Args:
            d_BNw: sentence vectors (B, N, w) from the document encoder.
            mask_BN: bool (B, N), True for sentences and False for padding, whose logits have no meaning. Each document
                has a sentence.
        """
        document_Bw = torch.tanh(self.document_proj(_masked_mean(d_BNw, mask_BN)))
        document_BNw = document_Bw[:, None].expand_as(d_BNw)
        return self.out_proj(torch.cat([d_BNw, document_BNw], dim=-1)).squeeze(-1)


class PointerState(NamedTuple):
    """The state of the pointer between two steps.

    Attributes:
        hidden: hidden states (layers, B, h) of the LSTM.
        cell: cell states (layers, B, h) of the LSTM.
        attended: last attention output h̃ (B, h).
    """

    hidden: Tensor
    cell: Tensor
    attended: Tensor

    def select(self, rows: Tensor | slice) -> PointerState:
        """Return the state of some documents or beams.

        Args:
            rows: their indices.
        """
        return PointerState(
            hidden=self.hidden[:, rows].contiguous(),
            cell=self.cell[:, rows].contiguous(),
            attended=self.attended[rows],
        )


class PointerHead(nn.Module):
    """An LSTM that selects one sentence after another.

    The input of a step is the vector s of the last sentence and h̃ of the last step:

        a_t = softmax over i of (W_a h_t) · d_i        c_t = Σ a_ti d_i        h̃_t = tanh(W_c [c_t; h_t])

    Args:
        config: config of the model.
        input_size: size of sentence vectors s.
    """

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.start = nn.Parameter(torch.zeros(input_size))
        self.lstm = build_lstm(config, input_size + hidden)
        self.state_proj = nn.Linear(config.width, hidden)
        self.query_proj = nn.Linear(hidden, config.width, bias=False)
        self.attention_proj = nn.Linear(config.width + hidden, hidden)

    def initial_state(self, d_BNw: Tensor, mask_BN: Tensor) -> PointerState:
        """Return the state before the first step, in which every layer is tanh(W mean(d) + b).

        Args:
            d_BNw: sentence vectors (B, N, w) from the document encoder.
            mask_BN: bool (B, N), True for sentences and False for padding.
        """
        first_Bh = torch.tanh(self.state_proj(_masked_mean(d_BNw, mask_BN)))
        hidden = first_Bh.expand(self.lstm.num_layers, -1, -1).contiguous()
        return PointerState(
            hidden=hidden,
            cell=torch.zeros_like(hidden),
            attended=torch.zeros_like(first_Bh),
        )

    def step(
        self,
        last_Bs: Tensor,
        state: PointerState,
        d_BNw: Tensor,
        mask_BN: Tensor,
    ) -> tuple[Tensor, PointerState]:
        """Compute the log-probabilities of the next sentence.

        Args:
            last_Bs: vectors (B, s) of the sentences of the step before.
            state: state after the step before.
            d_BNw: sentence vectors (B, N, w) from the document encoder.
            mask_BN: bool (B, N), True for sentences and False for padding.

        Returns:
            The log-probabilities (B, N), -inf at padding, and the state after the step.
        """
        inputs = torch.cat([last_Bs, state.attended], dim=-1)[:, None]
        h_B1h, (hidden, cell) = self.lstm(inputs, (state.hidden, state.cell))
        h_Bh = h_B1h[:, 0]
        scores_BN = torch.einsum("bw,bnw->bn", self.query_proj(h_Bh), d_BNw)
        scores_BN = scores_BN.masked_fill(~mask_BN, float("-inf"))
        c_Bw = torch.einsum("bn,bnw->bw", scores_BN.softmax(-1), d_BNw)
        attended_Bh = torch.tanh(self.attention_proj(torch.cat([c_Bw, h_Bh], dim=-1)))
        return scores_BN.log_softmax(-1), PointerState(hidden, cell, attended_Bh)

    def forward(
        self,
        s_BNs: Tensor,
        d_BNw: Tensor,
        mask_BN: Tensor,
        targets_BK: Tensor,
    ) -> Tensor:
        """Compute the log-probabilities (B, K, N) of each step, given the target sentences before it.

        Args:
            s_BNs: vectors (B, N, s) of the sentences alone.
            d_BNw: sentence vectors (B, N, w) from the document encoder.
            mask_BN: bool (B, N), True for sentences and False for padding.
            targets_BK: indices (B, K) of the target sentences, padded with −1.
        """
        state = self.initial_state(d_BNw, mask_BN)
        last_Bs = self.start.expand(len(s_BNs), -1)
        rows_B = torch.arange(len(s_BNs), device=s_BNs.device)
        steps = []
        for target_B in targets_BK.unbind(1):
            log_probs_BN, state = self.step(last_Bs, state, d_BNw, mask_BN)
            steps.append(log_probs_BN)
            last_Bs = s_BNs[rows_B, target_B.clamp(min=0)]
        return torch.stack(steps, dim=1)

    def search(
        self,
        s_Ns: Tensor,
        d_Nw: Tensor,
        steps: int,
        beam_size: int,
    ) -> tuple[dict[int, float], Tensor]:
        """Search the most likely sequence of distinct sentences of one document with beams.

        Args:
            s_Ns: vectors (N, s) of the sentences alone.
            d_Nw: sentence vectors (N, w) from the document encoder.
            steps: number of sentences to select; at most N are selected.
            beam_size: number of beams.

        Returns:
            The selected indices with their log-probabilities, in order; and the log-probabilities (N) of the step after
            them.
        """
        sentences = len(d_Nw)
        mask_1N = torch.ones(1, sentences, dtype=torch.bool, device=d_Nw.device)
        state = self.initial_state(d_Nw[None], mask_1N)
        last_Bs = self.start[None]
        beams: list[dict[int, float]] = [{}]
        totals_B = torch.zeros(1, device=d_Nw.device)
        for _ in range(min(steps, sentences)):
            step_BN, state = self._step_beams(last_Bs, state, d_Nw)
            for row, beam in enumerate(beams):
                step_BN[row, list(beam)] = float("-inf")
            candidates = int(step_BN.isfinite().sum())
            scores = totals_B[:, None] + step_BN
            best = scores.flatten().topk(min(beam_size, candidates))
            rows = best.indices // sentences
            columns = best.indices % sentences
            beams = _extend_beams(beams, rows.tolist(), columns.tolist(), step_BN)
            totals_B = best.values
            state = state.select(rows)
            last_Bs = s_Ns[columns]
        next_1N, _ = self._step_beams(last_Bs[:1], state.select(slice(1)), d_Nw)
        return beams[0], next_1N[0]

    def _step_beams(self, last_Bs: Tensor, state: PointerState, d_Nw: Tensor) -> tuple[Tensor, PointerState]:
        """Step several beams on one document."""
        beams = len(last_Bs)
        mask_BN = torch.ones(beams, len(d_Nw), dtype=torch.bool, device=d_Nw.device)
        return self.step(last_Bs, state, d_Nw.expand(beams, -1, -1), mask_BN)


def _extend_beams(
    beams: list[dict[int, float]],
    rows: list[int],
    columns: list[int],
    log_probs_BN: Tensor,
) -> list[dict[int, float]]:
    """Extend the beams of `rows` by the sentences of `columns`."""
    scores = log_probs_BN[rows, columns].tolist()
    extended = []
    for row, column, score in zip(rows, columns, scores, strict=True):
        extended.append({**beams[row], column: score})
    return extended

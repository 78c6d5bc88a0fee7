"""Sampling of the next token of each row, and the requested log-probabilities.

A row's token depends only on its own logits and its own random numbers.

Shape suffixes: B rows of the batch, R a selection of rows, V tokens of the vocabulary, K most likely tokens.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graftlm.serving.protocol import GenerationRequest, TokenOutput


class RowSampling:
    """The sampling state of one row: its request, its random numbers, and its tokens so far.

    Args:
        request: the options of the sampling.
        end_ids: tokens that end a text of the model.

    Attributes:
        ends: tokens that end this continuation.
        generator: random numbers of this row.
        counts: how often each token occurs in the continuation.
        matcher: the state of the grammar, if there is one.
    """

    def __init__(self, request: GenerationRequest, end_ids: Iterable[int] = ()) -> None:
        self.request = request
        self.ends = set(request.stop_tokens)
        if not request.ignore_eos:
            self.ends.update(request.turn_ends, end_ids)
        seed = request.seed
        if seed is None:
            seed = secrets.randbits(64)
        self.generator = random.Random(seed)
        self.counts: Counter[int] = Counter()
        self.matcher = None
        if request.grammar is not None:
            self.matcher = request.grammar.deep_copy()
        self._penalized_prompt: set[int] = set()
        if request.repetition_penalty != 1:
            self._penalized_prompt = set(request.prompt)

    def add(self, token: int) -> bool:
        """Count a sampled token, and advance the grammar by it.

        Returns:
            Whether the continuation is complete according to the grammar; False without a grammar.
        """
        self.counts[token] += 1
        if self.matcher is None:
            return False
        return self.matcher.consume_token(token) and self.matcher.is_stopped()

    @property
    def problem(self) -> str:
        """The error of the grammar; empty if there is none."""
        return "" if self.matcher is None else self.matcher.get_error()

    @property
    def changes_logits(self) -> bool:
        """Whether `change` has an effect."""
        request = self.request
        return (
            bool(request.logit_bias)
            or request.repetition_penalty != 1
            or request.presence_penalty != 0
            or request.frequency_penalty != 0
            or self.matcher is not None
        )

    def change(self, logits_V: Tensor) -> None:
        """Apply bias, penalties and grammar, in this order, to the logits (V,) in place."""
        request = self.request
        if request.logit_bias:
            _add_bias(logits_V, request.logit_bias)
        if request.repetition_penalty != 1:
            occurred = sorted(self._penalized_prompt | self.counts.keys())
            _penalize_repetition(logits_V, occurred, request.repetition_penalty)
        if request.presence_penalty or request.frequency_penalty:
            _add_bias(logits_V, self._occurrence_penalties())
        if self.matcher is not None:
            _mask_disallowed(logits_V, self.matcher.compute_logit_bias())

    def _occurrence_penalties(self) -> list[tuple[int, float]]:
        """Return the presence and frequency penalties of the tokens of the continuation, as addends of the logits."""
        penalties = []
        for token, count in self.counts.items():
            penalty = self.request.presence_penalty + count * self.request.frequency_penalty
            penalties.append((token, -penalty))
        return penalties


def _add_bias(logits_V: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    if not bias:
        return
    tokens = torch.tensor([token for token, _ in bias], device=logits_V.device)
    values = torch.tensor([value for _, value in bias], device=logits_V.device)
    logits_V.index_add_(0, tokens, values)


def _penalize_repetition(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> None:
    if not tokens:
        return
    indices = torch.tensor(tokens, device=logits_V.device)
    logits = logits_V[indices]
    logits_V[indices] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _mask_disallowed(logits_V: Tensor, allowed: bytes) -> None:
    """Exclude the tokens whose byte is zero, and those beyond the end of `allowed`."""
    bytes_V = torch.frombuffer(bytearray(allowed), dtype=torch.uint8)
    disallowed_V = bytes_V.to(logits_V.device) == 0
    known = len(disallowed_V)
    logits_V[:known].masked_fill_(disallowed_V[: len(logits_V)], -torch.inf)
    logits_V[known:] = -torch.inf


def sample(logits_BV: Tensor, rows: Sequence[RowSampling]) -> list[TokenOutput | None]:
    """Sample the next token of each row.

    Args:
        logits_BV: (B, V) the logits of the model, of any floating-point type; they are not changed.
        rows: the state of each row. Rows with a temperature above 0 draw one random number.

    Returns:
        The token of each row, whose text is still empty; None for a row with NaN or infinite logits, or whose grammar
        has an error. `RowSampling.add` is not called.
    """
    logits_BV = logits_BV.float()
    finite = logits_BV.amax(-1).isfinite().tolist()
    changed_BV = _changed(logits_BV, rows)
    tokens = changed_BV.argmax(-1).tolist()
    random_indices = [index for index, row in enumerate(rows) if row.request.temperature > 0]
    if random_indices:
        random_rows = [rows[index] for index in random_indices]
        drawn = _draw(changed_BV[random_indices], random_rows)
        for index, token in zip(random_indices, drawn, strict=True):
            tokens[index] = token
    with_logprobs = _with_logprobs(logits_BV, [row.request for row in rows], tokens)
    outputs: list[TokenOutput | None] = []
    for index, row in enumerate(rows):
        if not finite[index] or row.problem:
            outputs.append(None)
        elif index in with_logprobs:
            outputs.append(with_logprobs[index])
        else:
            outputs.append(TokenOutput(tokens[index], ""))
    return outputs


def _changed(logits_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Return the logits after the options of the requests; the given tensor if nothing changes."""
    changed = [index for index, row in enumerate(rows) if row.changes_logits]
    if not changed:
        return logits_BV
    logits_BV = logits_BV.clone()
    for index in changed:
        rows[index].change(logits_BV[index])
    return logits_BV


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """Return float64 values as (R, 1)."""
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _draw(logits_RV: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Sample one token per row: the first whose cumulative probability exceeds a random number in [0, 1)."""
    device = logits_RV.device
    temperature_R1 = _column([row.request.temperature for row in rows], device)
    p_RV = (logits_RV.double() / temperature_R1).softmax(-1)
    truncated = []
    requests = []
    for index, row in enumerate(rows):
        request = row.request
        if request.top_p < 1 or request.top_k:
            truncated.append(index)
            requests.append(request)
    if truncated:
        p_RV[truncated] = _truncated(p_RV[truncated], requests)
    cumulative_RV = p_RV.cumsum(-1)
    u_R1 = _column([row.generator.random() for row in rows], device)
    threshold_R1 = u_R1 * cumulative_RV[:, -1:]
    token_R = torch.searchsorted(cumulative_RV, threshold_R1, right=True)[:, 0]
    # Rounding may put the threshold after the last token with a positive probability.
    is_possible = p_RV > 0
    impossible_at_end_R = is_possible.flip(-1).int().argmax(-1)
    last_R = logits_RV.shape[-1] - 1 - impossible_at_end_R
    return torch.minimum(token_R, last_R).tolist()


def _truncated(p_RV: Tensor, requests: Sequence[GenerationRequest]) -> Tensor:
    """Set the probabilities of tokens outside of top_k, then top_p, to 0."""
    vocabulary = p_RV.shape[-1]
    device = p_RV.device
    top_k_R1 = _column([request.top_k or vocabulary for request in requests], device)
    top_p_R1 = _column([request.top_p for request in requests], device)
    sorted_RV, order_RV = p_RV.sort(descending=True, stable=True)
    kept_RV = torch.arange(vocabulary, device=device) < top_k_R1
    sorted_RV = sorted_RV * kept_RV
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    inside_RV = before_RV < top_p_R1 * sorted_RV.sum(-1, keepdim=True)
    inside_RV[:, 0] = True
    return torch.zeros_like(p_RV).scatter(-1, order_RV, sorted_RV * inside_RV)


def _with_logprobs(
    logits_BV: Tensor,
    requests: Sequence[GenerationRequest],
    tokens: Sequence[int],
) -> dict[int, TokenOutput]:
    """Return the tokens of the rows whose requests ask for log-probabilities, by row."""
    counts = {row: request.logprobs for row, request in enumerate(requests) if request.logprobs is not None}
    if not counts:
        return {}
    logprobs_RV = logits_BV[list(counts)].log_softmax(-1)
    most = min(max(counts.values()), logprobs_RV.shape[-1])
    values_RK, ids_RK = logprobs_RV.topk(most)
    outputs = {}
    for index, (row, count) in enumerate(counts.items()):
        ids = ids_RK[index, :count].tolist()
        values = values_RK[index, :count].tolist()
        outputs[row] = TokenOutput(
            token=tokens[row],
            text="",
            logprob=float(logprobs_RV[index, tokens[row]]),
            top=tuple(zip(ids, values, strict=True)),
        )
    return outputs

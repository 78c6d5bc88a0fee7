"""Sampling of the next token of each row, and the log-probabilities that were requested.

A row's token depends on its own logits and its own random numbers only. Shape suffixes: B rows, R some of them, V
tokens of the vocabulary, K most likely tokens.
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
    """What the sampling of one row depends on beside its logits: the request, random numbers, and its tokens so far.

    `end_ids` are the tokens that end any text of the model; `ends` those that end this one.
    """

    def __init__(self, request: GenerationRequest, end_ids: Iterable[int] = ()) -> None:
        self.request = request
        self.barred = {*request.stop_tokens, *end_ids}  # while the answer is too short
        self.ends = {*request.stop_tokens} if request.ignore_eos else self.barred
        self.generator = random.Random(secrets.randbits(64) if request.seed is None else request.seed)
        self.counts: Counter[int] = Counter()  # of the answer's tokens
        self.matcher = None if request.grammar is None else request.grammar.deep_copy()
        self.read = set(request.prompt) if request.repetition_penalty != 1 else set()

    def add(self, token: int) -> bool:
        """Count a sampled token; whether the grammar lets nothing follow it."""
        self.counts[token] += 1
        return self.matcher is not None and self.matcher.consume_token(token) and self.matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Why the grammar lets the answer not go on; empty if nothing is wrong."""
        return "" if self.matcher is None else self.matcher.get_error()

    @property
    def is_too_short(self) -> bool:
        """Whether nothing may end the answer yet."""
        return self.request.min_tokens > 0 and self.counts.total() < self.request.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether any option but those of the draw changes the logits."""
        request = self.request
        penalties = request.presence_penalty or request.frequency_penalty or request.repetition_penalty != 1
        return bool(request.logit_bias or self.matcher is not None or penalties or self.is_too_short)


def sample(logits_BV: Tensor, rows: Sequence[RowSampling]) -> list[TokenOutput | None]:
    """Each row's next token, as `sample_row` of the reference has it, without a text; None where none can follow."""
    logits_BV = logits_BV.float()
    finite = logits_BV.amax(-1).isfinite()
    changed_BV = _changed(logits_BV, rows)
    likeliest_B = changed_BV.argmax(-1)
    tokens = likeliest_B.tolist()
    random_rows = [index for index, row in enumerate(rows) if row.request.temperature > 0]
    if random_rows:
        drawn = _draw(changed_BV[random_rows], [rows[row] for row in random_rows])
        for row, token in zip(random_rows, drawn, strict=True):
            tokens[row] = token
    with_logprobs = _with_logprobs(logits_BV, [row.request for row in rows], tokens)
    usable = [number and not row.problem for number, row in zip(finite.tolist(), rows, strict=True)]
    return [with_logprobs.get(row, TokenOutput(token, "")) if usable[row] else None for row, token in enumerate(tokens)]


def _changed(logits_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """The logits after biases, penalties and grammars, in this order; the given ones if there are none."""
    changed = [index for index, row in enumerate(rows) if row.changes_logits]
    if not changed:
        return logits_BV
    logits_BV = logits_BV.clone()
    for row in changed:
        _change(logits_BV[row], rows[row])
    return logits_BV


def _change(logits_V: Tensor, row: RowSampling) -> None:
    """Change one row's logits in place."""
    request, device = row.request, logits_V.device
    if request.logit_bias:
        tokens, biases = zip(*request.logit_bias, strict=True)
        logits_V.index_add_(0, torch.tensor(tokens, device=device), torch.tensor(biases, device=device))
    if request.repetition_penalty != 1 and (known := sorted(row.read | row.counts.keys())):
        at, by = torch.tensor(known, device=device), request.repetition_penalty
        logits_V[at] = torch.where(logits_V[at] > 0, logits_V[at] / by, logits_V[at] * by)
    if (request.presence_penalty or request.frequency_penalty) and row.counts:
        tokens, counts = zip(*row.counts.items(), strict=True)
        penalties = [request.presence_penalty + count * request.frequency_penalty for count in counts]
        logits_V.index_add_(0, torch.tensor(tokens, device=device), -torch.tensor(penalties, device=device))
    if row.is_too_short and row.barred:
        logits_V[torch.tensor([*row.barred], device=device)] = -torch.inf
    if row.matcher is not None:
        allowed = torch.frombuffer(bytearray(row.matcher.compute_logit_bias()), dtype=torch.uint8).to(device) > 0
        logits_V[: len(allowed)].masked_fill_(~allowed[: len(logits_V)], -torch.inf)
        logits_V[len(allowed) :] = -torch.inf


def _draw(logits_RV: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """One random token a row: the first at which the cumulative probability exceeds a number u in [0, 1)."""
    device = logits_RV.device
    temperature_R = torch.tensor([row.request.temperature for row in rows], dtype=torch.float64, device=device)
    p_RV = (logits_RV.double() / temperature_R[:, None]).softmax(-1)
    requests = [row.request for row in rows]
    cut = [index for index, request in enumerate(requests) if request.top_p < 1 or request.top_k or request.min_p]
    if cut:
        p_RV[cut] = _likely_enough(p_RV[cut], [requests[index] for index in cut])
    cumulative_RV = p_RV.cumsum(-1)
    u_R = torch.tensor([row.generator.random() for row in rows], dtype=torch.float64, device=device)
    token_R = torch.searchsorted(cumulative_RV, (u_R * cumulative_RV[:, -1])[:, None], right=True)[:, 0]
    last_R = logits_RV.shape[-1] - 1 - (p_RV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token_R, last_R).tolist()


def _likely_enough(p_RV: Tensor, requests: Sequence[GenerationRequest]) -> Tensor:
    """The probabilities with those of tokens outside of min_p, then top_k, then top_p, set to 0."""
    vocabulary, device = p_RV.shape[-1], p_RV.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    sorted_RV, order_RV = p_RV.sort(descending=True, stable=True)
    top_k_R1 = column([request.top_k or vocabulary for request in requests])
    kept_RV = sorted_RV >= column([request.min_p for request in requests]) * sorted_RV[:, :1]
    kept_RV &= torch.arange(vocabulary, device=device) < top_k_R1
    sorted_RV = sorted_RV * kept_RV
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    inside_RV = before_RV < column([request.top_p for request in requests]) * sorted_RV.sum(-1, keepdim=True)
    inside_RV[:, 0] = True
    return torch.zeros_like(p_RV).scatter(-1, order_RV, sorted_RV * inside_RV)


def _with_logprobs(
    logits_BV: Tensor, requests: Sequence[GenerationRequest], tokens: Sequence[int]
) -> dict[int, TokenOutput]:
    """The tokens of the rows whose requests ask for log-probabilities, by row."""
    counts = {row: request.logprobs for row, request in enumerate(requests) if request.logprobs is not None}
    if not counts:
        return {}
    logprobs_RV = logits_BV[list(counts)].log_softmax(-1)
    values_RK, ids_RK = logprobs_RV.topk(min(max(counts.values()), logprobs_RV.shape[-1]))
    sampled = {}
    for index, (row, count) in enumerate(counts.items()):
        top = zip(ids_RK[index, :count].tolist(), values_RK[index, :count].tolist(), strict=True)
        sampled[row] = TokenOutput(tokens[row], "", float(logprobs_RV[index, tokens[row]]), tuple(top))
    return sampled

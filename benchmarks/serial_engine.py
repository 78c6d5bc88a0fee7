"""The reference engine: one request at a time, by a plain loop of forward passes.

Tests compare `BatchingEngine` with it, and the benchmark takes it as "one request at a time".
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import Backbone
from graftlm.grafted.graft_set import trace_values
from graftlm.grafted.model import GraftedModel
from graftlm.serving.engine import ScheduledRequest, ThreadedEngine
from graftlm.serving.protocol import EngineFinishReason, Finish, GenerationRequest, TokenOutput
from graftlm.serving.sampling import RowSampling


class SerialEngine(ThreadedEngine):
    """An `Engine` of `protocol.py` without batches; arguments as those of `ThreadedEngine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread.start()

    def _step(self) -> None:
        self._drop_waiting()
        for request in self._admit(1):
            model = GraftedModel(self._backbone, dict(request.graft_set.grafts)).eval()
            try:
                self._finish(request, self._generate(model, request))
            finally:
                model.detach()

    def _generate(self, model: GraftedModel, scheduled: ScheduledRequest) -> Finish:
        """Put the tokens of a request into its stream; returns the end."""
        request, index, tokens, shown = scheduled.request, scheduled.index, [], ""
        reason: EngineFinishReason = "length"
        for sampled, trace in self._sampled_tokens(scheduled, model):
            if overdue := "cancelled" if self._stopping else scheduled.overdue:
                reason = overdue
                break
            own_end = not request.ignore_eos and sampled.token in self._end_ids
            if own_end or sampled.token in request.stop_tokens:
                reason = "stop"
                break
            tokens.append(sampled.token)
            complete = scheduled.sampling.add(sampled.token)
            text = full_text(self._backbone, request.prompt, tokens)
            stops = request.stop if len(tokens) > request.min_tokens else ()
            free = full_text(self._backbone, request.prompt, tokens[: request.min_tokens]).rstrip("\ufffd")
            stopped = text_before_stop(text[len(free) :].rstrip("\ufffd"), stops)
            final = free + (stopped if stopped is not None else final_text(text[len(free) :], stops))
            new = final[len(shown) :]
            self._put(scheduled, TokenOutput(sampled.token, new, sampled.logprob, sampled.top, trace, index))
            self._wake_readers()
            shown = final if len(final) > len(shown) else shown
            if stopped is not None:
                return Finish("stop", len(request.prompt), len(tokens), index=index)
            if complete:
                reason = "stop"
                break
            if len(tokens) == request.max_tokens:
                break
        text = full_text(self._backbone, request.prompt, tokens)
        return Finish(reason, len(request.prompt), len(tokens), text[len(shown) :], index)

    @torch.inference_mode()
    def _sampled_tokens(
        self, scheduled: ScheduledRequest, model: GraftedModel
    ) -> Iterator[tuple[TokenOutput, dict[str, float]]]:
        """Each token with its trace, without end."""
        request = scheduled.request
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([request.prompt], device=model.device)
        while True:
            output, traces = model.forward_traces(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits = output.logits[0, -1].float()
            token = sample_row(
                changed(logits, scheduled.sampling, self._end_ids), request, scheduled.sampling.generator
            )
            sampled = TokenOutput(token, "")
            if request.logprobs is not None:
                logprobs = logits.log_softmax(-1)
                sampled = TokenOutput(token, "", float(logprobs[token]), most_likely(logprobs, request.logprobs))
            yield sampled, trace_values(traces, 0) if request.trace else {}
            ids = torch.tensor([[token]], device=model.device)


def changed(logits_V: Tensor, row: RowSampling, end_ids: Iterable[int]) -> Tensor:
    """The logits after biases, penalties, the shortest length and the grammar, token by token."""
    request, logits = row.request, logits_V.clone()
    for token, bias in request.logit_bias:
        logits[token] += bias
    for token in {*request.prompt, *row.counts}:
        factor = request.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in row.counts.items():
        logits[token] -= request.presence_penalty + count * request.frequency_penalty
    if sum(row.counts.values()) < request.min_tokens:
        for token in {*request.stop_tokens, *end_ids}:
            logits[token] = -torch.inf
    if row.matcher is not None:
        allowed = row.matcher.compute_logit_bias()
        for token in range(len(logits)):
            if token >= len(allowed) or not allowed[token]:
                logits[token] = -torch.inf
    return logits


def sample_row(logits_V: Tensor, request: GenerationRequest, generator: random.Random) -> int:
    """The most likely token, or with a temperature a random token.

    A random number u in [0, 1) selects the first token at which the cumulative probability, in the vocabulary's order,
    exceeds u times the total. Some tokens have the probability 0: those below min_p times the highest; of the others
    all but the top_k most likely; and of these those outside of top_p. The most likely tokens are inside until they
    reach top_p of what is left.
    """
    if request.temperature == 0:
        return int(logits_V.argmax())
    p = (logits_V.double() / request.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = [token for token in order if p[token] >= request.min_p * p[order[0]]][: request.top_k or None]
    kept, before, total = set(), 0.0, sum(p[token] for token in order)
    for token in order:
        if not kept or before < request.top_p * total:
            kept.add(token)
        before += p[token]
    cumulative_V = torch.tensor([value if token in kept else 0.0 for token, value in enumerate(p)]).double().cumsum(-1)
    token = torch.searchsorted(cumulative_V, generator.random() * cumulative_V[-1], right=True)
    return int(token.clamp(max=max(token for token in kept if p[token] > 0)))


def most_likely(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The tokens of the highest log p, with their log p."""
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def full_text(backbone: Backbone, prompt: tuple[int, ...], tokens: list[int]) -> str:
    """The text of the tokens after the prompt; an incomplete character is U+FFFD."""
    decode = backbone.need_tokenizer().decode
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, both = (str(decode(list(ids), **options)) for ids in (prompt, (*prompt, *tokens)))
    # The prompt may end within a character, so that the two texts differ before the prompt's end.
    common = next((n for n, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), len(before))
    return both[common:]


def text_before_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string; None if there is no stop string."""
    starts = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else None


def final_text(text: str, stops: tuple[str, ...]) -> str:
    """The text without an incomplete character at its end, and without what may begin a stop string."""
    text = text.rstrip("\ufffd")
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]

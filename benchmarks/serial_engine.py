"""The reference engine: one request at a time, with a plain loop of forward passes.

Tests compare `BatchingEngine` with it, and the benchmark measures it as "one request at a time".
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafted.traces import trace_values
from graftlm.grafts import Graft
from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.protocol import EngineFinishReason, EngineLimits, Finish, GenerationRequest, TokenOutput
from graftlm.serving.sampling import RowSampling
from graftlm.serving.scheduler import ScheduledRequest


class SerialEngine(ThreadedEngine):
    """An `Engine` without batches.

    Args:
        backbone: a causal language model with a tokenizer and without attached grafts.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; by default its own name.
        limits: the limits of the engine.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        super().__init__(backbone, grafts, name, limits)
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
        """Put the tokens of a request into its stream, and return its end."""
        request = scheduled.request
        tokens: list[int] = []
        shown = ""
        reason: EngineFinishReason | None = None
        for sampled, trace in self._sampled_tokens(scheduled, model):
            reason = self._reason_before(sampled.token, scheduled)
            if reason is not None:
                break
            tokens.append(sampled.token)
            grammar_ended = scheduled.sampling.add(sampled.token)
            final, stopped = self._final_text(request, tokens)
            output = TokenOutput(
                token=sampled.token,
                text=final[len(shown) :],
                logprob=sampled.logprob,
                top=sampled.top,
                trace=trace,
                index=scheduled.index,
            )
            self._put(scheduled, output)
            self._wake_readers()
            if len(final) > len(shown):
                shown = final
            if stopped:
                return self._end(scheduled, "stop", tokens, text="")
            if grammar_ended:
                reason = "stop"
                break
            if len(tokens) == request.max_tokens:
                reason = "length"
                break
        assert reason is not None, "tokens are sampled without end"
        text = full_text(self._backbone, request.prompt, tokens)
        return self._end(scheduled, reason, tokens, text[len(shown) :])

    def _reason_before(self, token: int, scheduled: ScheduledRequest) -> EngineFinishReason | None:
        """Return the reason to end a request before a token, if there is one."""
        request = scheduled.request
        if self._stopping:
            return "cancelled"
        if scheduled.reason_to_end is not None:
            return scheduled.reason_to_end
        is_model_end = token in self._end_ids and not request.ignore_eos
        if is_model_end or token in request.stop_tokens:
            return "stop"
        return None

    def _final_text(self, request: GenerationRequest, tokens: list[int]) -> tuple[str, bool]:
        """Return the text that is final after these tokens, and whether a stop string ends it."""
        text = full_text(self._backbone, request.prompt, tokens)
        before_stop = text_before_stop(text.rstrip("\ufffd"), request.stop)
        if before_stop is not None:
            return before_stop, True
        return final_text(text, request.stop), False

    @staticmethod
    def _end(scheduled: ScheduledRequest, reason: EngineFinishReason, tokens: list[int], text: str) -> Finish:
        return Finish(
            reason=reason,
            prompt_tokens=len(scheduled.request.prompt),
            completion_tokens=len(tokens),
            text=text,
            index=scheduled.index,
        )

    @torch.inference_mode()
    def _sampled_tokens(
        self,
        scheduled: ScheduledRequest,
        model: GraftedModel,
    ) -> Iterator[tuple[TokenOutput, dict[str, float]]]:
        """Yield tokens with their traces, without end."""
        request = scheduled.request
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([request.prompt], device=model.device)
        while True:
            output, traces = model.forward_traces(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[0, -1].float()
            changed_logits = changed(logits, scheduled.sampling)
            token = sample_row(changed_logits, request, scheduled.sampling.generator)
            sampled = TokenOutput(token, "")
            if request.logprobs is not None:
                logprobs = logits.log_softmax(-1)
                top = most_likely(logprobs, request.logprobs)
                sampled = TokenOutput(token, "", float(logprobs[token]), top)
            yield sampled, trace_values(traces, 0) if request.trace else {}
            ids = torch.tensor([[token]], device=model.device)


def changed(logits_V: Tensor, row: RowSampling) -> Tensor:
    """Return the logits after bias, penalties and grammar, token by token."""
    request = row.request
    logits = logits_V.clone()
    for token, bias in request.logit_bias:
        logits[token] += bias
    for token in {*request.prompt, *row.counts}:
        if logits[token] > 0:
            logits[token] /= request.repetition_penalty
        else:
            logits[token] *= request.repetition_penalty
    for token, count in row.counts.items():
        logits[token] -= request.presence_penalty + count * request.frequency_penalty
    if row.matcher is not None:
        allowed = row.matcher.compute_logit_bias()
        for token in range(len(logits)):
            if token >= len(allowed) or not allowed[token]:
                logits[token] = -torch.inf
    return logits


def sample_row(logits_V: Tensor, request: GenerationRequest, generator: random.Random) -> int:
    """Return the most likely token, or with a temperature a random token.

    A random number u in [0, 1) selects the first token at which the cumulative probability, in the vocabulary's order,
    exceeds u times the total. The probability of excluded tokens is 0.
    """
    if request.temperature == 0:
        return int(logits_V.argmax())
    p = (logits_V.double() / request.temperature).softmax(-1).tolist()
    kept = kept_tokens(p, request)
    kept_p = [value if token in kept else 0.0 for token, value in enumerate(p)]
    cumulative_V = torch.tensor(kept_p).double().cumsum(-1)
    token = torch.searchsorted(cumulative_V, generator.random() * cumulative_V[-1], right=True)
    last = max(token for token in kept if p[token] > 0)
    return min(int(token), last)


def kept_tokens(p: Sequence[float], request: GenerationRequest) -> set[int]:
    """Return the tokens that top_k, then top_p keep.

    top_k keeps the most likely tokens. Of these, the most likely ones are kept until they reach top_p of their total
    probability.
    """
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if request.top_k:
        order = order[: request.top_k]
    total = sum(p[token] for token in order)
    kept: set[int] = set()
    before = 0.0
    for token in order:
        if not kept or before < request.top_p * total:
            kept.add(token)
        before += p[token]
    return kept


def most_likely(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the tokens with the highest log p, with their log p."""
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def full_text(backbone: Backbone, prompt: tuple[int, ...], tokens: list[int]) -> str:
    """Return the text of the tokens after the prompt; an incomplete character is U+FFFD."""
    before = _decode(backbone, prompt)
    both = _decode(backbone, (*prompt, *tokens))
    # The prompt may end within a character, so that the two texts differ before the prompt's end.
    for position, (letter, other) in enumerate(zip(before, both, strict=False)):
        if letter != other:
            return both[position:]
    return both[len(before) :]


def _decode(backbone: Backbone, ids: Sequence[int]) -> str:
    text = backbone.need_tokenizer().decode(
        list(ids),
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return str(text)


def text_before_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the text before the first stop string; None if there is no stop string."""
    starts = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else None


def final_text(text: str, stops: tuple[str, ...]) -> str:
    """Return the text without an incomplete character, and without a possible beginning of a stop string."""
    text = text.rstrip("\ufffd")
    held = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                held = max(held, length)
    return text[: len(text) - held]

"""Accepted requests, the queue in which they wait, and the selection of prompts that are read in one pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from graftlm.backbone.detokenizer import IncrementalDetokenizer
from graftlm.backbone.prefix_blocks import BLOCK_TOKENS
from graftlm.grafted.graft_set import GraftSet
from graftlm.serving.protocol import EngineFinishReason, Finish, RequestStream, TokenOutput
from graftlm.serving.sampling import RowSampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PADDING_TOKENS = 64  # padding of a pass, which costs about as much as another pass on a CPU


class ScheduledRequest:
    """The state of an accepted request, from its arrival to its end.

    Args:
        sampling: the sampling state of the request.
        graft_set: the grafts of the request.
        stream: receives the outputs.
        index: index of the request in its stream.
        seconds: maximum duration of the request from now on.

    Attributes:
        answer: the generated tokens.
        cached_tokens: number of prompt tokens that were taken from the prefix cache.
    """

    def __init__(
        self,
        sampling: RowSampling,
        graft_set: GraftSet,
        stream: RequestStream,
        index: int,
        seconds: float,
    ) -> None:
        self.request = sampling.request
        self.sampling = sampling
        self.graft_set = graft_set
        self.stream = stream
        self.index = index
        self.answer: list[int] = []
        self.cached_tokens = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._deadline = time.monotonic() + seconds

    @property
    def reason_to_end(self) -> Literal["time", "cancelled"] | None:
        """The reason to end the request before its next token; None if it may continue."""
        if self.stream.cancelled:
            return "cancelled"
        if time.monotonic() > self._deadline:
            return "time"
        return None

    def add(
        self,
        sampled: TokenOutput,
        trace: dict[str, float],
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[TokenOutput, Finish | None]:
        """Add a sampled token to the answer.

        Args:
            sampled: the token, without its text.
            trace: activity of the grafts at this token by label.
            tokenizer: the model's tokenizer.

        Returns:
            The output of the token, and the end of the request at a stop string, at the end of the grammar or at the
            maximum length.
        """
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, self.request.prompt, self.request.stop)
        text, stopped = self._detokenizer.add(sampled.token)
        grammar_ended = self.sampling.add(sampled.token)
        self.answer.append(sampled.token)
        output = replace(sampled, text=text, trace=trace, index=self.index)
        if stopped:
            return output, replace(self.finish("stop"), text="")
        if grammar_ended:
            return output, self.finish("stop")
        if len(self.answer) == self.request.max_tokens:
            return output, self.finish("length")
        return output, None

    def finish(self, reason: EngineFinishReason) -> Finish:
        """Return the end of the request, with the text that was held back. The state is not changed."""
        remaining_text = "" if self._detokenizer is None else self._detokenizer.rest()
        return Finish(
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.answer),
            text=remaining_text,
            index=self.index,
            cached_tokens=self.cached_tokens,
        )


class RequestQueue:
    """Waiting requests, taken from the users in turn. Not thread-safe."""

    def __init__(self) -> None:
        self._by_user: dict[str, deque[ScheduledRequest]] = {}

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._by_user.values())

    def add(self, request: ScheduledRequest) -> None:
        """Append a request to the queue of its user."""
        self._by_user.setdefault(request.request.user, deque()).append(request)

    def take(self, count: int, tokens: int) -> list[ScheduledRequest]:
        """Remove and return requests, taking the users in turn.

        Args:
            count: maximum number of requests.
            tokens: maximum number of prompt tokens of all requests. The first request is taken even if it has more,
                and then it is the only one.
        """
        taken: list[ScheduledRequest] = []
        while self._by_user and len(taken) < count:
            user = next(iter(self._by_user))
            requests = self._by_user[user]
            tokens -= len(requests[0].request.prompt)
            if taken and tokens < 0:
                break
            taken.append(requests.popleft())
            del self._by_user[user]
            if requests:
                self._by_user[user] = requests  # the user's next turn comes after those of the other users
        return taken

    def drop(self, condition: Callable[[ScheduledRequest], object]) -> list[ScheduledRequest]:
        """Remove and return the requests for which the condition is true, by user and then by arrival."""
        dropped: list[ScheduledRequest] = []
        remaining: dict[str, deque[ScheduledRequest]] = {}
        for user, requests in self._by_user.items():
            for request in requests:
                if condition(request):
                    dropped.append(request)
                else:
                    remaining.setdefault(user, deque()).append(request)
        self._by_user = remaining
        return dropped


class PromptPass(NamedTuple):
    """The prompts that are read in the next pass.

    Attributes:
        rows: indices of the prompts; rows with the same owner are adjacent.
        new_tokens: number of trailing tokens to read of each prompt; 0 reads whole prompts.
    """

    rows: list[int]
    new_tokens: int


def next_pass(
    prompts: Sequence[Sequence[int]],
    known: Sequence[int | None],
    owners: Sequence[object],
    *,
    part_tokens: int,
    share_prefixes: bool,
) -> PromptPass:
    """Select the prompts that are read in the next pass.

    Prompts with the same owner and known first tokens share a pass, in which each row reads as many tokens as the row
    with the most new ones. Unknown prompts share a pass if their padding costs less than another pass. A prompt with
    more than `part_tokens` new tokens is read alone, after all others.

    Args:
        prompts: token ids.
        known: number of first tokens of each prompt in the prefix cache; None for a prompt that can't be read in parts.
        owners: the graft set of each prompt.
        part_tokens: maximum number of tokens of a long prompt that are read in one pass.
        share_prefixes: postpone a prompt with the same owner and first block as another one, whose keys and values it
            can use afterwards.

    Returns:
        At least one prompt. There must be at least one in `prompts`.
    """
    new = [len(prompt) - (count or 0) for prompt, count in zip(prompts, known, strict=True)]
    short = [row for row in range(len(prompts)) if known[row] is None or new[row] <= part_tokens]
    if not short:
        return PromptPass([0], new[0])
    started = [row for row in short if known[row]]
    if started:
        owner = owners[started[0]]
        started = [row for row in started if owners[row] == owner]
        most_new = max(new[row] for row in started)
        return PromptPass([row for row in started if len(prompts[row]) > most_new], most_new)
    rows: list[int] = []
    first_blocks: set[object] = set()
    padding = 0
    for row in sorted(short, key=lambda row: -new[row]):
        if rows:
            padding += new[rows[0]] - new[row]
        first_block: object = row
        if share_prefixes and known[row] is not None and new[row] > BLOCK_TOKENS:
            first_block = (owners[row], tuple(prompts[row][:BLOCK_TOKENS]))
        if first_block not in first_blocks and padding <= _PADDING_TOKENS:
            first_blocks.add(first_block)
            rows.append(row)
    return PromptPass(sorted(rows, key=lambda row: (owners.index(owners[row]), row)), 0)

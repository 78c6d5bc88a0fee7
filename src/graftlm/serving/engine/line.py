"""Requests that wait: of a bounded number, and taken from those who ask in turn."""

from __future__ import annotations

import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from transformers import PreTrainedTokenizerBase

from graftlm.grafts.mixed import Team
from graftlm.serving.engine.choice import Choice
from graftlm.serving.engine.tickets import LiveTicket
from graftlm.serving.engine.words import Words
from graftlm.serving.protocol import Ask, End, Piece


class Request:
    """A request that was taken on, from its arrival to its end.

    Args:
        ask: what is asked.
        team: the grafts that answer.
        tokenizer: the backbone's.
        ends: token ids that end a text.
        seconds: that it may take, from now.
    """

    def __init__(
        self, ask: Ask, team: Team, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], seconds: float
    ) -> None:
        self.ask, self.team = ask, team
        self.ticket = LiveTicket()
        self.draw = random.Random(secrets.randbits(64) if ask.seed is None else ask.seed)
        self._tokenizer, self._ends = tokenizer, ends
        self._words: Words | None = None
        self._deadline = time.monotonic() + seconds
        self._count = 0
        self.newest = -1

    @property
    def overdue(self) -> Literal["time", "cancelled"] | None:
        """Why it is to end at once, if it is."""
        if self.ticket.cancelled:
            return "cancelled"
        return "time" if time.monotonic() > self._deadline else None

    def take(self, choice: Choice, trace: dict[str, float]) -> tuple[Piece | None, End | None]:
        """The piece that a chosen token makes, and the end, if it is reached."""
        if choice.token in self._ends:
            return None, self.end("stop")
        text, stopped = self._text.add(choice.token)
        self._count += 1
        self.newest = choice.token
        piece = Piece(choice.token, text, choice.logprob, choice.top, trace)
        if stopped:
            return piece, End("stop", len(self.ask.prompt), self._count)
        return piece, self.end("length") if self._count == self.ask.max_tokens else None

    def end(self, reason: Literal["stop", "length", "time", "cancelled"]) -> End:
        """Its end, with the text that was held back."""
        rest = self._words.rest() if self._words is not None else ""
        return End(reason, len(self.ask.prompt), self._count, rest)

    @property
    def _text(self) -> Words:
        if self._words is None:
            self._words = Words(self._tokenizer, self.ask.prompt, self.ask.stop)
        return self._words


class Line:
    """Requests in the order of their users' turns; not for several threads at a time."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, deque[Request]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._users.values())

    def add(self, request: Request) -> None:
        """Put a request behind the others of its user."""
        self._users.setdefault(request.ask.user, deque()).append(request)

    def take(self, count: int, tokens: int) -> list[Request]:
        """Up to so many requests, one of each user in turn, while their prompts have so many tokens; one at least."""
        found: list[Request] = []
        while self._users and len(found) < count:
            user, requests = next(iter(self._users.items()))
            tokens -= len(requests[0].ask.prompt)
            if found and tokens < 0:
                break
            found.append(requests.popleft())
            del self._users[user]
            if requests:
                self._users[user] = requests  # behind the other users
        return found

    def drop(self, why: Callable[[Request], object]) -> list[Request]:
        """Take out the requests for which there is a reason."""
        dropped = [request for requests in self._users.values() for request in requests if why(request)]
        gone = set(dropped)
        kept = {user: deque(one for one in requests if one not in gone) for user, requests in self._users.items()}
        self._users = OrderedDict((user, requests) for user, requests in kept.items() if requests)
        return dropped

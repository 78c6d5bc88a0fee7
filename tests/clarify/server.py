"""A server that misbehaves on demand, and translators whose behaviour is known."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments.clarify.server import Handler, choice
from graftlm.pipelines.clarify import Conversation
from graftlm.pipelines.clarify.prompts import Prompt
from graftlm.pipelines.clarify.roles import Reply
from graftlm.pipelines.clarify.turns import Cost

FRENCH = {
    "a friend or relative": "Es-tu sûre ?",
    "someone to be addressed politely": "Êtes-vous sûre ?",
}
QUESTION = f'Who is "you"? [{" | ".join(FRENCH)}]'
PLAIN = "Tu es sûr ?"
TEXT = "Are you sure?"


def start(text: str = TEXT, **more: Any) -> Conversation:
    return Conversation.start(text, "translate", "fr", **more)


def kinds(conversation: Conversation) -> list[str]:
    return [turn.kind for turn in conversation.turns]


def parts(body: Mapping[str, Any]) -> dict[str, str]:
    """What stands between the tags of the last message, by tag; of several the last."""
    return dict(re.findall(r"<([a-z]+)(?:-\d+)?>\n(.*?)\n</\1", body["messages"][-1]["content"], re.DOTALL))


def translator(body: Mapping[str, Any]) -> str:
    """Asks who "you" is where there is one, answers as a user from a context, and translates by the answer."""
    given, system = parts(body), body["messages"][0]["content"]
    if "Unknown" in system:
        return next((answer for answer in FRENCH if answer in given["context"]), "Unknown.")
    if "write None" in system:
        return QUESTION if re.search(r"\byou\b", given["text"], re.IGNORECASE) else "None."
    return FRENCH.get(given.get("answer", ""), PLAIN)


class Bad(Handler):
    """Misbehaves as the model's name says: so many times (fails:2), or from then on (fails_from:2)."""

    def respond(self, body: Mapping[str, Any]) -> None:
        mode, _, times = body["model"].partition(":")
        over = bool(times) and len(self.server.requests) > int(times)
        if over != mode.endswith("_from"):
            return super().respond(body)
        return getattr(self, mode.removesuffix("_from"))(body)

    def fails(self, body: Mapping[str, Any]) -> None:
        self.send({"error": {"message": "out of memory"}}, 500, retry_after_ms="1")

    def rate_limits(self, body: Mapping[str, Any]) -> None:
        self.send({"error": {"message": "slow down"}}, 429, retry_after_ms="1")

    def stalls(self, body: Mapping[str, Any]) -> None:
        time.sleep(0.3)
        self.close_connection = True

    def hangs_up(self, body: Mapping[str, Any]) -> None:
        self.close_connection = True

    def wants_key(self, body: Mapping[str, Any]) -> None:
        self.send({"error": {"message": "bad key"}}, 401)

    def knows_no_model(self, body: Mapping[str, Any]) -> None:
        self.send({"error": {"message": "no such model"}}, 404)

    def html(self, body: Mapping[str, Any]) -> None:
        self.send("<html><body>Welcome</body></html>", kind="text/html")

    def broken_json(self, body: Mapping[str, Any]) -> None:
        self.send('{"choices": [')

    def other_json(self, body: Mapping[str, Any]) -> None:
        self.send({"answer": 42})

    def no_choice(self, body: Mapping[str, Any]) -> None:
        self.send({"choices": []})

    def null(self, body: Mapping[str, Any]) -> None:
        self.send({"choices": [choice("message", None, "stop")]})

    def says_nothing(self, body: Mapping[str, Any]) -> None:
        self.send({"choices": [choice("message", " ", "stop")]})

    def streams(self, body: Mapping[str, Any]) -> None:
        self.stream(self.server.replies(body))

    def breaks_off(self, body: Mapping[str, Any]) -> None:
        self.stream("Es-tu", whole=False)

    def strict(self, body: Mapping[str, Any]) -> None:
        for key in ("max_tokens", "temperature"):
            if key in body:
                error = {"message": f"Unsupported parameter: '{key}'", "param": key, "code": "unsupported_parameter"}
                return self.send({"error": error}, 400)
        return super().respond(body)

    def turns_down(self, body: Mapping[str, Any]) -> None:
        self.send({"error": {"message": "the text is too long"}}, 400)

    def never_streams(self, body: Mapping[str, Any]) -> None:
        super().respond({key: value for key, value in body.items() if key != "stream"})

    def thinks(self, body: Mapping[str, Any]) -> None:
        text = f"<think>\nWhat is asked?\n</think>\n\n{self.server.replies(body)}"
        self.send({"choices": [choice("message", text, "length")]})


class Scripted:
    """A writer without a server: replies by a function of the prompt, and remembers what it was asked."""

    def __init__(self, replies: Callable[[Prompt], str], name: str = "scripted") -> None:
        self._replies, self.name = replies, name
        self.prompts: list[Prompt] = []

    def write(self, prompt: Prompt, **_: Any) -> Reply:
        self.prompts.append(prompt)
        return Reply(self._replies(prompt), Cost(calls=1, prompt_tokens=10, new_tokens=2))


def by_chat(prompt: Prompt) -> str:
    """`translator` of a prompt rather than of a request."""
    return translator({"messages": prompt.messages()})

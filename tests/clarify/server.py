"""A server of OpenAI's chat protocol that can misbehave, and translators with known behaviour."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graftlm.pipelines.clarify import Conversation, Cost, Reply
from graftlm.pipelines.clarify.prompts import Prompt

Replies = Callable[[Mapping[str, Any]], str]  # from a request's JSON body to the text of the reply


class ChatHandler(BaseHTTPRequestHandler):
    """Answers `POST …/chat/completions`, as one document or as a stream of words."""

    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_POST(self) -> None:
        """Reply to a chat; the name is the standard library's."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"] or "")
        self.respond(body)

    def respond(self, body: Mapping[str, Any]) -> None:
        """Reply to one request."""
        text = self.server.replies(body)
        usage = {
            "prompt_tokens": words(body["messages"]),
            "completion_tokens": len(text.split()),
        }
        if body.get("stream"):
            self.stream(text, usage=usage)
            return
        document = {
            "choices": [choice("message", text, "stop")],
            "usage": usage,
            **heading(body),
        }
        self.send(document)

    def send(self, document: Any, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """Send a JSON document, or a string unchanged."""
        text = document if isinstance(document, str) else json.dumps(document)
        content = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, text: str, *, complete: bool = True, usage: dict[str, int] | None = None) -> None:
        """Send an event per word, then the end and the usage if the stream is `complete`."""
        *words, last = text.split(" ")
        parts = [*(f"{word} " for word in words), last]
        events: list[dict[str, Any]] = [{"choices": [choice("delta", part, None)]} for part in parts]
        if complete:
            events.append({"choices": [choice("delta", "", "stop")]})
            events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event | heading({}))}\n\n" for event in events]
        if complete:
            lines.append("data: [DONE]\n\n")
        self.send("".join(lines), kind="text/event-stream")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the standard library's
        """Log nothing."""


class ChatServer(ThreadingHTTPServer):
    """Records its requests.

    Attributes:
        replies: makes the text of a reply.
        requests: the bodies of all requests, in order.
        keys: the authorisation header of each request.
    """

    daemon_threads = True

    def __init__(self, replies: Replies, handler: type[ChatHandler] = ChatHandler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.replies = replies
        self.requests: list[Mapping[str, Any]] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(replies: Replies, handler: type[ChatHandler] = ChatHandler) -> Iterator[ChatServer]:
    """A server that runs during the block."""
    server = ChatServer(replies, handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def heading(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of every reply."""
    return {"id": "chat", "object": "chat.completion", "created": 0, "model": body.get("model", "")}


def choice(key: str, text: str | None, finish: str | None) -> dict[str, Any]:
    """The only choice of a reply or of a chunk."""
    return {"index": 0, key: {"role": "assistant", "content": text}, "finish_reason": finish}


def words(messages: list[Mapping[str, str]]) -> int:
    """The number of words of a chat, which this server counts as tokens."""
    return sum(len(message["content"].split()) for message in messages)


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


def request_parts(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the last message by tag; of several parts with the same tag, the last one."""
    content = body["messages"][-1]["content"]
    parts = re.findall(r"<([a-z]+)(?:-\d+)?>\n(.*?)\n</\1", content, re.DOTALL)
    return dict(parts)


def translator(body: Mapping[str, Any]) -> str:
    """Ask who "you" is if the text has it, answer as a user from a context, and translate by the answer."""
    parts = request_parts(body)
    system = body["messages"][0]["content"]
    if "Unknown" in system:
        for answer in FRENCH:
            if answer in parts["context"]:
                return answer
        return "Unknown."
    if "write None" in system:
        has_you = re.search(r"\byou\b", parts["text"], re.IGNORECASE)
        return QUESTION if has_you else "None."
    return FRENCH.get(parts.get("answer", ""), PLAIN)


class FaultyHandler(ChatHandler):
    """Misbehaves as the model's name says: a number of times (fails:2), or after that number (fails_from:2)."""

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
        self.stream("Es-tu", complete=False)

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


class ScriptedModel:
    """A model without a server: replies by a function of the prompt, and records its prompts."""

    def __init__(self, replies: Callable[[Prompt], str], name: str = "scripted") -> None:
        self._replies = replies
        self.name = name
        self.prompts: list[Prompt] = []

    def generate(self, prompt: Prompt, **_: Any) -> Reply:
        self.prompts.append(prompt)
        return Reply(self._replies(prompt), Cost(calls=1, prompt_tokens=10, new_tokens=2))


def by_chat(prompt: Prompt) -> str:
    """`translator` for a prompt instead of a request."""
    return translator({"messages": prompt.messages()})

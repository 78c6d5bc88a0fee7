"""A small server of OpenAI's chat protocol on this machine, for a function that replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Replies = Callable[[Mapping[str, Any]], str]  # from a request's JSON body to the text of the reply


class Handler(BaseHTTPRequestHandler):
    """Answers `POST …/chat/completions`, in one piece or as a stream of words."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        """Reply to a chat; the name is the standard library's."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"] or "")
        self.respond(body)

    def respond(self, body: Mapping[str, Any]) -> None:
        """Reply to one request."""
        text = self.server.replies(body)
        usage = {"prompt_tokens": words(body["messages"]), "completion_tokens": len(text.split())}
        if body.get("stream"):
            self.stream(text, usage=usage)
        else:
            self.send({"choices": [choice("message", text, "stop")], "usage": usage} | heading(body))

    def send(self, document: Any, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """Send a document; of a string, as it stands."""
        content = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, text: str, *, whole: bool = True, usage: dict[str, int] | None = None) -> None:
        """Send events, a word each, then the usage; without their end where `whole` is false."""
        pieces = [f"{word} " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]
        events = [{"choices": [choice("delta", piece, None)]} for piece in pieces]
        events += [{"choices": [choice("delta", "", "stop")]}, {"choices": [], "usage": usage}] if whole else []
        lines = [f"data: {json.dumps(event | heading({}))}\n\n" for event in events]
        self.send("".join(lines) + ("data: [DONE]\n\n" if whole else ""), kind="text/event-stream")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the standard library's
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Remembers what it was asked.

    Attributes:
        replies: what it replies.
        requests: the bodies of all requests, in order.
        keys: what each of them gave as its key.
    """

    daemon_threads = True

    def __init__(self, replies: Replies, handler: type[Handler] = Handler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.replies = replies
        self.requests: list[Mapping[str, Any]] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        """What clients take as the base of their requests."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(replies: Replies, handler: type[Handler] = Handler) -> Iterator[Server]:
    """A server that runs while the block does."""
    server = Server(replies, handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def heading(body: Mapping[str, Any]) -> dict[str, Any]:
    """What every reply of the protocol has."""
    return {"id": "chat", "object": "chat.completion", "created": 0, "model": body.get("model", "")}


def choice(key: str, text: str | None, finish: str | None) -> dict[str, Any]:
    """The one choice of a reply, or of a piece of it."""
    return {"index": 0, key: {"role": "assistant", "content": text}, "finish_reason": finish}


def words(messages: list[Mapping[str, str]]) -> int:
    """Words of a chat, which this server counts as tokens."""
    return sum(len(message["content"].split()) for message in messages)

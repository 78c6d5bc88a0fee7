"""A conversation with a model in the terminal: history, streamed answers, and a few commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from graftlm.data.chats import Message, render_question
from graftlm.errors import DataError
from graftlm.generation.generate import Decoding, generate_text

HELP = "Write a message. /reset begins anew, /system TEXT sets the system's message, /exit or Ctrl-D ends.\n"


class ChatSession:
    """A conversation whose history the model sees.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's, with a chat template.
        system: the system's message; None leaves it to the template.

    Attributes:
        messages: what was said so far.

    Raises DataError if the tokenizer has no chat template.
    """

    def __init__(
        self, model: Any, tokenizer: Any, decoding: Decoding | None = None, *, system: str | None = None
    ) -> None:
        self._model, self._tokenizer, self._decoding = model, tokenizer, decoding or Decoding()
        self.messages: list[Message] = []
        self.reset(system)
        render_question([*self.messages, {"role": "user", "content": "a"}], tokenizer)

    def reset(self, system: str | None = None) -> None:
        """Forget what was said; without `system` the system's message stays."""
        kept = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        self.messages = kept if system is None else [{"role": "system", "content": system}]

    def reply(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """The answer to a message; both join the history, unless an error or an interrupt ends the answer.

        Raises DataError if the conversation exceeds the model's positions.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = generate_text(self._model, self._tokenizer, messages, self._decoding, on_text=on_text).text
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def talk(session: ChatSession, write: Callable[[str], Any]) -> None:
    """Read messages from stdin until its end, and write the answers."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import_module("readline")  # lines can be edited, and called back
        write(HELP)
    while (line := _next_line("> " if is_terminal else "", write)) is not None:
        text = line.strip()
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return
        if command == "/help":
            write(HELP)
        elif command == "/reset":
            session.reset()
            write("The conversation begins anew.\n")
        elif command == "/system" and rest.strip():
            session.reset(rest.strip())
            write("The conversation begins anew, with this system message.\n")
        elif command.startswith("/"):
            write(f"There is no command {command}. {HELP}")
        elif text:
            try:
                session.reply(text, write)
            except DataError as error:
                write(f"{error} /reset begins anew.")
            except KeyboardInterrupt:
                write(" (stopped)")
            write("\n")


def _next_line(prompt: str, write: Callable[[str], Any]) -> str | None:
    """The next line of stdin; None at its end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError:
        write("This line is not UTF-8 text.\n")
        return ""

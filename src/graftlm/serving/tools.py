"""Tool calls: how the model is told of the tools, what a call looks like in its answer, and calls read from the text.

A call is JSON between `<tool_call>` and `</tool_call>`, as Hermes and Qwen write it. A chat template that knows this
form gets the tools; other models get them in a system message. A grammar holds every call to its tool's schema.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from graftlm.serving.grammars import JSON_OPTIONS, GrammarCompiler, as_text, quoted
from graftlm.serving.protocol import ServingError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    """A call: an id, the tool's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


def tool_grammar(compiler: GrammarCompiler, tools: Mapping[str, Any], *, required: bool, parallel: bool) -> LLMatcher:
    """The grammar of an answer with calls.

    `tools` has the JSON schema of each tool's arguments by name, None for no arguments. With `required` the answer is
    calls alone, else text with calls anywhere; with `parallel` there may be several. Raises ServingError if a schema is
    wrong or not supported.
    """
    schemas = {name: _NO_ARGUMENTS if own is None else {"type": "object"} | own for name, own in tools.items()}
    bodies = []
    for name, schema in schemas.items():
        if schema["type"] != "object":
            raise ServingError(f"The parameters of the tool {name} are no object: set their type to object.", "tools")
        as_text(schema, "tools")
        head = f'\n{{"name": {json.dumps(name)}, "arguments": '
        text = json.dumps(schema | {"x-guidance": JSON_OPTIONS})
        bodies.append(f"{quoted(head)} %json {text} {quoted('}' + chr(10) + CLOSE)}")
    rules = [f"body: {' | '.join(f'body_{n}' for n in range(len(bodies)))}"]
    rules += [f"body_{n}: {body}" for n, body in enumerate(bodies)]
    if required:
        rules += [f"start: {quoted(OPEN)} body" + (f' ("\\n" {quoted(OPEN)} body)*' if parallel else "")]
    else:
        rules += [
            "start: (opened body)* TEXT" if parallel else "start: opened body | TEXT",
            f"opened[lazy]: TEXT {quoted(OPEN)}",
            r"TEXT: /(.|\n)*/",
        ]
    try:
        return compiler.lark("%llguidance {}\n" + "\n".join(rules), "tools")
    except ServingError as error:
        for schema in schemas.values() if error.code is None else ():
            compiler.json(schema, "tools")  # alone, so that the sentence is about the schema
        raise


def without_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a chat template that has no place for tools: texts of the system, the user and the assistant.

    The tools become a part of the system's message, calls text of the assistant, and results messages of the user.
    """
    chat = [_as_text(message) for message in messages]
    if tools:
        first = chat.pop(0)["content"] + "\n\n" if chat[0]["role"] == "system" else ""
        chat.insert(0, {"role": "system", "content": first + _instructions(tools)})
    return chat


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}" for function in functions]
    return {"role": message["role"], "content": "\n".join([text, *calls] if text else calls)}


def _instructions(tools: Sequence[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"These functions are available, one a line as JSON:\n{lines}\n"
        f'To call one, write {OPEN}\n{{"name": "its name", "arguments": {{}}}}\n{CLOSE} with arguments that its '
        "parameters describe. The result follows in the next message."
    )


class CallReader:
    """Splits an answer into text and calls of the tools `names`, piece by piece; what may begin a call is held back."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._held, self._after_call = names, "", False
        self.calls = 0

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is no call, and the calls that are complete."""
        self._held += text
        shown, calls = "", list[ToolCall]()
        while (start := self._held.find(OPEN)) >= 0 and (parsed := self._parse(start + len(OPEN))) is not None:
            call, end = parsed
            before, self._held = self._held[:start] if call else self._held[:end], self._held[end:]
            shown += self._trimmed(before.rstrip() if call else before)
            self._after_call = call is not None
            calls += [call] if call else []
        self.calls += len(calls)
        if start < 0:
            start = len(self._held) - max((n for n in range(len(OPEN)) if self._held.endswith(OPEN[:n])), default=0)
        start = len(self._held[:start].rstrip())  # spaces before a call are not text
        final, self._held = self._held[:start], self._held[start:]
        return shown + self._trimmed(final), calls

    def rest(self) -> str:
        """The text that was held back, without a call that has no end; call it at the end."""
        text, self._held = self._held.partition(OPEN)[0], ""
        return "" if self._after_call and OPEN.startswith(text.strip()) else text

    def _trimmed(self, text: str) -> str:
        """Text without the spaces that separate it from calls."""
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return text

    def _parse(self, start: int) -> tuple[ToolCall | None, int] | None:
        """The call behind an opening, and its end; None for the call if it is text, None at all if more may follow."""
        body = self._held[start:].lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except json.JSONDecodeError as error:
            unfinished = error.msg.startswith("Unterminated") or error.pos >= len(body) - 6
            return None if unfinished else (None, start)
        closing = body[end:].lstrip()
        if CLOSE.startswith(closing) and closing != CLOSE:
            return None
        if not closing.startswith(CLOSE) or not isinstance(value, dict) or value.get("name") not in self._names:
            return None, start
        call = ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(value.get("arguments", {})))
        return call, len(self._held) - len(closing) + len(CLOSE)

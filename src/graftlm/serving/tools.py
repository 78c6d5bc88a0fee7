"""Tool calls: the description of tools in prompts, the grammar of calls, and their extraction from answers.

A call is JSON between `<tool_call>` and `</tool_call>`, as written by Hermes and Qwen. A chat template that uses this
form receives the tools; for other templates, the tools are described in a system message. A grammar makes every call
follow the schema of its tool.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from graftlm.backbone.detokenizer import longest_beginning
from graftlm.serving.grammars import JSON_OPTIONS, GrammarCompiler, checked_schema, quoted
from graftlm.serving.protocol import ServingError

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

ToolSchema = dict[str, Any]
"""The JSON schema of a tool's arguments."""
TemplateMessage = dict[str, Any]
"""A message in the form of chat templates."""
TemplateTool = dict[str, Any]
"""A tool in the form of chat templates."""


class ToolCall(NamedTuple):
    """A complete call of a tool.

    Attributes:
        id: random id, under which the client returns the result.
        name: name of the tool.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


def tool_grammar(
    compiler: GrammarCompiler,
    tools: Mapping[str, ToolSchema | None],
    *,
    required: bool,
    parallel: bool,
) -> LLMatcher:
    """Compile the grammar of an answer with tool calls.

    Args:
        compiler: compiler for the model's tokens.
        tools: the schema of each tool's arguments by name; None for a tool without arguments.
        required: whether the answer must consist of calls; otherwise it is text with calls anywhere.
        parallel: whether the answer may have several calls.

    Raises:
        ServingError: a schema is wrong, not supported or too complex.
        EngineError: the process that compiles the grammar failed.
    """
    schemas = {name: _arguments_schema(name, schema) for name, schema in tools.items()}
    bodies = []
    names = []
    for number, (name, schema) in enumerate(schemas.items()):
        names.append(f"body_{number}")
        bodies.append(f"body_{number}: {_call_rule(name, schema)}")
    alternatives = " | ".join(names)
    rules = [
        "%llguidance {}",
        f"body: {alternatives}",
        *bodies,
        *_start_rules(required=required, parallel=parallel),
    ]
    try:
        return compiler.lark("\n".join(rules), "tools")
    except ServingError as error:
        if error.code is None:
            for schema in schemas.values():
                compiler.json(schema, "tools")  # raises an error about the schema instead of the whole grammar
        raise


def _arguments_schema(name: str, schema: ToolSchema | None) -> ToolSchema:
    if schema is None:
        return _NO_ARGUMENTS
    schema = {"type": "object", **schema}
    if schema["type"] != "object":
        found = json.dumps(schema["type"])[:100]
        raise ServingError(
            f"The parameters of the tool {name} have the type {found}, but an object is expected: set their type to "
            '"object".',
            "tools",
        )
    return schema


def _call_rule(name: str, schema: ToolSchema) -> str:
    checked_schema(schema, "tools")
    beginning = quoted(f'\n{{"name": {json.dumps(name)}, "arguments": ')
    arguments = json.dumps(schema | {"x-guidance": JSON_OPTIONS})
    end = quoted("}\n" + CLOSE)
    return f"{beginning} %json {arguments} {end}"


def _start_rules(*, required: bool, parallel: bool) -> list[str]:
    opening = quoted(OPEN)
    if required:
        further_calls = f' ("\\n" {opening} body)*' if parallel else ""
        return [f"start: {opening} body{further_calls}"]
    return [
        "start: (opened body)* TEXT" if parallel else "start: opened body | TEXT",
        f"opened[lazy]: TEXT {opening}",
        r"TEXT: /(.|\n)*/",
    ]


def without_tools(messages: Sequence[TemplateMessage], tools: Sequence[TemplateTool]) -> list[TemplateMessage]:
    """Return a conversation for a chat template without tools.

    The tools are described in the system message, calls become text of the assistant, and results become messages of
    the user.

    Args:
        messages: at least one message.
        tools: the tools; without any, the system message stays the same.
    """
    chat = [_as_text(message) for message in messages]
    if not tools:
        return chat
    instructions = _instructions(tools)
    if chat[0]["role"] == "system":
        system = chat.pop(0)
        instructions = f"{system['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *chat]


def _as_text(message: TemplateMessage) -> TemplateMessage:
    text = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    parts = [text] if text else []
    for call in message.get("tool_calls", ()):
        function = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"{OPEN}\n{function}\n{CLOSE}")
    return {"role": message["role"], "content": "\n".join(parts)}


def _instructions(tools: Sequence[TemplateTool]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"These functions are available, one a line as JSON:\n{lines}\n"
        f'To call one, write {OPEN}\n{{"name": "its name", "arguments": {{}}}}\n{CLOSE} with arguments that its '
        "parameters describe. The result follows in the next message."
    )


class CallReader:
    """Splits an answer that arrives in pieces into text and tool calls.

    Text that may be the beginning of a call is held back until it is a complete call, or can't become one. White space
    before and after a call belongs to neither.

    Args:
        names: names of the tools; a call of another name is text.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.calls = 0
        self._names = names
        self._held = ""
        self._after_call = False

    def add(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add a piece of the answer.

        Returns:
            The text outside of calls that is final now, and the calls that are complete now.
        """
        self._held += piece
        text = ""
        calls: list[ToolCall] = []
        while OPEN in self._held:
            start = self._held.index(OPEN)
            parsed = self._parse(start + len(OPEN))
            if parsed is None:
                break
            call, end = parsed
            if call is None:
                text += self._trimmed(self._held[:end])
            else:
                text += self._trimmed(self._held[:start].rstrip())
                calls.append(call)
                self._after_call = True
            self._held = self._held[end:]
        self.calls += len(calls)
        return text + self._release_text(), calls

    def rest(self) -> str:
        """Return the text that is held back; call it once, after the last piece.

        An unfinished call, such as one that the maximum number of tokens cut off, is returned as text.
        """
        text = self._trimmed(self._held)
        self._held = ""
        return text

    def _release_text(self) -> str:
        """Remove and return the held-back text before a possible beginning of a call."""
        start = self._held.find(OPEN)
        if start < 0:
            start = len(self._held) - longest_beginning(self._held, [OPEN])
        text = self._held[:start].rstrip()  # The white space may precede a call.
        self._held = self._held[len(text) :]
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Remove the white space that separates a text from the call before it."""
        if not self._after_call:
            return text
        text = text.lstrip()
        if text:
            self._after_call = False
        return text

    def _parse(self, start: int) -> tuple[ToolCall | None, int] | None:
        """Parse the held-back text from `start`, the end of a `<tool_call>`.

        Returns:
            A call and its end; None and `start` if the characters are not a call of a tool; None alone while they may
            become one.
        """
        body = self._held[start:].lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except json.JSONDecodeError as error:
            # The last characters may be a part of a literal such as false, or of an escape such as \u00e9.
            is_incomplete = error.msg.startswith("Unterminated") or error.pos >= len(body) - 6
            return None if is_incomplete else (None, start)
        except (ValueError, RecursionError):  # a number of more than 4300 digits, or too many brackets
            return None, start
        closing = body[end:].lstrip()
        if CLOSE.startswith(closing) and closing != CLOSE:
            return None
        if not closing.startswith(CLOSE) or not isinstance(value, dict) or value.get("name") not in self._names:
            return None, start
        call = ToolCall(
            id=f"call_{uuid.uuid4().hex[:24]}",
            name=value["name"],
            arguments=json.dumps(value.get("arguments", {})),
        )
        return call, len(self._held) - len(closing) + len(CLOSE)

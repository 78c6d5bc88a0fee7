"""Tool calls: the grammar of calls, and their extraction from answers.

A call is written as the chat template writes it (`CallText`), by default as JSON between `<tool_call>` and
`</tool_call>`. A grammar makes every call follow the schema of its tool.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from graftlm.backbone.chat_templates import CLOSE, HERMES, OPEN, CallText
from graftlm.backbone.detokenizer import longest_beginning
from graftlm.serving.grammars import JSON_OPTIONS, GrammarCompiler, checked_schema, quoted
from graftlm.serving.protocol import ServingError

_NO_VALUE = "\0"  # can't begin what follows a value
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

ToolSchema = dict[str, Any]
"""The JSON schema of a tool's arguments."""


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
    call_text: CallText = HERMES,
) -> LLMatcher:
    """Compile the grammar of an answer with tool calls.

    Args:
        compiler: compiler for the model's tokens.
        tools: the schema of each tool's arguments by name; None for a tool without arguments.
        required: whether the answer must consist of calls; otherwise it is text with calls anywhere.
        parallel: whether the answer may have several calls.
        call_text: how a call is written.

    Raises:
        ServingError: a schema is wrong, not supported or too complex.
        EngineError: the process that compiles the grammar failed.
    """
    schemas = {name: _arguments_schema(name, schema) for name, schema in tools.items()}
    bodies = []
    names = []
    for number, (name, schema) in enumerate(schemas.items()):
        names.append(f"body_{number}")
        bodies.append(f"body_{number}: {_call_rule(name, schema, call_text)}")
    alternatives = " | ".join(names)
    rules = [
        "%llguidance {}",
        f"body: {alternatives}",
        *bodies,
        *_start_rules(quoted(_opening(call_text)), required=required, parallel=parallel),
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


def _opening(call_text: CallText) -> str:
    """Return the text that begins a call, before which an answer may have other text."""
    return OPEN if call_text.is_object else call_text.before


def _call_rule(name: str, schema: ToolSchema, call_text: CallText) -> str:
    checked_schema(schema, "tools")
    beginning = call_text.before.removeprefix(_opening(call_text))
    arguments = json.dumps(schema | {"x-guidance": JSON_OPTIONS})
    end = quoted(call_text.after) if call_text.after else ""
    return f"{quoted(beginning + name + call_text.between)} %json {arguments} {end}"


def _start_rules(opening: str, *, required: bool, parallel: bool) -> list[str]:
    if required:
        further_calls = f' ("\\n" {opening} body)*' if parallel else ""
        return [f"start: {opening} body{further_calls}"]
    return [
        "start: (opened body)* TEXT" if parallel else "start: opened body | TEXT",
        f"opened[lazy]: TEXT {opening}",
        r"TEXT: /(.|\n)*/",
    ]


class CallReader:
    """Splits an answer that arrives in pieces into text and tool calls.

    Text that may be the beginning of a call is held back until it is a complete call, or can't become one. White space
    before and after a call belongs to neither.

    Args:
        names: names of the tools; a call of another name is text.
        call_text: how calls are written.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, names: Sequence[str], call_text: CallText = HERMES) -> None:
        self.calls = 0
        self._names = names
        self._call_text = call_text
        self._opening = _opening(call_text)
        self._parse = self._parse_object if call_text.is_object else self._parse_written
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
        while self._opening in self._held:
            start = self._held.index(self._opening)
            parsed = self._parse(start + len(self._opening))
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
        start = self._held.find(self._opening)
        if start < 0:
            start = len(self._held) - longest_beginning(self._held, [self._opening])
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

    def _parse_object(self, start: int) -> tuple[ToolCall | None, int] | None:
        """Parse the held-back text from `start`, the end of a `<tool_call>`: an object with name and arguments.

        Returns:
            A call and its end; None and `start` if the characters are not a call of a tool; None alone while they may
            become one.
        """
        body = self._held[start:]
        value, rest = _first_value(body)
        if rest is None or not _is_reached(rest.lstrip(), CLOSE):
            return None
        closing = rest.lstrip()
        if not closing.startswith(CLOSE) or not isinstance(value, dict) or value.get("name") not in self._names:
            return None, start
        return _tool_call(value["name"], value.get("arguments", {})), len(self._held) - len(closing) + len(CLOSE)

    def _parse_written(self, start: int) -> tuple[ToolCall | None, int] | None:
        """Parse the held-back text from `start`, the text before a name; see `_parse_object` for what it returns."""
        after = self._call_text.after
        for name in self._names:
            head = name + self._call_text.between
            body = self._held[start:]
            if not _is_reached(body, head):
                return None
            if not body.startswith(head):
                continue
            value, rest = _first_value(body[len(head) :])
            if rest is None or not _is_reached(rest, after):
                return None
            if isinstance(value, dict) and rest.startswith(after):
                return _tool_call(name, value), len(self._held) - len(rest) + len(after)
        return None, start


def _first_value(text: str) -> tuple[object, str | None]:
    """Return the JSON value that begins a text, and the text after it.

    The text after it is None while the value may be incomplete, and `_NO_VALUE` if there is none.
    """
    body = text.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(body)
    except json.JSONDecodeError as error:
        # The last characters may be a part of a literal such as false, or of an escape such as \u00e9.
        is_incomplete = error.msg.startswith("Unterminated") or error.pos >= len(body) - 6
        return None, None if is_incomplete else _NO_VALUE
    except (ValueError, RecursionError):  # a number of more than 4300 digits, or too many brackets
        return None, _NO_VALUE
    return value, body[end:]


def _is_reached(text: str, mark: str) -> bool:
    """Return whether a growing text either has a mark at its beginning, or can't have it any more."""
    return text.startswith(mark) or not mark.startswith(text)


def _tool_call(name: str, arguments: object) -> ToolCall:
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=name, arguments=json.dumps(arguments))

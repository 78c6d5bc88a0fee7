"""The arguments of LaTeX macros and environments, which pylatexenc reads by their form.

A form has one letter for each argument. Those of pylatexenc are `*` for a star, `[` for an optional argument and `{`
for another one. Further letters are: `v` for an address, which is read verbatim, so that `%` begins no comment in it;
`V` for all of an environment, read verbatim; `<` for the slides of a presentation; `t` for an optional argument that is
printed as a label; `g` for a group that may be absent and is printed as a heading; `a` for all groups and optional
arguments that directly follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from graftlm.pipelines.summarize.text import import_extra

_STANDARD = {"t": "[", "g": "{"}  # the letters of pylatexenc that read these arguments
_OVERLAY = re.compile(r"\s*<[^<>\n]*>")
_GROUP_AHEAD = re.compile(r"[ \t]*\n?[ \t]*(?=\{)")
_ADDRESS_START = re.compile(r"\s*([^\w\s(\[*\\])")
_ADDRESS_BRACE = re.compile(r"[{}]")
_END = re.compile(r"\\end\s*\{[^{}]*\}\Z")
_CLOSING = {"{": "}", "[": "]"}


class LatexNode(Protocol):
    """The attributes of the nodes of pylatexenc that the reader uses. A node has only those of its type."""

    pos: int
    len: int
    chars: str
    comment_post_space: str
    delimiters: tuple[str, str]
    displaytype: str
    is_address: bool
    environmentname: str
    macroname: str
    nodeargd: Any
    nodelist: Sequence[LatexNode | None]
    specials_chars: str


class _Walker(Protocol):
    """What the parsers of arguments use of pylatexenc's walker."""

    s: str

    def make_node(self, node_class: object, **attributes: object) -> LatexNode: ...


def parse_latex(text: str, macros: Mapping[str, str], environments: Mapping[str, str]) -> Sequence[LatexNode | None]:
    """Return the nodes of a text.

    Args:
        text: LaTeX source.
        macros: the forms of macros beyond those that pylatexenc knows.
        environments: the forms of environments beyond those that pylatexenc knows. Others have the form `a`.
    """
    latexwalker = import_extra("pylatexenc.latexwalker", "Reading LaTeX")
    macrospec = import_extra("pylatexenc.macrospec", "Reading LaTeX")
    parser = _arguments_parser()
    context = latexwalker.get_default_latex_context_db()
    context.add_context_category(
        "document",
        macros=[macrospec.MacroSpec(name, args_parser=parser(form)) for name, form in macros.items()],
        environments=[
            macrospec.EnvironmentSpec(name, args_parser=parser(form, name)) for name, form in environments.items()
        ],
        prepend=True,
    )
    context.set_unknown_environment_spec(macrospec.EnvironmentSpec("", args_parser=parser("a")))
    walker = latexwalker.LatexWalker(text, latex_context=context, tolerant_parsing=True)
    nodes, _, _ = walker.get_latex_nodes()
    return nodes


def unclosed_nodes(text: str, nodes: Sequence[LatexNode | None]) -> Iterator[LatexNode]:
    """Yield the groups, formulas and environments that have no end, and so reach to that of what is around them.

    Those around another one are not given: what has no end takes theirs.
    """
    for node in nodes:
        if node is None:
            continue
        source = text[node.pos : node.pos + node.len]
        name = getattr(node, "environmentname", None)
        delimiters = getattr(node, "delimiters", None)
        if name is not None and name != "document":
            is_closed = re.search(r"\\end\s*\{\s*" + re.escape(name) + r"\s*\}\Z", source) is not None
        elif delimiters is not None:
            is_closed = source.endswith(delimiters[1]) and _END.search(source) is None
        else:
            opening = text[node.pos - 1] if getattr(node, "is_address", False) else ""
            is_closed = text[node.pos + node.len :].startswith(_CLOSING.get(opening, ""))
        arguments = getattr(node, "nodeargd", None)
        inner = [*((arguments and arguments.argnlist) or ()), *(getattr(node, "nodelist", None) or ())]
        unclosed = list(unclosed_nodes(text, inner))
        if not is_closed and not unclosed:
            yield node
        yield from unclosed


def address_end(text: str, start: int) -> int:
    """Return the end of an address in braces whose opening brace is before `start`; that of the line if it has none."""
    depth = 1
    line_end = text.find("\n", start)
    for match in _ADDRESS_BRACE.finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if not depth:
            return match.start()
    return line_end if line_end >= 0 else len(text)


@cache
def _arguments_parser() -> Callable[..., object]:
    """Return the class of pylatexenc's argument parsers for the forms of this module."""
    latexwalker = import_extra("pylatexenc.latexwalker", "Reading LaTeX")
    macrospec = import_extra("pylatexenc.macrospec", "Reading LaTeX")

    class ArgumentsParser(macrospec.MacroStandardArgsParser):
        def __init__(self, form: str, name: str = "") -> None:
            super().__init__("")
            self._form = form
            self._name = name

        def parse_args(self, w: _Walker, pos: int, parsing_state: object = None) -> tuple[object, int, int]:
            arguments: list[LatexNode | None] = []
            end = pos
            for letter in self._form:
                if letter == "a":
                    while w.s[end : end + 1] in _CLOSING:
                        _, end = self._read(w, w.s[end], end, parsing_state)
                    continue
                argument, end = self._read(w, letter, end, parsing_state)
                arguments.append(argument)
            return macrospec.ParsedMacroArgs(argspec=self._form, argnlist=arguments), pos, end - pos

        def _read(self, w: _Walker, letter: str, pos: int, state: object) -> tuple[LatexNode | None, int]:
            """Return an argument, None if it is absent, and the position after it."""
            text = w.s
            if letter == "V":
                end = text.find(f"\\end{{{self._name}}}", pos)
                end = end if end >= 0 else len(text)
                return self._characters(w, pos, end, state), end
            if letter == "*":
                return (
                    (self._characters(w, pos, pos + 1, state), pos + 1) if text[pos : pos + 1] == "*" else (None, pos)
                )
            if letter == "<":
                overlay = _OVERLAY.match(text, pos)
                return None, overlay.end() if overlay else pos
            if letter == "v":
                return self._read_address(w, pos, state)
            if letter == "g" and not _GROUP_AHEAD.match(text, pos):
                return None, pos
            standard = macrospec.MacroStandardArgsParser(_STANDARD.get(letter, letter))
            parsed, start, length = standard.parse_args(w, pos, parsing_state=state)
            return parsed.argnlist[0], start + length

        def _read_address(self, w: _Walker, pos: int, state: object) -> tuple[LatexNode | None, int]:
            """Return an address in braces or between two equal characters."""
            opening = _ADDRESS_START.match(w.s, pos)
            if opening is None:
                return None, pos
            start = opening.end()
            end = address_end(w.s, start) if opening[1] == "{" else w.s.find(opening[1], start)
            if end < 0:
                return None, pos
            node = self._characters(w, start, end, state)
            node.is_address = True
            return node, min(end + 1, len(w.s))

        def _characters(self, w: _Walker, start: int, end: int, state: object) -> LatexNode:
            return w.make_node(
                latexwalker.LatexCharsNode, parsing_state=state, chars=w.s[start:end], pos=start, len=end - start
            )

    return ArgumentsParser

"""LaTeX reader, based on pylatexenc, whose nodes have positions in the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.roles import element_roles
from graftlm.pipelines.summarize.text import import_extra

_HEADING_LEVELS = {
    "part": 1,
    "chapter": 1,
    "section": 1,
    "subsection": 2,
    "subsubsection": 3,
    "paragraph": 4,
    "subparagraph": 5,
}
_PARAGRAPH_BREAK = re.compile(r"\r?\n[ \t]*\r?\n\s*")


class _Node(Protocol):
    """The attributes of the nodes of pylatexenc that the reader uses. A node has only those of its type."""

    pos: int
    len: int
    chars: str
    comment_post_space: str
    displaytype: str
    environmentname: str
    macroname: str
    nodeargd: Any
    nodelist: Sequence[_Node | None]
    specials_chars: str


def latex_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings of the document's body. Inline formulas keep their source.

    Tables, figures, displayed formulas and code are blocks of their source. Footnotes and citations are skipped.

    Raises:
        MissingExtraError: pylatexenc is not installed.
    """
    latexwalker = import_extra("pylatexenc.latexwalker", "Reading LaTeX")
    latex2text = import_extra("pylatexenc.latex2text", "Reading LaTeX")
    walker = latexwalker.LatexWalker(text, tolerant_parsing=True)
    nodes, _, _ = walker.get_latex_nodes()
    converter = latex2text.LatexNodes2Text(math_mode="verbatim")
    parser = _LatexBlockParser(text, converter)
    parser.walk(_body(nodes))
    return iter(parser.finish())


def _body(nodes: Iterable[_Node | None]) -> Iterable[_Node | None]:
    """Return the nodes of the document environment, or all nodes without one."""
    for node in nodes:
        if node is not None and getattr(node, "environmentname", None) == "document":
            return node.nodelist
    return nodes


class _LatexBlockParser:
    """Walks the nodes and collects text spans into blocks."""

    def __init__(self, text: str, converter: Any) -> None:
        self._text = text
        self._converter = converter
        self._blocks: list[TextBlock] = []
        self._spans: list[TextSpan] = []
        self._handlers: dict[str, Callable[[_Node], None]] = {
            "LatexCharsNode": self._handle_characters,
            "LatexCommentNode": self._handle_comment,
            "LatexGroupNode": self._handle_group,
            "LatexMathNode": self._handle_formula,
            "LatexSpecialsNode": self._handle_specials,
            "LatexEnvironmentNode": self._handle_environment,
            "LatexMacroNode": self._handle_macro,
        }

    def finish(self) -> list[TextBlock]:
        """Close the open block and return all blocks."""
        self._close_block()
        return self._blocks

    def walk(self, nodes: Iterable[_Node | None] | None) -> None:
        """Handle nodes in order."""
        for node in nodes or ():
            if node is not None:
                handle = self._handlers[type(node).__name__]
                handle(node)

    def _handle_characters(self, node: _Node) -> None:
        """Add a node's text, and close the block at each empty line."""
        start = node.pos
        for gap in _PARAGRAPH_BREAK.finditer(node.chars):
            self._add_literal(start, node.pos + gap.start())
            self._close_block()
            start = node.pos + gap.end()
        self._add_literal(start, node.pos + node.len)

    def _handle_comment(self, node: _Node) -> None:
        space = node.comment_post_space.removeprefix("\r").removeprefix("\n")
        if "\n" in space:  # An empty line follows.
            self._close_block()

    def _handle_group(self, node: _Node) -> None:
        self.walk(node.nodelist)

    def _handle_formula(self, node: _Node) -> None:
        if node.displaytype == "inline":
            self._add_literal(node.pos, node.pos + node.len)
        else:
            self._add_kind(node, "formula")

    def _handle_specials(self, node: _Node) -> None:
        if node.specials_chars.startswith("\n"):
            self._close_block()
        else:
            self._add_converted(node)

    def _handle_environment(self, node: _Node) -> None:
        """Walk an environment of prose, add another known one as a block of its kind, and skip unknown ones."""
        name = node.environmentname
        kind = element_roles("latex_environments").get(name.rstrip("*"))
        if kind is None:
            return
        if kind != "prose":
            self._add_kind(node, kind)
            return
        self._close_block()
        if name == "abstract":
            span = TextSpan("Abstract", node.pos, node.pos)
            self._blocks.append(TextBlock((span,), 1))
        self.walk(node.nodelist)
        self._close_block()

    def _add_kind(self, node: _Node, kind: BlockKind) -> None:
        """Add a block of the node's source."""
        self._close_block()
        self._add_literal(node.pos, node.pos + node.len)
        self._close_block(kind=kind)

    def _handle_macro(self, node: _Node) -> None:
        """Handle a heading, a macro around text, a line break or a symbol, and skip any other macro."""
        name = node.macroname.rstrip("*")
        role = element_roles("latex_macros").get(name)
        if name in _HEADING_LEVELS:
            self._close_block()
            self._walk_printed_argument(node)
            self._close_block(_HEADING_LEVELS[name])
        elif role == "inline":
            self._walk_printed_argument(node)
        elif role == "break":
            self._close_block()
        elif role == "symbol":
            self._add_converted(node)
        else:
            self._skip_macro(node)

    def _skip_macro(self, node: _Node) -> None:
        """Remove the space before a skipped macro, such as a citation, unless a word follows the macro."""
        end = node.pos + node.len
        if not self._text[end : end + 1].isalnum():
            self._strip_trailing_space()

    def _strip_trailing_space(self) -> None:
        while self._spans and not self._spans[-1].text.strip():
            self._spans.pop()
        if self._spans and self._spans[-1].is_literal:
            last = self._spans[-1]
            text = last.text.rstrip()
            self._spans[-1] = TextSpan(text, last.start, last.start + len(text))

    def _walk_printed_argument(self, node: _Node) -> None:
        """Walk the last argument of a macro, which is printed."""
        if not node.nodeargd:
            return
        arguments = [argument for argument in node.nodeargd.argnlist if argument is not None]
        self.walk(arguments[-1:])

    def _add_literal(self, start: int, end: int) -> None:
        if end > start:
            span = TextSpan(self._text[start:end], start, end)
            self._spans.append(span)

    def _add_converted(self, node: _Node) -> None:
        """Add a node as the text into which pylatexenc converts it."""
        text = self._converter.nodelist_to_text([node])
        if text:
            span = TextSpan(text, node.pos, node.pos + node.len)
            self._spans.append(span)

    def _close_block(self, level: int = 0, kind: BlockKind = "prose") -> None:
        if self._spans:
            block = TextBlock(tuple(self._spans), level, kind=kind)
            self._blocks.append(block)
        self._spans = []

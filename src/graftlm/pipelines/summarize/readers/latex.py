"""LaTeX reader, on the nodes of pylatexenc, which know their positions in the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.text import element_roles, import_extra

_HEADING_LEVELS = {
    "part": 1, "chapter": 1, "section": 1, "subsection": 2, "subsubsection": 3, "paragraph": 4, "subparagraph": 5,
}  # fmt: skip
_PARAGRAPH_BREAK = re.compile(r"\r?\n[ \t]*\r?\n\s*")


def latex_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings of the document's body. Inline formulas keep their source.

    Tables, figures, displayed formulas and code keep their source as blocks; footnotes and citations are skipped.
    """
    walker: Any = import_extra("pylatexenc.latexwalker", "Reading LaTeX")
    latex2text: Any = import_extra("pylatexenc.latex2text", "Reading LaTeX")
    nodes, _, _ = walker.LatexWalker(text, tolerant_parsing=True).get_latex_nodes()
    parser = _LatexBlockParser(text, latex2text.LatexNodes2Text(math_mode="verbatim"))
    bodies = [node for node in nodes if getattr(node, "environmentname", None) == "document"]
    parser.walk(bodies[0].nodelist if bodies else nodes)
    return iter(parser.finish())


class _LatexBlockParser:
    """Walks the nodes and collects text spans into blocks."""

    def __init__(self, text: str, converter: Any) -> None:
        self._text, self._converter = text, converter
        self._blocks: list[TextBlock] = []
        self._spans: list[TextSpan] = []
        self._handlers: dict[str, Callable[[Any], None]] = {
            "LatexCharsNode": self._handle_characters,
            "LatexCommentNode": self._handle_comment,
            "LatexGroupNode": lambda node: self.walk(node.nodelist),
            "LatexMathNode": self._handle_formula,
            "LatexSpecialsNode": self._handle_specials,
            "LatexEnvironmentNode": self._handle_environment,
            "LatexMacroNode": self._handle_macro,
        }

    def finish(self) -> list[TextBlock]:
        """Close the open block and return all blocks."""
        self._close_block()
        return self._blocks

    def walk(self, nodes: Iterable[Any] | None) -> None:
        """Handle nodes in order."""
        for node in nodes or ():
            if node is not None:
                self._handlers[type(node).__name__](node)

    def _handle_characters(self, node: Any) -> None:
        start = node.pos
        for gap in _PARAGRAPH_BREAK.finditer(node.chars):
            self._add_literal(start, node.pos + gap.start())
            self._close_block()
            start = node.pos + gap.end()
        self._add_literal(start, node.pos + node.len)

    def _handle_comment(self, node: Any) -> None:
        if "\n" in node.comment_post_space.removeprefix("\r").removeprefix("\n"):  # an empty line follows
            self._close_block()

    def _handle_formula(self, node: Any) -> None:
        if node.displaytype == "inline":
            self._add_literal(node.pos, node.pos + node.len)
        else:
            self._add_kind(node, "formula")

    def _handle_specials(self, node: Any) -> None:
        if node.specials_chars.startswith("\n"):
            self._close_block()
        else:
            self._add_converted(node)

    def _handle_environment(self, node: Any) -> None:
        kind = element_roles("latex_environments").get(node.environmentname.rstrip("*"))
        if kind == "prose":
            self._close_block()
            if node.environmentname == "abstract":
                self._blocks.append(TextBlock((TextSpan("Abstract", node.pos, node.pos),), 1))
            self.walk(node.nodelist)
            self._close_block()
        elif kind is not None:
            self._add_kind(node, kind)

    def _add_kind(self, node: Any, kind: BlockKind) -> None:
        """Add a block of the node's source."""
        self._close_block()
        self._add_literal(node.pos, node.pos + node.len)
        self._close_block(kind=kind)

    def _handle_macro(self, node: Any) -> None:
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
        elif not self._text[node.pos + node.len : node.pos + node.len + 1].isalnum():
            self._strip_trailing_space()

    def _strip_trailing_space(self) -> None:
        """Remove the space before a skipped macro, such as a citation at the end of a sentence."""
        while self._spans and not self._spans[-1].text.strip():
            self._spans.pop()
        if self._spans and self._spans[-1].is_literal:
            last = self._spans[-1]
            text = last.text.rstrip()
            self._spans[-1] = TextSpan(text, last.start, last.start + len(text))

    def _walk_printed_argument(self, node: Any) -> None:
        """Walk the last argument of a macro, which is the printed one."""
        arguments = [argument for argument in (node.nodeargd.argnlist if node.nodeargd else ()) if argument is not None]
        self.walk(arguments[-1:])

    def _add_literal(self, start: int, end: int) -> None:
        if end > start:
            self._spans.append(TextSpan(self._text[start:end], start, end))

    def _add_converted(self, node: Any) -> None:
        """Add a node as the text that pylatexenc converts it to."""
        text = self._converter.nodelist_to_text([node])
        if text:
            self._spans.append(TextSpan(text, node.pos, node.pos + node.len))

    def _close_block(self, level: int = 0, kind: BlockKind = "prose") -> None:
        if self._spans:
            self._blocks.append(TextBlock(tuple(self._spans), level, kind=kind))
        self._spans = []

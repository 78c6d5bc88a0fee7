"""LaTeX, by pylatexenc, whose nodes know their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graftlm.pipelines.summarize.document import TextBlock, TextSpan
from graftlm.pipelines.summarize.text import import_extra

_HEADINGS = {
    "part": 1, "chapter": 1, "section": 1, "subsection": 2, "subsubsection": 3, "paragraph": 4, "subparagraph": 5,
}  # fmt: skip
_TRANSPARENT = {
    "textbf", "textit", "emph", "texttt", "textsf", "textsc", "textrm", "textsl", "textup", "textmd", "underline",
    "mbox", "text", "href", "enquote", "uline",
}  # fmt: skip
_BREAKS = {"item", "par", "newpage", "clearpage", "maketitle", "tableofcontents", "noindent", "bigskip", "medskip"}
_PROSE = {
    "document", "abstract", "itemize", "enumerate", "description", "quote", "quotation", "center", "flushleft",
    "theorem", "lemma", "proof", "definition", "proposition", "corollary", "remark", "example", "minipage", "samepage",
    "small",
}  # fmt: skip
_SYMBOLS = {
    "%", "&", "$", "#", "_", "{", "}", "LaTeX", "TeX", "ldots", "dots", "ss", "ae", "oe", "aa", "o", "l", "AE", "OE",
    "AA", "O", "L", "i", "j", " ", ",", "textendash", "textemdash", "\\", "copyright",
    "'", "`", "^", '"', "~", "=", ".",
    "c", "v", "u", "H", "r", "d", "b", "k", "S", "P", "pounds", "-",
}  # fmt: skip
_PARAGRAPH = re.compile(r"\r?\n[ \t]*\r?\n\s*")


def latex_blocks(text: str) -> Iterator[TextBlock]:
    """Paragraphs, items and headings of a document's body; formulas in a line stay as they are written.

    Tables, figures, displayed formulas, code, notes and citations are left out.
    """
    walker: Any = import_extra("pylatexenc.latexwalker", "Reading LaTeX")
    latex2text: Any = import_extra("pylatexenc.latex2text", "Reading LaTeX")
    nodes, _, _ = walker.LatexWalker(text, tolerant_parsing=True).get_latex_nodes()
    reader = _Reader(text, latex2text.LatexNodes2Text(math_mode="verbatim"))
    bodies = [node for node in nodes if getattr(node, "environmentname", None) == "document"]
    reader.walk(bodies[0].nodelist if bodies else nodes)
    return iter(reader.blocks())


class _Reader:
    """Walks the nodes, and collects pieces of text into blocks."""

    def __init__(self, text: str, to_text: Any) -> None:
        self._text, self._to_text = text, to_text
        self._blocks: list[TextBlock] = []
        self._pieces: list[TextSpan] = []
        self._kinds: dict[str, Callable[[Any], None]] = {
            "LatexCharsNode": self._characters,
            "LatexCommentNode": self._comment,
            "LatexGroupNode": lambda node: self.walk(node.nodelist),
            "LatexMathNode": self._formula,
            "LatexSpecialsNode": self._special,
            "LatexEnvironmentNode": self._environment,
            "LatexMacroNode": self._macro,
        }

    def blocks(self) -> list[TextBlock]:
        """All blocks, the open one too."""
        self._close()
        return self._blocks

    def walk(self, nodes: Iterable[Any] | None) -> None:
        """Read nodes in order."""
        for node in nodes or ():
            if node is not None:
                self._kinds[type(node).__name__](node)

    def _characters(self, node: Any) -> None:
        place = node.pos
        for gap in _PARAGRAPH.finditer(node.chars):
            self._literal(place, node.pos + gap.start())
            self._close()
            place = node.pos + gap.end()
        self._literal(place, node.pos + node.len)

    def _comment(self, node: Any) -> None:
        if "\n" in node.comment_post_space.removeprefix("\r").removeprefix("\n"):  # an empty line behind it
            self._close()

    def _formula(self, node: Any) -> None:
        if node.displaytype == "inline":
            self._literal(node.pos, node.pos + node.len)

    def _special(self, node: Any) -> None:
        if node.specials_chars.startswith("\n"):
            self._close()
        else:
            self._whole(node)

    def _environment(self, node: Any) -> None:
        if node.environmentname.rstrip("*") in _PROSE:
            self._close()
            if node.environmentname == "abstract":
                self._blocks.append(TextBlock((TextSpan("Abstract", node.pos, node.pos),), 1))
            self.walk(node.nodelist)
            self._close()

    def _macro(self, node: Any) -> None:
        name = node.macroname.rstrip("*")
        if name in _HEADINGS:
            self._close()
            self._argument(node)
            self._close(_HEADINGS[name])
        elif name in _TRANSPARENT:
            self._argument(node)
        elif name in _BREAKS:
            self._close()
        elif name in _SYMBOLS:
            self._whole(node)
        elif not self._text[node.pos + node.len : node.pos + node.len + 1].isalnum():
            self._strip()

    def _strip(self) -> None:
        """Take away the space before what is left out, such as a citation at the end of a sentence."""
        while self._pieces and not self._pieces[-1].text.strip():
            self._pieces.pop()
        if self._pieces and len(self._pieces[-1].text) == self._pieces[-1].end - self._pieces[-1].start:
            last = self._pieces[-1]
            text = last.text.rstrip()
            self._pieces[-1] = TextSpan(text, last.start, last.start + len(text))

    def _argument(self, node: Any) -> None:
        """The last argument of a macro, which is the one that is printed."""
        given = [argument for argument in (node.nodeargd.argnlist if node.nodeargd else ()) if argument is not None]
        self.walk(given[-1:])

    def _literal(self, start: int, end: int) -> None:
        if end > start:
            self._pieces.append(TextSpan(self._text[start:end], start, end))

    def _whole(self, node: Any) -> None:
        """A node that reads as what pylatexenc makes of it, as a whole."""
        text = self._to_text.nodelist_to_text([node])
        if text:
            self._pieces.append(TextSpan(text, node.pos, node.pos + node.len))

    def _close(self, level: int = 0) -> None:
        if self._pieces:
            self._blocks.append(TextBlock(tuple(self._pieces), level))
        self._pieces = []

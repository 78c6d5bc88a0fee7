"""Write MathML on one line: `<mfrac>` as a/b, `<msup>` as a^b, relations between spaces."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_UNPRINTED = {"annotation", "annotation-xml", "mphantom", "maligngroup", "malignmark", "none"}
_OTHER_TAGS = {"math", "semantics", "annotation", "annotation-xml", "none"}
_TOKENS = {"mi", "mn", "mo", "ms", "mtext"}
_INVISIBLE_OPERATORS = str.maketrans(dict.fromkeys("\u2061\u2062\u2063\u2064\u200b"))
# Infix operators that are printed between spaces; the signs have none at the beginning of an expression.
_SPACED = set("=≠<>≤≥≪≫≈≃≅∼~≡∝∈∉⊂⊆⊃⊇→←↔⇒⇐⇔↦∧∨∪∩+±∓×÷⋅") | {"-", "−", ":=", "<=", ">=", "!="}
_SIMPLE = re.compile(r"\w*|[^\w\s]")


def is_math_tag(tag: str) -> bool:
    """Return whether a name, without the prefix of its namespace, is one of MathML."""
    return tag in _OTHER_TAGS or (tag.startswith("m") and tag not in ("main", "map", "mark", "menu", "meta", "meter"))


def local_name(tag: str) -> str:
    """Return the name of an element without the prefix of its namespace: `math` for `mml:math`."""
    return tag.rpartition(":")[2]


@dataclass
class _Element:
    """An element with its children and texts in order."""

    tag: str
    children: list[_Element | str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The printed children, each on one line."""
        return [child.line for child in self.children if isinstance(child, _Element) and child.tag not in _UNPRINTED]

    @property
    def line(self) -> str:
        """The element on one line."""
        if self.tag in _UNPRINTED:
            return ""
        if self.tag in _TOKENS:
            text = "".join(child if isinstance(child, str) else child.line for child in self.children)
            return " ".join(text.translate(_INVISIBLE_OPERATORS).split())
        if self.tag == "mspace":
            return " "
        return self._layout(self.parts)

    def _layout(self, parts: list[str]) -> str:
        """Return the children as the element arranges them."""
        marks = {"msup": "^", "mover": "^", "msub": "_", "munder": "_", "mfrac": "/"}
        if self.tag in marks and len(parts) == 2:
            return marks[self.tag].join(map(_grouped, parts))
        if self.tag in ("msubsup", "munderover") and len(parts) == 3:
            base, below, above = map(_grouped, parts)
            return f"{base}_{below}^{above}"
        if self.tag == "mroot" and len(parts) == 2:
            return f"{_grouped(parts[0])}^(1/{parts[1]})"
        if self.tag == "mtable":
            return "; ".join(parts)
        if self.tag in ("mtr", "mlabeledtr"):
            return ", ".join(parts)
        if self.tag == "mfenced":
            return f"({', '.join(parts)})"
        if self.tag == "semantics":
            return parts[0] if parts else ""
        row = self._row()
        return f"√{_grouped(row)}" if self.tag == "msqrt" else row

    def _row(self) -> str:
        """Return the children one after the other, with spaces around infix operators."""
        line = ""
        for child in self.children:
            text = child.strip() if isinstance(child, str) else child.line
            is_infix = isinstance(child, _Element) and child.tag == "mo" and text in _SPACED
            if is_infix and line and not line.endswith((" ", "(", "[", ",")):
                text = f" {text} "
            line += text
        return line if line.isspace() else line.strip()


def _grouped(text: str) -> str:
    """Return a part of a formula, in parentheses if it has several symbols."""
    if _SIMPLE.fullmatch(text) or (text.startswith("(") and text.find(")") == len(text) - 1):
        return text
    return f"({text})"


class MathCollector:
    """Collects the elements and texts of one formula.

    Attributes:
        depth: number of open elements.
    """

    def __init__(self) -> None:
        self._root = _Element("mrow")
        self._open = [self._root]

    @property
    def depth(self) -> int:
        return len(self._open) - 1

    @property
    def allows_markup(self) -> bool:
        """Whether the innermost element may have elements of HTML."""
        return self._open[-1].tag in ("mtext", "annotation-xml")

    def start(self, tag: str) -> None:
        """Open an element."""
        element = _Element(local_name(tag))
        self._open[-1].children.append(element)
        self._open.append(element)

    def end(self, tag: str) -> None:
        """Close the innermost open element with the name, and all elements inside it."""
        names = [element.tag for element in self._open]
        name = local_name(tag)
        if name in names[1:]:
            del self._open[len(names) - 1 - names[::-1].index(name) :]

    def add(self, text: str) -> None:
        """Add text to the innermost open element."""
        self._open[-1].children.append(text)

    def line(self) -> str:
        """Return the formula on one line."""
        return self._root.line.strip()

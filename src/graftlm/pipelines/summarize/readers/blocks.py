"""Collect the text of nested markup elements into blocks; the HTML and JATS readers share this."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan

ElementRole = BlockKind | Literal["inline", "skipped", "hidden", ""]
"""Kind of the text of an element. The empty role ends the block before the element and has no kind.

A hidden element is skipped without ending the block.
"""

# From the strongest to the weakest: the kind of a block is the strongest role of the elements around it.
_PRECEDENCE: tuple[BlockKind | Literal["skipped", "hidden"], ...] = (
    "skipped",
    "hidden",
    "furniture",
    "reference",
    "caption",
    "table",
    "formula",
    "code",
    "prose",
    "field",
)
_MIN_LINK_SHARE = 0.6  # minimum share of linked characters in a navigation block
_RAISED = str.maketrans("0123456789+-−=()in", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁱⁿ")
_LOWERED = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_SHIFTED = re.compile(r"[\d+\-−=()]+[in]?|[in]|(?:\d|[,–\s])+")


def shifted_text(text: str, tag: str) -> str:
    """Return the numbers of `sup` and `sub` as raised and lowered characters, so that 10⁶ is not read as 106.

    Args:
        text: the text.
        tag: `sup`, `sub`, or another name, with which the text stays.
    """
    tables = {"sup": _RAISED, "sub": _LOWERED}
    if tag not in tables or not _SHIFTED.fullmatch(text):
        return text
    return text.translate(tables[tag])


def strongest_role(roles: Iterable[ElementRole]) -> BlockKind | Literal["skipped", "hidden"]:
    """Return the role of a text inside elements with these roles; `prose` if none of them has a kind."""
    given = set(roles)
    for role in _PRECEDENCE:
        if role in given:
            return role
    return "prose"


@dataclass(eq=False)
class OpenElement:
    """An element whose end was not read yet. It equals only itself.

    Attributes:
        tag: name of the element.
        role: role of its text.
        level: level of a heading; 0 for other elements.
        first_block: index of the first block of the main element; None for other elements.
        is_concealed: whether an attribute hides the element, so that its text is counted.
        interrupted: spans of the block that goes on after the element; None if the element ends the block.
    """

    tag: str
    role: ElementRole
    level: int = 0
    first_block: int | None = None
    is_concealed: bool = False
    interrupted: list[TextSpan] | None = None


@dataclass
class BlockCollector:
    """Collects text spans, and closes a block at each tag that is not inline.

    Attributes:
        blocks: the closed blocks.
        elements: the open elements, from the outermost.
        spans: the spans of the open block.
        linked: number of characters of `spans` that are in links.
        main: indices of the blocks of the main element.
        concealed: number of characters that attributes hide.
        deferred: blocks inside an open paragraph, such as its footnotes, which follow it.
    """

    blocks: list[TextBlock] = field(default_factory=list)
    elements: list[OpenElement] = field(default_factory=list)
    spans: list[TextSpan] = field(default_factory=list)
    linked: int = 0
    main: range | None = None
    concealed: int = 0
    deferred: list[TextBlock] = field(default_factory=list)

    @property
    def kind(self) -> BlockKind | Literal["skipped", "hidden"]:
        """The strongest role of the open elements."""
        return strongest_role(element.role for element in self.elements)

    def open(
        self,
        tag: str,
        role: ElementRole,
        level: int = 0,
        *,
        is_main: bool = False,
        is_concealed: bool = False,
        interrupts: bool = False,
    ) -> None:
        """Open an element.

        Args:
            tag: name of the element.
            role: role of its text.
            level: level of a heading; 0 for other elements.
            is_main: whether the blocks outside the element are furniture.
            is_concealed: whether an attribute hides the element.
            interrupts: whether the open block goes on after the element, as a paragraph `p` after its footnote.
        """
        if any(outer.role == "hidden" for outer in self.elements):
            role = "inline"  # The open block goes on after the hidden element.
        element = OpenElement(tag, role, level, is_concealed=is_concealed)
        if interrupts:
            element.interrupted = self.spans
            self.spans = []
        elif role not in ("inline", "hidden"):
            self.close_block()
        if is_main:
            element.first_block = len(self.blocks)
        self.elements.append(element)

    def close(self, tag: str) -> None:
        """Close the innermost open element with the tag, and all elements inside it; ignore an unmatched tag."""
        if all(element.tag != tag for element in self.elements):
            return
        while self._close_innermost() != tag:
            pass

    def finish(self) -> None:
        """Close all open elements and the open block."""
        while self.elements:
            self._close_innermost()
        self.close_block()

    def _close_innermost(self) -> str:
        """Close the innermost element and return its tag."""
        element = self.elements[-1]
        if element.role not in ("inline", "hidden"):
            self.close_block()
        self.elements.pop()
        if element.interrupted is not None:
            self.spans = element.interrupted
        if not any(outer.tag == "p" for outer in self.elements):
            self.blocks.extend(self.deferred)
            self.deferred = []
        if element.first_block is not None:
            self.main = range(element.first_block, len(self.blocks))
        return element.tag

    def add(self, span: TextSpan) -> None:
        """Add text of the innermost open element to the open block, unless an open element is skipped or hidden."""
        if self.kind in ("skipped", "hidden"):
            if any(element.is_concealed for element in self.elements):
                self.concealed += len(span.text.strip())
            return
        self.spans.append(self._shifted(span))
        if any(element.tag == "a" for element in self.elements):
            self.linked += len(span.text.strip())

    def _shifted(self, span: TextSpan) -> TextSpan:
        """Return the span with raised or lowered characters, if it is in such an element."""
        tag = next((element.tag for element in reversed(self.elements) if element.tag in ("sup", "sub")), "")
        return replace(span, text=shifted_text(span.text, tag))

    def close_block(self) -> None:
        """End the open block, and append it to `blocks` if it has text.

        Prose that consists mostly of links is navigation, whose kind is `furniture`.
        """
        if self.spans:
            kind = self.kind
            level = self.heading_level if kind in ("prose", "reference") else 0
            if kind == "prose" and not level and self._is_navigation():
                kind = "furniture"
            assert kind not in ("skipped", "hidden"), "these elements add no spans"
            block = TextBlock(tuple(self.spans), level, kind=kind)
            is_aside = any(element.interrupted is not None for element in self.elements)
            blocks = self.deferred if is_aside else self.blocks
            blocks.append(block)
        self.spans = []
        self.linked = 0

    @property
    def heading_level(self) -> int:
        """The level of the open headings; 0 outside headings."""
        levels = (element.level for element in self.elements)
        return max(levels, default=0)

    def _is_navigation(self) -> bool:
        """Return whether most characters of the open block are in links, and it does not end as a sentence."""
        length = sum(len(span.text.strip()) for span in self.spans)
        text = "".join(span.text for span in self.spans)
        ends_sentence = text.rstrip()[-1:] in (".", "!", "?")
        return not ends_sentence and self.linked > _MIN_LINK_SHARE * length

"""Collect the text of nested markup elements into blocks; the HTML and JATS readers share this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan

ElementRole = BlockKind | Literal["inline", "skipped", ""]
"""Kind of the text of an element. The empty role ends the block before the element and has no kind."""

# From the strongest to the weakest: the kind of a block is the strongest role of the elements around it.
_PRECEDENCE: tuple[BlockKind | Literal["skipped"], ...] = (
    "skipped",
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


@dataclass
class OpenElement:
    """An element whose end was not read yet.

    Attributes:
        tag: name of the element.
        role: role of its text.
        level: level of a heading; 0 for other elements.
        first_block: index of the first block of the main element; None for other elements.
    """

    tag: str
    role: ElementRole
    level: int = 0
    first_block: int | None = None


@dataclass
class BlockCollector:
    """Collects text spans, and closes a block at each tag that is not inline.

    Attributes:
        blocks: the closed blocks.
        elements: the open elements, from the outermost.
        spans: the spans of the open block.
        linked: number of characters of `spans` that are in links.
        main: indices of the blocks of the main element.
    """

    blocks: list[TextBlock] = field(default_factory=list)
    elements: list[OpenElement] = field(default_factory=list)
    spans: list[TextSpan] = field(default_factory=list)
    linked: int = 0
    main: range | None = None

    @property
    def kind(self) -> BlockKind | Literal["skipped"]:
        """The strongest role of the open elements."""
        roles = {element.role for element in self.elements}
        for role in _PRECEDENCE:
            if role in roles:
                return role
        return "prose"

    def open(self, tag: str, role: ElementRole, level: int = 0, *, is_main: bool = False) -> None:
        """Open an element.

        Args:
            tag: name of the element.
            role: role of its text.
            level: level of a heading.
            is_main: whether the blocks outside the element are furniture.
        """
        if role != "inline":
            self.close_block()
        first_block = len(self.blocks) if is_main else None
        self.elements.append(OpenElement(tag, role, level, first_block))

    def close(self, tag: str) -> None:
        """Close the innermost open element with the tag, and all elements inside it; ignore an unmatched tag."""
        if all(element.tag != tag for element in self.elements):
            return
        while self._close_innermost() != tag:
            pass

    def _close_innermost(self) -> str:
        """Close the innermost element and return its tag."""
        if self.elements[-1].role != "inline":
            self.close_block()
        element = self.elements.pop()
        if element.first_block is not None:
            self.main = range(element.first_block, len(self.blocks))
        return element.tag

    def add(self, span: TextSpan) -> None:
        """Add text of the innermost open element to the open block, unless an open element is skipped."""
        if self.kind == "skipped":
            return
        self.spans.append(span)
        if any(element.tag == "a" for element in self.elements):
            self.linked += len(span.text.strip())

    def close_block(self) -> None:
        """End the open block, and append it to `blocks` if it has text.

        Prose that consists mostly of links is navigation, whose kind is `furniture`.
        """
        if self.spans:
            kind = self.kind
            level = self._heading_level() if kind in ("prose", "reference") else 0
            if kind == "prose" and not level and self._is_navigation():
                kind = "furniture"
            assert kind != "skipped", "skipped elements add no spans"
            block = TextBlock(tuple(self.spans), level, kind=kind)
            self.blocks.append(block)
        self.spans = []
        self.linked = 0

    def _heading_level(self) -> int:
        levels = (element.level for element in self.elements)
        return max(levels, default=0)

    def _is_navigation(self) -> bool:
        """Return whether most characters of the open block are in links, and it does not end as a sentence."""
        length = sum(len(span.text.strip()) for span in self.spans)
        text = "".join(span.text for span in self.spans)
        ends_sentence = text.rstrip()[-1:] in (".", "!", "?")
        return not ends_sentence and self.linked > _MIN_LINK_SHARE * length

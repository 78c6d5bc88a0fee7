"""Turn the lines of PDF pages into headings, paragraphs and other blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.pdf_lines import PdfLine, without_line_numbers
from graftlm.pipelines.summarize.readers.plain import heading_level, list_item, looks_like_prose

_MARGIN = 0.12  # share of a page's height that running headers and footers take
_MIN_REPEATS = 3  # pages with the same line in their margins, from which it is a running header or footer
_LARGER = 1.1  # times the size of the body, above which a line is a heading
_SMALLER = 0.87  # times the size of the body, below which a line is a note
_MAX_HEADING_WORDS = 15
_MONOSPACE = re.compile(r"mono|courier|typewriter|consol|menlo|cmtt|sltt|tt\d", re.IGNORECASE)
_BOLD = re.compile(r"bold|black|heavy|cmbx|-medi", re.IGNORECASE)
_CAPTION = re.compile(r"\s*(?:Fig(?:ure|\.)?|Table|Tab\.|Listing|Algorithm|Scheme)\s+[A-Z]?\d[\d.]*\s*[.:|–—-]?\s")
_PAGE_NUMBER = re.compile(r"\W*(?:page\s+)?(?:\d{1,4}|[ivxlc]{1,7})(?:\s*(?:of|/)\s*\d{1,4})?\W*", re.IGNORECASE)
_LEADERS = re.compile(r"(?:\s?\.){5,}")  # dots of a table of contents
_HYPHEN = re.compile(r"(\w+)([-‐\u00ad])\s*\n\s*$")
_NUMBER = re.compile(r"\d+|\b[ivxlc]+\b")


def layout_blocks(pages: Sequence[Sequence[PdfLine]], notes: list[str]) -> Iterator[TextBlock]:
    """Join the lines of pages into headings, paragraphs and other blocks, and yield the blocks in order.

    The numbers that manuscripts have at the margin of each line are left out.

    Args:
        pages: the lines of each page, in reading order.
        notes: receives the number of line numbers.
    """
    unnumbered = [without_line_numbers(page) for page in pages]
    count = sum(removed for _, removed in unnumbered)
    if count:
        notes.append(f"has line numbers ({count:,} in all), which are not read")
    pages = [lines for lines, _ in unnumbered]
    layout = _DocumentLayout(pages)
    for number, page in enumerate(pages, start=1):
        for (_, kind, level), lines in groupby(page, layout.group):
            for part in _split_items(list(lines), kind):
                yield _block(part, kind, level, number, layout.words)


class _DocumentLayout:
    """The sizes, running headers and words of a document, by which its lines are classified."""

    def __init__(self, pages: Sequence[Sequence[PdfLine]]) -> None:
        lines = [line for page in pages for line in page]
        sizes = Counter[float]()
        for line in lines:
            sizes[line.size] += len(line.text)
        self.body = sizes.most_common(1)[0][0] if sizes else 0.0
        self.larger = sorted({size for size in sizes if size > _LARGER * self.body}, reverse=True)
        text = " ".join(line.text for line in lines)
        self.words = set(re.findall(r"[\w-]+", text.casefold()))
        self._repeats = Counter[tuple[str, bool]]()
        for page in pages:
            self._repeats.update({_furniture_key(line) for line in page if _in_margin(line)})
        self._min_repeats = min(_MIN_REPEATS, max(len(pages), 2))

    def group(self, line: PdfLine) -> tuple[int, BlockKind, int]:
        """Return the key by which adjacent lines are joined to a block: box, kind, and level of a heading."""
        kind, level = self._classify(line)
        return line.box, kind, level

    def _classify(self, line: PdfLine) -> tuple[BlockKind, int]:
        """Return the kind of a single line, and the level of a heading, from 1."""
        if self._is_furniture(line):
            return "furniture", 0
        if _MONOSPACE.search(line.font):
            return "code", 0
        level = self._heading_level(line)
        if level:
            return "heading", level
        if line.size < _SMALLER * self.body:
            return "note", 0
        return "prose", 0

    def _is_furniture(self, line: PdfLine) -> bool:
        """Return whether a line is a page number or a running header or footer."""
        if not _in_margin(line):
            return False
        if _PAGE_NUMBER.fullmatch(line.text.strip()):
            return True
        return self._repeats[_furniture_key(line)] >= self._min_repeats

    def _heading_level(self, line: PdfLine) -> int:
        """Return the level of a heading, by its numbers, size or weight; 0 for other lines."""
        has_letter = any(character.isalpha() for character in line.text)
        if not has_letter or len(line.text.split()) > _MAX_HEADING_WORDS:
            return 0
        level = heading_level(line.text, "", isolated=True)
        if level:
            return level
        if line.size > _LARGER * self.body:
            return self.larger.index(line.size) + 1
        is_bold = _BOLD.search(line.font) is not None
        if is_bold and line.text.strip()[-1:] not in ".:,;":
            return len(self.larger) + 1
        return 0


def _in_margin(line: PdfLine) -> bool:
    return not _MARGIN < line.height < 1 - _MARGIN


def _furniture_key(line: PdfLine) -> tuple[str, bool]:
    """Return the key by which a running header is recognized on other pages: text without numbers, and margin."""
    text = " ".join(line.text.split()).casefold()
    return _NUMBER.sub("#", text), line.height > 0.5


def _split_items(lines: Sequence[PdfLine], kind: BlockKind) -> Iterator[Sequence[PdfLine]]:
    """Yield the lines of each item of a list in prose, and all lines of another block."""
    first = 0
    if kind == "prose":
        for index in range(1, len(lines)):
            if list_item(lines[index].text):
                yield lines[first:index]
                first = index
    yield lines[first:]


def _block(lines: Sequence[PdfLine], kind: BlockKind, level: int, page: int, words: set[str]) -> TextBlock:
    spans = tuple(_joined(lines, words))
    text = "".join(span.text for span in spans)
    return TextBlock(spans, level, page, _refine_kind(kind, text))


def _refine_kind(kind: BlockKind, text: str) -> BlockKind:
    """Return the kind of a block, given the kind of its lines and its text."""
    if kind == "heading":
        return "prose"  # A block with a level is a heading.
    if kind in ("prose", "note") and _CAPTION.match(text):
        return "caption"
    if kind == "prose" and not looks_like_prose(text):
        return "table"
    if kind == "prose" and _LEADERS.search(text):
        return "furniture"
    return kind


def _joined(lines: Sequence[PdfLine], words: set[str]) -> Iterator[TextSpan]:
    """Yield the spans of lines. A hyphen at the end of a line is removed if the document has the word without it."""
    for index, line in enumerate(lines):
        following = lines[index + 1].text if index + 1 < len(lines) else ""
        start = list_item(line.text) if index == 0 else 0
        end = _end_of_text(line.text, following, words)
        yield TextSpan(line.text[start:end], line.start + start, line.start + end)


def _end_of_text(line: str, following: str, words: set[str]) -> int:
    """Return the end of the text of a line, without a hyphen that divides a word."""
    hyphen = _HYPHEN.search(line)
    if hyphen is None or not following[:1].islower():
        return len(line)
    rest = re.match(r"\w+", following)
    ending = rest[0] if rest else ""
    compound = f"{hyphen[1]}-{ending}".casefold()
    is_compound = compound in words and compound.replace("-", "") not in words
    return hyphen.end(2) if is_compound else hyphen.end(1)


def merge_divided(blocks: Iterable[TextBlock]) -> Iterator[TextBlock]:
    """Yield blocks after joining the pieces of paragraphs that a column, a figure or a footnote divides on a page.

    The order stays the same; blocks that divide a paragraph follow it.
    """
    pending: TextBlock | None = None
    following: list[TextBlock] = []  # blocks after `pending` that are not prose
    for block in blocks:
        if block.kind != "prose":
            following.append(block)
        elif pending is not None and _continues(pending, block):
            pending = TextBlock((*pending.spans, *block.spans), 0, block.page)
        else:
            if pending is not None:
                yield pending
            yield from following
            pending = block
            following = []
    if pending is not None:
        yield pending
    yield from following


def _continues(block: TextBlock, following: TextBlock) -> bool:
    """Return whether two paragraphs are one: the first ends inside a sentence, the second begins in lower case."""
    if block.level or following.level or block.page != following.page:
        return False
    return following.text[:1].islower() and block.text.rstrip()[-1:].isalnum()

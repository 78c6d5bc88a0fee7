"""PDF reader. pdfminer.six finds lines, columns and fonts; here lines become headings, paragraphs and what is no prose.

Spans refer to the text of a page as pdfminer's `extract_text` writes it.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, first_line
from graftlm.pipelines.summarize.document import BlockKind, SourceDocument, TextBlock, TextSpan, build_document
from graftlm.pipelines.summarize.readers.plain import heading_level, list_item, looks_like_prose
from graftlm.pipelines.summarize.text import import_extra

_MARGIN = 0.12  # share of a page's height, above and below, where running heads and feet stand
_MIN_REPEATS = 3  # pages with the same line in their margins
_MONOSPACE = re.compile(r"mono|courier|typewriter|consol|menlo|cmtt|sltt|tt\d", re.IGNORECASE)
_BOLD = re.compile(r"bold|black|heavy|cmbx|-medi", re.IGNORECASE)
_CAPTION = re.compile(r"\s*(?:Fig(?:ure|\.)?|Table|Tab\.|Listing|Algorithm|Scheme)\s+[A-Z]?\d[\d.]*\s*[.:|–—-]?\s")
_PAGE_NUMBER = re.compile(r"\W*(?:page\s+)?(?:\d{1,4}|[ivxlc]{1,7})(?:\s*(?:of|/)\s*\d{1,4})?\W*", re.IGNORECASE)
_LEADERS = re.compile(r"(?:\s?\.){5,}")  # of a table of contents
_HYPHEN = re.compile(r"(\w+)([-‐\u00ad])\s*\n\s*$")
_MAX_HEADING_WORDS = 15
_MAIN = f"import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; from {__name__} import _main; _main()"
_CHILD_LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_DATA": 512 * 2**20}  # seconds (by the clock too) and bytes, for one file


@dataclass(frozen=True, slots=True)
class PdfLine:
    """A line of a page: its text and where that begins, its box of text, height on the page (0 to 1), font and size."""

    text: str
    start: int
    box: int
    height: float
    font: str
    size: float


def read_pdf(source: Path | BytesIO, path: str, max_characters: int) -> tuple[list[str], list[TextBlock]]:
    """Return each page's text, and all blocks; DataError if the file is encrypted, damaged, scanned or too large.

    Messages call the file `path`.
    """
    pdfminer: Any = import_extra("pdfminer.high_level", "Reading PDF files")
    document: Any = import_extra("pdfminer.pdfdocument", "Reading PDF files")
    logging.getLogger("pdfminer").setLevel(logging.ERROR)
    pages: list[str] = []
    lines: list[list[PdfLine]] = []
    try:
        for layout in pdfminer.extract_pages(source, laparams=pdfminer.LAParams(all_texts=True)):
            text, page = _page_lines(layout)
            pages.append(text)
            lines.append(page)
            if sum(map(len, pages)) > max_characters:
                raise DataError(f"{path} has more than {max_characters:,} characters of text: split it into chapters.")
    except (DataError, MemoryError):
        raise
    except document.PDFPasswordIncorrect:
        raise DataError(f"{path} is encrypted and asks for a password: save a copy without one.") from None
    except Exception as error:  # pdfminer raises nearly anything on a damaged file
        cause = first_line(error) or type(error).__name__
        raise DataError(f"{path} is not a whole PDF file ({cause}): save or fetch it again.") from None
    if not pages:
        raise DataError(f"{path} is not a whole PDF file (it has no page): save or fetch it again.")
    if not any(page.strip() for page in pages):
        raise DataError(f"{path} has {len(pages)} pages and no text, as scans have: recognize the text first (OCR).")
    return pages, list(_merged(pdf_blocks(lines)))


def read_foreign_pdf(data: bytes, name: str, max_characters: int, language: str | None = None) -> SourceDocument:
    """Read bytes from anywhere as `read_pdf` does, in a process of its own: a minute, 512 MiB of memory."""
    import_extra("pdfminer.high_level", "Reading PDF files")
    command = [sys.executable, "-P", "-c", _MAIN, name, str(max_characters)]
    try:
        child = subprocess.run(command, input=data, capture_output=True, timeout=_CHILD_LIMITS["RLIMIT_CPU"])
        message, pages, blocks = json.loads(child.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no answer, or half of one
        raise DataError(f"{name} takes more than a minute or 512 MiB of memory to read: send its text.") from None
    if message:
        raise DataError(message)
    read = [TextBlock(tuple(TextSpan(*span) for span in spans), *rest) for spans, *rest in blocks]
    return build_document(name, pages, read, language)


def _main() -> None:
    """The process of `read_foreign_pdf`: a message or null, the pages and the blocks, as JSON."""
    import resource  # as the server, it is of POSIX

    for name, limit in _CHILD_LIMITS.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    try:
        pages, blocks = read_pdf(BytesIO(sys.stdin.buffer.read()), sys.argv[1], int(sys.argv[2]))
        sys.stdout.write(json.dumps([None, pages, [astuple(block) for block in blocks]]))
    except DataError as error:
        sys.stdout.write(json.dumps([str(error), [], []]))


def _page_lines(layout: Any) -> tuple[str, list[PdfLine]]:
    """Return the text of a page as pdfminer's `extract_text` writes it, and its lines."""
    text, lines = "", []
    for number, box in enumerate(_text_boxes(layout)):
        for line in box:
            characters = [item for item in line if hasattr(item, "fontname") and item.get_text().strip()]
            if characters:
                font = Counter(item.fontname for item in characters).most_common(1)[0][0]
                size = Counter(round(item.size, 1) for item in characters).most_common(1)[0][0]
                height = (line.y0 + line.y1) / 2 / max(layout.height, 1)
                lines.append(PdfLine(line.get_text(), len(text), number, height, font, size))
            text += line.get_text()
        text += "\n"
    return text, lines


def _text_boxes(container: Any) -> Iterator[Any]:
    """Yield the boxes of text of a page, with those of its figures."""
    for element in container:
        if hasattr(element, "get_text") and hasattr(element, "__iter__"):
            yield element
        elif type(element).__name__ == "LTFigure":
            yield from _text_boxes(element)


def pdf_blocks(pages: Sequence[Sequence[PdfLine]]) -> Iterator[TextBlock]:
    """Yield the blocks of all pages in order."""
    sizes = Counter[float]()
    for line in (line for page in pages for line in page):
        sizes[line.size] += len(line.text)
    body = sizes.most_common(1)[0][0] if sizes else 0.0
    larger = sorted({size for size in sizes if size > 1.1 * body}, reverse=True)
    repeated = Counter(key for page in pages for key in {_furniture_key(line) for line in page if _in_margin(line)})
    words = set(re.findall(r"[\w-]+", " ".join(line.text for page in pages for line in page).casefold()))

    def kind_of(line: PdfLine) -> tuple[BlockKind, int]:
        """Return the kind of a line alone, and the level of a heading."""
        is_number = _PAGE_NUMBER.fullmatch(line.text.strip()) is not None
        if _in_margin(line) and (is_number or repeated[_furniture_key(line)] >= min(_MIN_REPEATS, max(len(pages), 2))):
            return "furniture", 0
        if _MONOSPACE.search(line.font):
            return "code", 0
        level = heading_level(line.text, "", isolated=True)
        is_short = len(line.text.split()) <= _MAX_HEADING_WORDS and any(map(str.isalpha, line.text))
        if is_short and line.size > 1.1 * body:
            return "heading", level or larger.index(line.size) + 1
        if is_short and (level or (_BOLD.search(line.font) and line.text.strip()[-1:] not in ".:,;")):
            return "heading", level or len(larger) + 1
        return ("note" if line.size < 0.87 * body else "prose"), 0

    for number, page in enumerate(pages, 1):
        for (_, kind, level), group in groupby(page, lambda line: (line.box, *kind_of(line))):
            yield from _paragraphs(list(group), kind, level, number, words)


def _merged(blocks: Iterable[TextBlock]) -> Iterator[TextBlock]:
    """Join the two pieces of a paragraph that a column, a figure or a footnote divides on a page."""
    pending: TextBlock | None = None
    for block in blocks:
        if block.kind != "prose":
            yield block
            continue
        if pending is not None:
            is_open = not (block.level or pending.level) and block.page == pending.page
            if is_open and block.text[:1].islower() and pending.text.rstrip()[-1:].isalnum():
                pending = TextBlock((*pending.spans, *block.spans), 0, block.page)
                continue
            yield pending
        pending = block
    if pending is not None:
        yield pending


def _paragraphs(lines: list[PdfLine], kind: BlockKind, level: int, page: int, words: set[str]) -> Iterator[TextBlock]:
    """Yield the block of lines of one kind, or several where items of a list begin."""
    starts = [0, *(index for index in range(1, len(lines)) if kind == "prose" and list_item(lines[index].text))]
    for first, last in zip(starts, [*starts[1:], len(lines)], strict=True):
        spans = tuple(_joined(lines[first:last], words))
        text = "".join(span.text for span in spans)
        named: BlockKind = kind
        if kind in ("prose", "note") and _CAPTION.match(text):
            named = "caption"
        elif kind == "prose" and not looks_like_prose(text):
            named = "table"
        elif kind == "prose" and _LEADERS.search(text):
            named = "furniture"
        yield TextBlock(spans, level, page, "prose" if named == "heading" else named)


def _joined(rows: Sequence[PdfLine], words: set[str]) -> Iterator[TextSpan]:
    """Yield the spans of lines. A hyphen at the end of a line goes where the document has the word without it."""
    for line, following in zip(rows, [*rows[1:], None], strict=True):
        item = list_item(line.text) if line is rows[0] else 0
        match = _HYPHEN.search(line.text) if following is not None and following.text[:1].islower() else None
        if match is None or following is None:
            yield TextSpan(line.text[item:], line.start + item, line.start + len(line.text))
            continue
        rest = re.match(r"\w+", following.text)
        compound = f"{match[1]}-{rest[0] if rest else ''}".casefold()
        end = match.end(2) if compound in words and compound.replace("-", "") not in words else match.end(1)
        yield TextSpan(line.text[item:end], line.start + item, line.start + end)


def _in_margin(line: PdfLine) -> bool:
    return not _MARGIN < line.height < 1 - _MARGIN


def _furniture_key(line: PdfLine) -> tuple[str, bool]:
    """Return what the running heads of all pages have in common: the text without its numbers, and the side."""
    return re.sub(r"\d+|\b[ivxlc]+\b", "#", " ".join(line.text.split()).casefold()), line.height > 0.5

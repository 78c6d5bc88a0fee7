"""Readers of document formats: plain text and PDF here, HTML, LaTeX and Markdown in modules of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, first_line
from graftlm.io import BYTE_ORDER_MARK, decode_utf8, read_errors
from graftlm.pipelines.summarize.document import SourceDocument, TextBlock, TextSpan, build_document
from graftlm.pipelines.summarize.readers.html import html_blocks
from graftlm.pipelines.summarize.readers.latex import latex_blocks
from graftlm.pipelines.summarize.readers.markdown import markdown_blocks
from graftlm.pipelines.summarize.text import import_extra

MAX_CHARACTERS = 20_000_000
_MAX_PDF_BYTES = 500_000_000
_MAX_HEADING_WORDS = 12

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_UNDERLINE = re.compile(r"^\s*([=\-~^\"'`#*+_.])\1{2,}\s*$")
_UNDERLINE_LEVELS = {"=": 1, "#": 1, "*": 1, "-": 2}
_LIST_ITEM = re.compile(r"^\s*(?:[-*+•‣–]|\(?\d{1,3}[.)]|\(?[a-z]\))[ \t]+(?=\S)")
_NUMBERED_HEADING = re.compile(r"^\s*((?:\d{1,2}|[A-H])(?:\.\d{1,2}){0,3})\.?[ \t]+[^\W\d_a-z]")
_KNOWN_HEADING = re.compile(
    r"^\s*(?:(?:\d{1,2}|[IVX]+)\.?\s+)?(abstract|summary|introduction|motivation|background|overview|related work|"
    r"methods?|materials and methods|results?|discussion|conclusions?|acknowledge?ments?|references|bibliography|"
    r"appendix(?: \w)?)\s*[.:]?\s*$",
    re.IGNORECASE,
)
_SENTENCE_ENDS = ".!?;,。！？"


def read_document(path: str | Path, language: str | None = None) -> SourceDocument:
    """Read plain text, Markdown, HTML, LaTeX or PDF; the suffix decides.

    Args:
        path: the file. Text is UTF-8. Spans count its characters, line breaks and a byte order mark included.
        language: code such as `de`; None detects it from the script, with Latin script as English.

    Raises:
        DataError: the file can't be read, has another format, is encrypted, scanned or too large, or has no sentence.
        MissingExtraError: a library that reads the format is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no document that can be read: a file ending in {' '.join(SUFFIXES)} is expected.")
    if suffix == ".pdf":
        _check_file_size(path, _MAX_PDF_BYTES)
        pages = _read_pdf(path)
        blocks = (block for number, page in enumerate(pages, 1) for block in plain_blocks(page, number))
        return build_document(str(path), pages, blocks, language)
    return read_text(_read_utf8(path), suffix, str(path), language)


def read_text(text: str, suffix: str = ".txt", name: str = "The text", language: str | None = None) -> SourceDocument:
    """Read a document from a string in the format of `suffix`; raises as `read_document`."""
    _check_size(name, len(text), "characters", MAX_CHARACTERS)
    readable = f" {text[1:]}" if text.startswith("\ufeff") else text  # spans count the byte order mark
    return build_document(name, (text,), _TEXT_READERS[suffix](readable), language)


def plain_blocks(text: str, page: int | None = None) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings of plain text, or of a PDF page.

    PDF pages have few blank lines, so their headings need no blank lines around them.
    """
    paragraph: list[TextSpan] = []
    lines = [TextSpan(match.group(), match.start(), match.end()) for match in _LINE.finditer(text) if match.group()]
    for index, line in enumerate(lines):
        following = lines[index + 1].text if index + 1 < len(lines) else ""
        isolated = page is not None or not (paragraph or following.strip())
        level = _heading_level(line.text, following, isolated=isolated)
        item = _LIST_ITEM.match(line.text)
        if paragraph and (level or item or not line.text.strip()):
            yield TextBlock(tuple(paragraph), 0, page)
            paragraph = []
        if level:
            yield TextBlock((line,), level, page)
        elif not _UNDERLINE.match(line.text) and line.text.strip():
            marker = item.end() if item else 0
            paragraph.append(TextSpan(line.text[marker:], line.start + marker, line.end))
    if paragraph:
        yield TextBlock(tuple(paragraph), 0, page)


def _heading_level(line: str, following: str, *, isolated: bool) -> int:
    """Return the level of a heading, or 0 for any other line."""
    words = line.split()
    if not words or len(words) > _MAX_HEADING_WORDS or _UNDERLINE.match(line):
        return 0
    underline = _UNDERLINE.match(following)
    if underline and len(following.strip()) >= min(len(line.strip()), 4):
        return _UNDERLINE_LEVELS.get(underline[1], 3)
    if not isolated:
        return 0
    if _KNOWN_HEADING.match(line):
        return 1
    if line.strip()[-1] in _SENTENCE_ENDS:
        return 0
    if numbered := _NUMBERED_HEADING.match(line):
        return 1 + numbered[1].count(".")
    return 1 if line.isupper() and len(line.strip()) > 3 else 0


def _read_utf8(path: Path) -> str:
    _check_file_size(path, 4 * MAX_CHARACTERS)  # a character has at most four bytes
    with read_errors(path):
        data = path.read_bytes()
    if b"\0" in data:
        raise DataError(f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected.")
    return "\ufeff" * data.startswith(BYTE_ORDER_MARK) + decode_utf8(data, str(path))  # spans count the mark


def _read_pdf(path: Path) -> list[str]:
    """Return the text of each page."""
    pypdf: Any = import_extra("pypdf", "Reading PDF files")
    errors: Any = import_extra("pypdf.errors", "Reading PDF files")
    try:
        return _extract_pages(pypdf, path)
    except (errors.FileNotDecryptedError, errors.WrongPasswordError):
        raise _encrypted(path) from None
    except (errors.PyPdfError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        cause = first_line(error)
        raise DataError(f"{path} is not a whole PDF file ({cause}): save or fetch it again.") from None
    except errors.DependencyError:
        raise DataError(
            f"{path} is encrypted by AES, which pypdf reads with the package cryptography alone: "
            "run `pip install cryptography`."
        ) from None


def _extract_pages(pypdf: Any, path: Path) -> list[str]:
    with read_errors(path):
        reader = pypdf.PdfReader(path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise _encrypted(path)
    pages, total = [], 0
    for page in reader.pages:
        pages.append(page.extract_text())
        total += len(pages[-1])
        if total > MAX_CHARACTERS:
            raise DataError(f"{path} has more than {MAX_CHARACTERS:,} characters of text: split it into its chapters.")
    if not any(page.strip() for page in pages):
        raise DataError(
            f"{path} has {len(pages)} pages and no text, as scanned pages have: recognize the text first (OCR)."
        )
    return pages


def _check_file_size(path: Path, limit: int) -> None:
    with read_errors(path):
        _check_size(str(path), path.stat().st_size, "bytes", limit)


def _check_size(name: str, size: int, unit: str, limit: int) -> None:
    if size > limit:
        raise DataError(f"{name} has {size:,} {unit}, and one document may have {limit:,}: split it into its chapters.")


def _encrypted(path: Path) -> DataError:
    return DataError(f"{path} is encrypted and asks for a password: save a copy without one.")


_TEXT_READERS: dict[str, Callable[[str], Iterable[TextBlock]]] = {
    **dict.fromkeys((".txt", ".text", ".rst"), plain_blocks),
    **dict.fromkeys((".md", ".markdown"), markdown_blocks),
    **dict.fromkeys((".html", ".htm", ".xhtml"), html_blocks),
    ".tex": latex_blocks,
}
SUFFIXES = (*_TEXT_READERS, ".pdf")

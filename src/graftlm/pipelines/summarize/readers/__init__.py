"""Readers: a file becomes a document whose sentences point at their characters in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import SourceDocument, TextBlock, build_document
from graftlm.pipelines.summarize.readers.html import html_blocks
from graftlm.pipelines.summarize.readers.latex import latex_blocks
from graftlm.pipelines.summarize.readers.markdown import markdown_blocks
from graftlm.pipelines.summarize.readers.pdf import read_pages
from graftlm.pipelines.summarize.readers.plain import plain_blocks

MOST_CHARACTERS = 20_000_000
_MOST_PDF_BYTES = 500_000_000

_TEXTS: dict[str, Callable[[str], Iterable[TextBlock]]] = {
    ".txt": plain_blocks,
    ".text": plain_blocks,
    ".rst": plain_blocks,
    ".md": markdown_blocks,
    ".markdown": markdown_blocks,
    ".html": html_blocks,
    ".htm": html_blocks,
    ".xhtml": html_blocks,
    ".tex": latex_blocks,
}
SUFFIXES = (*_TEXTS, ".pdf")


def read_document(path: str | Path, language: str | None = None) -> SourceDocument:
    """Read a document: plain text, Markdown, HTML, LaTeX or PDF, by its suffix.

    Args:
        path: the file. Text is UTF-8; spans count its characters with line breaks, and a byte order mark, as they are.
        language: a code such as de, for abbreviations; None tells it by the script, and takes Latin script for English.

    Raises:
        DataError: the file can't be read, is no such document, is encrypted, scanned or too large, or has no sentence.
        MissingExtraError: a library that reads it is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no document that can be read: a file ending in {' '.join(SUFFIXES)} is expected.")
    if suffix == ".pdf":
        _check_size(path, _MOST_PDF_BYTES)
        pages = read_pages(path, MOST_CHARACTERS)
        blocks = (block for number, page in enumerate(pages, 1) for block in plain_blocks(page, number))
        return build_document(str(path), pages, blocks, language)
    return read_text(_read(path), suffix, str(path), language)


def read_text(text: str, suffix: str = ".txt", where: str = "The text", language: str | None = None) -> SourceDocument:
    """The document of a text in memory, in the form that `suffix` names.

    Raises:
        DataError: it is too large, or has no sentence.
    """
    if len(text) > MOST_CHARACTERS:
        raise DataError(too_large(where, len(text), "characters", MOST_CHARACTERS))
    readable = f" {text[1:]}" if text.startswith("\ufeff") else text  # a byte order mark keeps its place
    return build_document(where, (text,), _TEXTS[suffix](readable), language)


def _read(path: Path) -> str:
    _check_size(path, 4 * MOST_CHARACTERS)  # a character has at most four bytes
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the file.") from None
    if b"\0" in data:
        raise DataError(f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): convert it to UTF-8 first."
        ) from None


def _check_size(path: Path, most: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the file.") from None
    if size > most:
        raise DataError(too_large(str(path), size, "bytes", most))


def too_large(where: str, size: int, unit: str, most: int) -> str:
    """The sentence that refuses what does not fit into memory."""
    return f"{where} has {size:,} {unit}, and one document may have {most:,}: split it into its chapters."


__all__ = ["MOST_CHARACTERS", "SUFFIXES", "read_document", "read_text"]

"""Readers of document formats, by the suffix of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from graftlm.errors import DataError
from graftlm.files.reading import BYTE_ORDER_MARK, decode_utf8, read_errors
from graftlm.pipelines.summarize.document import SourceDocument, TextBlock, build_document
from graftlm.pipelines.summarize.readers.latex import latex_blocks
from graftlm.pipelines.summarize.readers.markdown import markdown_blocks
from graftlm.pipelines.summarize.readers.markup import html_blocks, jats_blocks
from graftlm.pipelines.summarize.readers.pdf import read_foreign_pdf, read_pdf
from graftlm.pipelines.summarize.readers.plain import plain_blocks
from graftlm.pipelines.summarize.readers.rst import rst_blocks

MAX_CHARACTERS = 20_000_000
_MAX_PDF_BYTES = 500_000_000


def read_document(path: str | Path, language: str | None = None) -> SourceDocument:
    """Read plain text, Markdown, reStructuredText, HTML, JATS XML, LaTeX or PDF; the suffix decides.

    Args:
        path: the file. Text is UTF-8. Spans count its characters, line breaks and a byte order mark included.
        language: code such as `de`; None detects it from the script, with Latin script as English.

    Raises DataError if the file can't be read, has another format, is encrypted, scanned or too large, or has no
    sentence, and RecipeError if sentences can't be split by the language, and MissingExtraError if a library that reads
    the format is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no document that can be read: a file ending in {' '.join(SUFFIXES)} is expected.")
    if suffix == ".pdf":
        _check_file_size(path, _MAX_PDF_BYTES)
        pages, blocks = read_pdf(path, str(path), MAX_CHARACTERS)
        return build_document(str(path), pages, blocks, language)
    return read_text(_read_utf8(path), suffix, str(path), language)


def read_text(text: str, suffix: str = ".txt", name: str = "The text", language: str | None = None) -> SourceDocument:
    """Read a document from a string in the format of `suffix`; raises as `read_document`."""
    _check_size(name, len(text), "characters", MAX_CHARACTERS)
    readable = f" {text[1:]}" if text.startswith("\ufeff") else text  # spans count the byte order mark
    reader = _TEXT_READERS[suffix]
    blocks = jats_blocks(readable, name) if reader is jats_blocks else reader(readable)
    return build_document(name, (text,), blocks, language)


def _read_utf8(path: Path) -> str:
    _check_file_size(path, 4 * MAX_CHARACTERS)  # a character has at most four bytes
    with read_errors(path):
        data = path.read_bytes()
    if b"\0" in data:
        raise DataError(f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected.")
    return "\ufeff" * data.startswith(BYTE_ORDER_MARK) + decode_utf8(data, str(path))  # spans count the mark


def _check_file_size(path: Path, limit: int) -> None:
    with read_errors(path):
        _check_size(str(path), path.stat().st_size, "bytes", limit)


def _check_size(name: str, size: int, unit: str, limit: int) -> None:
    if size > limit:
        raise DataError(f"{name} has {size:,} {unit}, and one document may have {limit:,}: split it into its chapters.")


_TEXT_READERS: dict[str, Callable[[str], Iterable[TextBlock]]] = {
    **dict.fromkeys((".txt", ".text"), plain_blocks),
    **dict.fromkeys((".md", ".markdown"), markdown_blocks),
    **dict.fromkeys((".html", ".htm", ".xhtml"), html_blocks),
    **dict.fromkeys((".xml", ".nxml"), jats_blocks),
    ".rst": rst_blocks,
    ".tex": latex_blocks,
}
SUFFIXES = (*_TEXT_READERS, ".pdf")

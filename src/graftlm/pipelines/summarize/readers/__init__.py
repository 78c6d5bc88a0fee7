"""Readers of document formats; the suffix of a file's name determines its format.

What a reader may leave out of the sentences, and what tells the user (a note is a remark of the summary):

| format | left out | told by |
|---|---|---|
| all | code, tables, captions, references, fields, furniture | passages of the document, with their kind |
| LaTeX | branches not taken; footnotes, citations, remarks in the margin | documentation of `read_latex` |
| LaTeX | conditionals of unknown value, included files that are missing or elsewhere | note with names |
| LaTeX | macros and environments that are not known: kept as written | note with counts |
| HTML | hidden elements | note with the number of characters |
| HTML | scripts, templates, forms, buttons, pronunciations; TeX beside MathML | documentation of `html_blocks` |
| JATS | formulas as pictures, unknown entities: replaced or kept | note with counts |
| JATS | labels, further abstracts, reviews | documentation of `jats_blocks` |
| reStructuredText | directives that are unknown or read files | note with counts |
| Markdown | tags inside a paragraph, definitions of links, comments | documentation of `markdown_blocks` |
| PDF | line numbers | note with their number |
| PDF | text of pictures | refused if no page has text |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from graftlm.errors import DataError
from graftlm.files.reading import BYTE_ORDER_MARK, check_encoding, decode_utf8, read_errors
from graftlm.pipelines.summarize.document import SourceDocument, TextBlock
from graftlm.pipelines.summarize.document_builder import build_document
from graftlm.pipelines.summarize.readers.html import html_blocks
from graftlm.pipelines.summarize.readers.jats import jats_blocks
from graftlm.pipelines.summarize.readers.latex import read_latex
from graftlm.pipelines.summarize.readers.markdown import markdown_blocks
from graftlm.pipelines.summarize.readers.pdf import read_foreign_pdf, read_pdf
from graftlm.pipelines.summarize.readers.plain import plain_blocks
from graftlm.pipelines.summarize.readers.rst import rst_blocks

MAX_CHARACTERS = 20_000_000
"""Maximum number of characters of a document."""

_MAX_PDF_BYTES = 500_000_000
_MAX_CHARACTER_BYTES = 4  # maximum size of a character in UTF-8
_BYTE_ORDER_MARK = "\ufeff"

_JATS_SUFFIXES = (".xml", ".nxml")
_LATEX_SUFFIX = ".tex"
_TEXT_READERS: dict[str, Callable[[str, list[str]], Iterable[TextBlock]]] = {
    ".txt": plain_blocks,
    ".text": plain_blocks,
    ".md": markdown_blocks,
    ".markdown": markdown_blocks,
    ".html": html_blocks,
    ".htm": html_blocks,
    ".xhtml": html_blocks,
    ".rst": rst_blocks,
}
_TEXT_SUFFIXES = (*_TEXT_READERS, _LATEX_SUFFIX, *_JATS_SUFFIXES)
SUFFIXES = (*_TEXT_SUFFIXES, ".pdf")
"""Suffixes of the files that `read_document` reads."""


def read_document(path: str | Path, language: str | None = None) -> SourceDocument:
    """Read a file with plain text, Markdown, reStructuredText, HTML, JATS XML, LaTeX or PDF.

    Args:
        path: the file; its suffix determines the format. Text is UTF-8. Spans count its characters, including line
            breaks and a byte order mark. LaTeX reads the files that it includes from the folder of the file.
        language: language code such as `de`; None detects it from the script, with Latin script as English.

    Raises:
        DataError: the file can't be read, has another suffix or format, is encrypted, scanned or too large, has no
            sentence, or is in a script without punctuation that ends sentences.
        RecipeError: `language` is malformed, or the language has no punctuation that ends sentences.
        MissingExtraError: a library that reads the format or splits sentences is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        found = f"has the suffix {suffix}" if suffix else "has no suffix"
        raise DataError(f"{path} {found}, but one of {', '.join(SUFFIXES)} is expected: convert the document.")
    if suffix != ".pdf":
        text = _read_utf8(path)
        return _read_text(text, suffix, str(path), language, path)
    _check_file_size(path, _MAX_PDF_BYTES)
    notes: list[str] = []
    pages, blocks = read_pdf(path, notes, str(path), MAX_CHARACTERS)
    return build_document(str(path), pages, blocks, language, notes=notes)


def read_text(
    text: str,
    suffix: str = ".txt",
    name: str = "The text",
    language: str | None = None,
) -> SourceDocument:
    """Read a document from a string.

    Args:
        text: the document.
        suffix: a member of `SUFFIXES` other than `.pdf`, which determines the format.
        name: name of the document in messages.
        language: language code, as in `read_document`.

    Raises:
        DataError: the suffix is another one; the text is not in its format, is too long, has no sentence, or is in a
            script without punctuation that ends sentences.
        RecipeError: `language` is malformed, or the language has no punctuation that ends sentences.
        MissingExtraError: a library that reads the format or splits sentences is not installed.
    """
    if suffix not in _TEXT_SUFFIXES:
        expected = ", ".join(_TEXT_SUFFIXES)
        alternative = ", or read the file with read_document" if suffix == ".pdf" else ""
        raise DataError(
            f"{name} has the suffix {suffix!r}, but one of {expected} is expected: pass the suffix of its format"
            f"{alternative}."
        )
    return _read_text(text, suffix, name, language)


def _read_text(text: str, suffix: str, name: str, language: str | None, path: Path | None = None) -> SourceDocument:
    """Read a document from its text; with a path, LaTeX reads the files that it includes."""
    _check_size(name, len(text), "characters", MAX_CHARACTERS)
    readable = text
    if text.startswith(_BYTE_ORDER_MARK):
        readable = f" {text[1:]}"  # Spans count the byte order mark.
    notes: list[str] = []
    if suffix == _LATEX_SUFFIX:
        latex = read_latex(readable, notes, name, path, MAX_CHARACTERS)
        pages = [text, *latex.pages[1:]]
        return build_document(name, pages, latex.blocks, language, files=latex.files, notes=notes)
    if suffix in _JATS_SUFFIXES:
        blocks = jats_blocks(readable, notes, name)
    else:
        blocks = _TEXT_READERS[suffix](readable, notes)
    return build_document(name, (text,), blocks, language, notes=notes)


def _read_utf8(path: Path) -> str:
    """Return the text of a file, including a byte order mark, which spans count."""
    _check_file_size(path, _MAX_CHARACTER_BYTES * MAX_CHARACTERS)
    with read_errors(path):
        data = path.read_bytes()
    check_encoding(data, str(path))
    if b"\0" in data:
        position = data.index(0)
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {position}), but UTF-8 text is expected: convert it "
            "to UTF-8, or leave it out."
        )
    text = decode_utf8(data, str(path))
    if data.startswith(BYTE_ORDER_MARK):
        return _BYTE_ORDER_MARK + text
    return text


def _check_file_size(path: Path, limit: int) -> None:
    with read_errors(path):
        size = path.stat().st_size
        _check_size(str(path), size, "bytes", limit)


def _check_size(name: str, size: int, unit: str, limit: int) -> None:
    if size > limit:
        raise DataError(f"{name} has {size:,} {unit}, but the limit is {limit:,}: split it into its chapters.")

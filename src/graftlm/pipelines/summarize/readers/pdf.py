"""PDF reader, based on pdfminer.six, which finds pages, lines and fonts.

Spans refer to the text of a page as pdfminer's `extract_text` writes it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from graftlm.errors import DataError, first_line
from graftlm.pipelines.summarize.document import SourceDocument, TextBlock, TextSpan
from graftlm.pipelines.summarize.document_builder import build_document
from graftlm.pipelines.summarize.readers.pdf_layout import PdfLine, layout_blocks, merge_divided
from graftlm.pipelines.summarize.text import import_extra

T = TypeVar("T")

# The program of the process that reads a PDF file from an untrusted source.
_MAIN = f"import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; from {__name__} import _main; _main()"
# Limits of that process for one file: seconds, of processor time and by the clock, and bytes.
_CHILD_LIMITS = {"RLIMIT_CPU": 60, "RLIMIT_DATA": 512 * 2**20}


def read_pdf(
    source: Path | BytesIO,
    notes: list[str],
    path: str,
    max_characters: int,
) -> tuple[list[str], list[TextBlock]]:
    """Read the text of each page of a PDF file, and the blocks of all pages.

    Args:
        source: path or content of the file.
        notes: receives what was left out.
        path: name of the file in messages.
        max_characters: maximum length of the text of all pages.

    Raises:
        DataError: the file is encrypted, damaged, scanned or too large.
        MissingExtraError: pdfminer.six is not installed.
    """
    pages, lines = _extract_pages(source, path, max_characters)
    if not pages:
        raise DataError(f"{path} is not a complete PDF file (it has no page): save or fetch it again.")
    if not any(page.strip() for page in pages):
        raise DataError(
            f"{path} has no text on its pages, as in scans (number of pages: {len(pages)}): recognize the text first "
            "(OCR)."
        )
    blocks = layout_blocks(lines, notes)
    return pages, list(merge_divided(blocks))


def _extract_pages(
    source: Path | BytesIO,
    path: str,
    max_characters: int,
) -> tuple[list[str], list[list[PdfLine]]]:
    """Return the text and the lines of each page."""
    pdfminer = import_extra("pdfminer.high_level", "Reading PDF files")
    pdfdocument = import_extra("pdfminer.pdfdocument", "Reading PDF files")
    logging.getLogger("pdfminer").setLevel(logging.ERROR)
    pages: list[str] = []
    lines: list[list[PdfLine]] = []
    characters = 0
    try:
        parameters = pdfminer.LAParams(all_texts=True)
        for layout in pdfminer.extract_pages(source, laparams=parameters):
            page_text, page_lines = _read_page(layout)
            pages.append(page_text)
            lines.append(page_lines)
            characters += len(page_text)
            if characters > max_characters:
                raise DataError(
                    f"{path} has more than {max_characters:,} characters of text, but at most that many are read: "
                    "split it into chapters."
                )
    except (DataError, MemoryError):
        raise
    except pdfdocument.PDFPasswordIncorrect:
        raise DataError(f"{path} is encrypted and needs a password: save a copy without one.") from None
    except Exception as error:
        # pdfminer raises exceptions of many types on a damaged file.
        cause = first_line(error)
        raise DataError(f"{path} can't be read as a PDF file ({cause}): save or fetch it again.") from None
    return pages, lines


def _read_page(layout: Any) -> tuple[str, list[PdfLine]]:
    """Return the text of a page as pdfminer's `extract_text` writes it, and its lines."""
    text = ""
    lines: list[PdfLine] = []
    for number, box in enumerate(_text_boxes(layout)):
        for line in box:
            characters = [item for item in line if hasattr(item, "fontname") and item.get_text().strip()]
            if characters:
                center = (line.y0 + line.y1) / 2
                pdf_line = PdfLine(
                    text=line.get_text(),
                    start=len(text),
                    box=number,
                    height=center / max(layout.height, 1),
                    left=line.x0 / max(layout.width, 1),
                    right=line.x1 / max(layout.width, 1),
                    font=_most_common([item.fontname for item in characters]),
                    size=_most_common([round(item.size, 1) for item in characters]),
                )
                lines.append(pdf_line)
            text += line.get_text()
        text += "\n"
    return text, lines


def _most_common(values: list[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _text_boxes(container: Any) -> Iterator[Any]:
    """Yield the boxes of text of a page, including those of its figures."""
    for element in container:
        if hasattr(element, "get_text") and hasattr(element, "__iter__"):
            yield element
        elif type(element).__name__ == "LTFigure":
            yield from _text_boxes(element)


def read_foreign_pdf(data: bytes, name: str, max_characters: int, language: str | None = None) -> SourceDocument:
    """Read a PDF file from an untrusted source in a separate process, limited to one minute and 512 MiB of memory.

    The limit of memory needs POSIX.

    Args:
        data: content of the file.
        name: name of the document in messages.
        max_characters: maximum length of the text of all pages.
        language: language code, as in `read_document`.

    Raises:
        DataError: the file is encrypted, damaged, scanned or too large, has no sentence, is in a script without
            punctuation that ends sentences, or can't be read within the limits.
        RecipeError: `language` is malformed, or the language has no punctuation that ends sentences.
        MissingExtraError: pdfminer.six or sentencex is not installed.
    """
    import_extra("pdfminer.high_level", "Reading PDF files")
    command = [sys.executable, "-P", "-c", _MAIN, name, str(max_characters)]
    try:
        child = subprocess.run(
            command,
            input=data,
            capture_output=True,
            timeout=_CHILD_LIMITS["RLIMIT_CPU"],
        )
        message, pages, rows, notes = json.loads(child.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no output, or only a part of it
        raise DataError(
            f"{name} can't be read within a minute and 512 MiB of memory: send its text instead of the file."
        ) from None
    if message:
        raise DataError(message)
    blocks = [_block_from_json(row) for row in rows]
    return build_document(name, pages, blocks, language, notes=notes)


def _block_from_json(row: list[Any]) -> TextBlock:
    """Return the block whose fields are a row, as `dataclasses.astuple` returns them."""
    spans, *rest = row
    return TextBlock(tuple(TextSpan(*span) for span in spans), *rest)


def _main() -> None:
    """Run the process of `read_foreign_pdf`: write an error or null, the pages, blocks and notes, as JSON."""
    import resource  # exists on POSIX only, like the server

    for name, limit in _CHILD_LIMITS.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    name, max_characters = sys.argv[1:]
    try:
        data = BytesIO(sys.stdin.buffer.read())
        notes: list[str] = []
        pages, blocks = read_pdf(data, notes, name, int(max_characters))
        rows = [astuple(block) for block in blocks]
        sys.stdout.write(json.dumps([None, pages, rows, notes]))
    except DataError as error:
        sys.stdout.write(json.dumps([str(error), [], [], []]))

"""The text of a PDF's pages, by pypdf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.summarize.text import import_extra


def read_pages(path: Path, most: int) -> list[str]:
    """The text of each page.

    Args:
        path: the file.
        most: characters of all pages together.

    Raises:
        DataError: the file is no whole PDF, asks for a password, has no text, or more of it than fits.
    """
    pypdf: Any = import_extra("pypdf", "Reading PDF files")
    errors: Any = import_extra("pypdf.errors", "Reading PDF files")
    try:
        return _pages(_open(pypdf, path), path, most)
    except (errors.PyPdfError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, errors.FileNotDecryptedError | errors.WrongPasswordError):
            raise DataError(_encrypted(path)) from None
        cause = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(f"{path} is not a whole PDF file ({cause}): save or fetch it again.") from None
    except errors.DependencyError:
        raise DataError(
            f"{path} is encrypted by AES, which pypdf reads with the package cryptography alone: "
            "run `pip install cryptography`."
        ) from None


def _open(pypdf: Any, path: Path) -> Any:
    try:
        reader = pypdf.PdfReader(path)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): check the file.") from None
    if reader.is_encrypted and not reader.decrypt(""):
        raise DataError(_encrypted(path))
    return reader


def _pages(reader: Any, path: Path, most: int) -> list[str]:
    pages, total = [], 0
    for page in reader.pages:
        pages.append(page.extract_text())
        total += len(pages[-1])
        if total > most:
            raise DataError(f"{path} has more than {most:,} characters of text: split it into its chapters.")
    if not any(page.strip() for page in pages):
        raise DataError(
            f"{path} has {len(pages)} pages and no text, as scanned pages have: recognise the text first (OCR)."
        )
    return pages


def _encrypted(path: Path) -> str:
    return f"{path} is encrypted and asks for a password: save a copy without one."

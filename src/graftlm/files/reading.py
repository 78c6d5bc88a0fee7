"""Read text files, plain or gzipped."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from graftlm.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = {  # those of UTF-32 first, since one begins with a mark of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert errors that the block raises while it reads a file to a `DataError` that names the file.

    Args:
        path: the file.

    Raises:
        DataError: the block raised an `OSError`, or an error of decompression.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a complete gzip file: download it again, or decompress it first.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): name a readable file.") from None


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading bytes. A file whose name ends in `.gz` is decompressed while it is read.

    Raises:
        OSError: the file can't be opened.
    """
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # a GzipFile reads like a BinaryIO
    return path.open("rb")


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, decompressed if its name ends in `.gz`.

    A byte order mark is removed, and CRLF line ends become LF.

    Raises:
        DataError: the file can't be read, is binary, or is not UTF-8.
    """
    with read_errors(path), open_binary(path) as file:
        data = file.read()
    check_encoding(data, str(path))
    if b"\0" in data:
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected: "
            "convert it to text, or leave it out (in a recipe, by the pattern of the source)."
        )
    return decode_utf8(data, str(path)).replace("\r\n", "\n")


def check_encoding(data: bytes, where: str) -> None:
    """Raise `DataError` if bytes begin with the byte order mark of UTF-16 or UTF-32; `where` names their origin."""
    for mark, encoding in _OTHER_MARKS.items():
        if data.startswith(mark):
            raise DataError(
                f"{where} is {encoding} text (it begins with the byte order mark 0x{mark.hex()}), but UTF-8 is "
                "expected: convert it to UTF-8 first."
            )


def decode_utf8(data: bytes, where: str) -> str:
    """Decode UTF-8 bytes and remove a byte order mark.

    Args:
        data: the bytes.
        where: origin of the bytes, for the error message.

    Raises:
        DataError: the bytes are not UTF-8.
    """
    check_encoding(data, where)
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = f"0x{data[error.start]:02x}"
        raise DataError(
            f"{where} is not UTF-8 text (byte {error.start} is {byte}): convert it to UTF-8 first."
        ) from None

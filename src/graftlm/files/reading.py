"""Read text files, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from graftlm.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors that reading a file raises into a `DataError` that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file: fetch it again, or unpack it first.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): check the file.") from None


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading; one that ends in `.gz` is decompressed."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_text(path: Path) -> str:
    """The UTF-8 text of a file, without byte order mark and CR; DataError if it can't be read, or is not UTF-8."""
    with read_errors(path), open_binary(path) as file:
        data = file.read()
    if b"\0" in data:
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected: "
            "convert it, or leave it out by the source's pattern."
        )
    return decode_utf8(data, str(path)).replace("\r\n", "\n")


def decode_utf8(data: bytes, where: str) -> str:
    """Decode bytes without a byte order mark. Raises DataError, which begins with `where`, if they are not UTF-8."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        why = f"{where} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): convert it to UTF-8 first."
        raise DataError(why) from None

"""The metadata of a GGUF file with the types of its values, so that another file can have the same."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# The package gguf is an extra, so functions import it.
if TYPE_CHECKING:
    from gguf import GGUFWriter

Scalar = bool | int | float | bytes
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the format's number of the type."""
_STRING = 8
_ARRAY = 9


class Value(NamedTuple):
    """A value of the metadata.

    Attributes:
        value: the value; strings are bytes in UTF-8.
        kind: the format's number of its type.
        item_kind: the format's number of the type of an array's items; None for other values.
    """

    value: Scalar | Sequence[Scalar]
    kind: int
    item_kind: int | None = None

    def add_to(self, writer: GGUFWriter, key: str) -> None:
        """Add the value to the metadata of a file that is being written."""
        from gguf import GGUFValueType

        item_kind = None if self.item_kind is None else GGUFValueType(self.item_kind)
        if self.value != []:  # the writer has no empty arrays
            writer.add_key_value(key, self.value, GGUFValueType(self.kind), item_kind)


def read_values(path: Path, prefix: str) -> dict[str, Value]:
    """Return the metadata of a file whose keys begin with a prefix. The file was loaded before, so it is sound.

    Args:
        path: a GGUF file of this machine's byte order.
        prefix: beginning of the keys.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (count,) = struct.unpack_from("<Q", data, 16)
        position = 24
        values = {}
        for _ in range(count):
            key, position = _string(data, position)
            (kind,) = struct.unpack_from("<I", data, position)
            value, position = _value(data, position + 4, kind)
            name = key.decode()
            if name.startswith(prefix):
                values[name] = value
    return values


def _value(data: mmap.mmap, position: int, kind: int) -> tuple[Value, int]:
    """Return the value of a type at a position, and the position after it."""
    if kind != _ARRAY:
        (item,), position = _items(data, position, kind, 1)
        return Value(item, kind), position
    item_kind, count = struct.unpack_from("<IQ", data, position)
    items, position = _items(data, position + 12, item_kind, count)
    return Value(items, kind, item_kind), position


def _items(data: mmap.mmap, position: int, kind: int, count: int) -> tuple[list[Scalar], int]:
    """Return values of the same type at a position, and the position after them."""
    if kind == _STRING:
        texts: list[Scalar] = []
        for _ in range(count):
            text, position = _string(data, position)
            texts.append(text)
        return texts, position
    form = f"<{count}{_FORMATS[kind]}"
    return list(struct.unpack_from(form, data, position)), position + struct.calcsize(form)


def _string(data: mmap.mmap, position: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    end = position + 8 + length
    return data[position + 8 : end], end

"""Values of JSON inside the cells of a table: as JSON text, or as Arrow returns them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from graftlm.data.table_files import RepeatedKeyError, unique_keys
from graftlm.errors import DataError, shorten


def parsed(value: object, what: str, remedy: str = "correct the text, or use lists and objects") -> Any:
    """Return the value of JSON text, empty text for white space, and any other value as it is.

    Args:
        value: the value.
        what: its location with a verb, for error messages, such as "line 3 has tools".
        remedy: what to do about text that is not JSON, for error messages.

    Raises:
        DataError: the text is not JSON, or has an object with a key twice.
    """
    if not isinstance(value, str) or not value.strip():
        return "" if isinstance(value, str) else value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise DataError(
            f"{what} as text with the key {error.key!r} more than once in an object: rename all but one."
        ) from None
    except (ValueError, RecursionError):
        raise DataError(f"{what} as text that is not JSON: {remedy}.") from None


def unpadded(value: object) -> object:
    """Return a value of Arrow without nulls in objects, and with maps, which are lists of pairs, as objects.

    Arrow pads objects with nulls, but not maps, whose nulls are kept.
    """
    if isinstance(value, Mapping):
        return {key: unpadded(item) for key, item in value.items() if item is not None}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        return {key: unpadded(item) for key, item in value}
    return [unpadded(item) for item in value]


def check_writable(value: object, where: str) -> None:
    """Raise `DataError` if text in a value has a lone surrogate, or a number in it is not finite.

    Args:
        value: a value of JSON; its lists and objects are searched.
        where: its location, for error messages.
    """
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has a lone surrogate at character {error.start} of {shorten(value)!r}, which is not valid "
                "text: correct the text."
            ) from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where} has the number {value}, which JSON can't write: correct it.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_writable(key, where)
            check_writable(item, where)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_writable(item, where)

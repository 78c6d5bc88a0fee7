"""Replace attributes of objects and modules for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MISSING = object()


@contextmanager
def replaced_attributes(owner: object, **values: object) -> Iterator[None]:
    """Set attributes of an object or a module, and restore what it held itself when the block ends.

    Args:
        owner: the object or module.
        values: the new values by the attributes' names.
    """
    originals = {name: vars(owner).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, original in originals.items():
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

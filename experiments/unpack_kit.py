"""Unpack a kit: `python unpack.py FOLDER`. Needs Python alone; the parts lie beside this file, in any folders."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path


class Joined(io.RawIOBase):
    """The content of all parts, one after the other."""

    def __init__(self, parts: list[Path]) -> None:
        self._chunks = _chunks(parts)
        self._left = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes, and return their number; 0 at the end."""
        if not self._left:
            self._left = next(self._chunks, b"")
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _chunks(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk


def find_parts(kit: Path) -> list[Path]:
    """Return the parts in their order, after a check of their digests.

    Raises:
        SystemExit: a part is missing or damaged.
    """
    digests = json.loads((kit / "kit.json").read_text(encoding="utf-8"))["parts"]
    found = []
    for name, digest in digests.items():
        part = next(iter(sorted(kit.rglob(name))), None)
        if part is None:
            raise SystemExit(f"The part {name} is missing in {kit}: copy it there.")
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise SystemExit(f"The part {part} is damaged: copy it again.")
        found.append(part)
    return found


def main() -> None:
    """Unpack the kit that this file belongs to."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python unpack.py FOLDER")
    folder = Path(sys.argv[1])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"The folder {folder} is not empty: name a new one.")
    parts = find_parts(Path(__file__).parent)
    with tarfile.open(fileobj=io.BufferedReader(Joined(parts)), mode="r|gz") as archive:
        archive.extractall(folder, filter="data")
    sys.stdout.write(f"unpacked to {folder}\n")


if __name__ == "__main__":
    main()

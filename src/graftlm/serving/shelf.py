"""Grafts by name: given one by one, or as sub-folders of one folder; read again when their files change.

Nothing that a client says ever becomes a path: names are looked up among those found here.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graftlm.artifact import JSON_NAME, TENSORS_NAME, Manifest, load_graft, read_manifest
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError
from graftlm.grafts import Graft

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOG = logging.getLogger("graftlm.serving")

Signature = tuple[tuple[int, ...] | None, ...]
"""Of a graft's files: i-node, size and times of each, None for one that is not there."""
Replace = Callable[[str, Graft | None], None]
Told = Callable[[str, str], None]
"""Called with a graft's name and what became of it: loaded, refused or withdrawn."""


@dataclass(frozen=True)
class Entry:
    """A graft in service.

    Attributes:
        name: as requests name it.
        folder: where its files are.
        manifest: its graft.json.
        changed: when that was written, in seconds since 1970.
    """

    name: str
    folder: Path
    manifest: Manifest
    changed: int


@dataclass
class _Place:
    """What is known of one name: its files when they were last seen, and when they were last dealt with."""

    folder: Path
    given: bool
    seen: Signature | None = ()
    settled: Signature | None = ()
    entry: Entry | None = None


@dataclass
class Shelf:
    """The grafts of a server. All methods may be called from any thread.

    Args:
        backbone: what they were trained on.
        given: folders by name.
        folder: a folder of such folders, each a graft by its own name; it is searched again and again.
        reserved: names that no graft may have, such as the backbone's.
    """

    backbone: Backbone
    given: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    reserved: frozenset[str] = frozenset()
    _places: dict[str, _Place] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entries(self) -> tuple[Entry, ...]:
        """The grafts in service."""
        places = [self._places[name] for name in sorted(self._places)]
        return tuple(place.entry for place in places if place.entry is not None)

    def problems(self) -> dict[str, str]:
        """What is wrong with the newest files of a graft, by name; an older state of it may be in service."""
        return dict(self._problems)

    def open(self) -> dict[str, Graft]:
        """Load everything for the first time.

        Raises:
            GraftError: a graft that was given by name can't be used. One of the folder becomes a problem instead.
        """
        for name in self.given:
            if not NAME.fullmatch(name) or name in self.reserved:
                raise GraftError(_bad_name(name, self.reserved))
        if self.folder is not None and not self.folder.is_dir():
            raise ArtifactError(f"There is no folder {self.folder}: name the folder that holds the grafts' folders.")
        grafts: dict[str, Graft] = {}
        self.refresh(lambda name, graft: grafts.__setitem__(name, graft) if graft is not None else None, now=True)
        if broken := [self._problems[name] for name in self.given if name in self._problems]:
            raise ArtifactError(broken[0])
        return grafts

    def refresh(self, replace: Replace, told: Told = lambda name, outcome: None, *, now: bool = False) -> None:
        """Look at all files once, and take into service what has changed and is still since the last look.

        Args:
            replace: puts a graft into service, or with None takes it out.
            told: what became of each graft that had changed.
            now: don't wait for files to be still, and try again what failed.
        """
        with self._lock:
            for name, place in self._found():
                signature = read_signature(place.folder)
                failed = now and name in self._problems
                known = signature == place.settled and not failed
                if known or (signature != place.seen and not now):  # it may still be written
                    place.seen = signature
                else:
                    self._settle(name, place, signature, replace, told)

    def _found(self) -> Iterator[tuple[str, _Place]]:
        """All names known so far and those that are there now, with their places."""
        for name, folder in self.given.items():
            self._places.setdefault(name, _Place(folder, given=True))
        for folder in sorted(self.folder.iterdir()) if self.folder is not None and self.folder.is_dir() else ():
            if folder.name.startswith(".") or folder.name in self.given or not (folder / JSON_NAME).is_file():
                continue
            if NAME.fullmatch(folder.name) and folder.name not in self.reserved:
                self._places.setdefault(folder.name, _Place(folder, given=False))
            else:
                self._note(folder.name, _bad_name(folder.name, self.reserved))
        yield from list(self._places.items())

    def _settle(self, name: str, place: _Place, signature: Signature | None, replace: Replace, told: Told) -> None:
        place.seen = signature
        if signature is None and not place.given:
            del self._places[name]
            self._problems.pop(name, None)
            if place.entry is not None:
                replace(name, None)
                LOG.info("graft %s: its folder is gone, and so is its name", name)
                told(name, "withdrawn")
            return
        try:
            graft, entry = self._load(name, place.folder)
            if read_signature(place.folder) != signature:
                return  # written while it was read: the next look sees it
            replace(name, graft)
        except Exception as error:  # whatever is wrong with new files, the old graft stays in service
            place.settled = signature
            still = "; the one loaded before stays in service" if place.entry is not None else ""
            self._note(name, f"{str(error) or type(error).__name__}", still)
            told(name, "refused")
            return
        place.settled, place.entry = signature, entry
        self._problems.pop(name, None)
        LOG.info("graft %s: loaded from %s", name, place.folder)
        told(name, "loaded")

    def _note(self, name: str, sentence: str, more: str = "") -> None:
        if self._problems.get(name) != sentence:
            LOG.warning("graft %s: %s%s", name, sentence.rstrip("."), more)
        self._problems[name] = sentence

    def _load(self, name: str, folder: Path) -> tuple[Graft, Entry]:
        """A graft from a copy of its files: what happens to them while they are read, or later, can't reach it."""
        with tempfile.TemporaryDirectory(prefix="graftlm-") as scratch:
            copy = Path(scratch) / folder.name
            copy.mkdir()
            for file in (JSON_NAME, TENSORS_NAME):
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, copy / file)
            try:
                graft = load_graft(copy, self.backbone)
                manifest = read_manifest(copy)
            except GraftError as error:
                raise ArtifactError(str(error).replace(str(copy), str(folder))) from None
        return graft, Entry(name, folder, manifest, int((folder / JSON_NAME).stat().st_mtime))


def read_signature(folder: Path) -> Signature | None:
    """What tells whether a graft's files are the same as before; None where there are none."""
    stats = tuple(_stat(folder / file) for file in (JSON_NAME, TENSORS_NAME))
    return stats if any(stats) else None


def _stat(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _bad_name(name: str, reserved: frozenset[str]) -> str:
    if name in reserved:
        return f"The name {name} is the backbone's, and a graft needs one of its own: give it another."
    return (
        f"The name {name[:80]!r} can't be a graft's: up to 64 letters, digits, dots, dashes and underscores are "
        "expected, a letter or digit first."
    )


__all__ = ["Entry", "Shelf", "read_signature"]

"""The grafts of a server by name: folders that were given, and the sub-folders of one folder, loaded again on changes.

A name that a client sends never becomes a path: it is looked up among the known names.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError
from graftlm.grafts import Graft
from graftlm.store.artifact import load_graft
from graftlm.store.manifest import JSON_NAME, TENSORS_NAME, Manifest, read_manifest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOG = logging.getLogger("graftlm.serving")

FileSignature = tuple[tuple[int, ...] | None, ...]
"""Inode, size and times of each of a graft's files; None for a missing file."""
Replace = Callable[[str, Any], None]
OnOutcome = Callable[[str, str], None]
"""Called with a graft's name and the outcome of its new files: loaded, refused or withdrawn."""


@dataclass(frozen=True)
class StoredGraft:
    """A graft in service: its name and its backbone's, its files, and when graft.json changed, in Unix time."""

    name: str
    backbone: str
    folder: Path
    manifest: Manifest
    changed: int


@dataclass
class WatchedFolder:
    """A graft's folder: the signature of its files at the last check, and at the last load or failure."""

    folder: Path
    given: bool
    seen: FileSignature | None = ()
    processed: FileSignature | None = ()
    graft: StoredGraft | None = None


@dataclass
class GraftStore:
    """The grafts of a server. All methods are thread-safe.

    Args:
        backbones: the grafts' backbones by name; no graft may have such a name.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders, named as the folders are; it is searched at each refresh.
    """

    backbones: Mapping[str, Backbone]
    given: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    _watched: dict[str, WatchedFolder] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entries(self) -> dict[str, StoredGraft]:
        """The grafts in service by name, in the order of names."""
        return {name: watched.graft for name, watched in sorted(self._watched.items()) if watched.graft is not None}

    def problems(self) -> dict[str, str]:
        """The errors of the newest files by graft; an older state of the graft may be in service."""
        return dict(self._problems)

    def open(self, on_outcome: OnOutcome = lambda name, outcome: None) -> dict[str, Graft]:
        """Load all grafts for the first time. A broken graft of `folder` becomes a problem.

        Raises GraftError if a graft that was given by name is not usable.
        """
        for name in self.given:
            if not NAME.fullmatch(name) or name in self.backbones:
                raise GraftError(_bad_name(name, self.backbones))
        if self.folder is not None and not self.folder.is_dir():
            raise ArtifactError(f"There is no folder {self.folder}: name the folder that holds the grafts' folders.")
        grafts: dict[str, Graft] = {}
        self.refresh(grafts.__setitem__, on_outcome, now=True)
        if broken := [name for name in self.given if name in self._problems]:
            raise ArtifactError(self._problems[broken[0]])
        return grafts

    def refresh(
        self, replace: Replace, on_outcome: OnOutcome = lambda name, outcome: None, *, now: bool = False
    ) -> None:
        """Check all files once, and load those that changed and are the same as at the last check.

        `replace` puts a graft into service, or with None removes it. With `now` changed files are loaded at once, and
        failed files are tried again.
        """
        with self._lock:
            self._search()
            for name, watched in list(self._watched.items()):
                signature = read_signature(watched.folder)
                failed = now and name in self._problems
                unchanged = signature == watched.processed and not failed
                ready = signature == watched.seen or now  # changed files may still be incomplete
                watched.seen = signature
                if ready and not unchanged and (outcome := self._process(name, watched, replace)):
                    on_outcome(name, outcome)

    def _search(self) -> None:
        """Watch all folders that were given or that are in `folder` now."""
        for name, folder in self.given.items():
            self._watched.setdefault(name, WatchedFolder(folder, given=True))
        for folder in sorted(self.folder.iterdir()) if self.folder is not None and self.folder.is_dir() else ():
            if folder.name.startswith(".") or folder.name in self.given or not (folder / JSON_NAME).is_file():
                continue
            if NAME.fullmatch(folder.name) and folder.name not in self.backbones:
                self._watched.setdefault(folder.name, WatchedFolder(folder, given=False))
            else:
                self._report(folder.name, _bad_name(folder.name, self.backbones))

    def _process(self, name: str, watched: WatchedFolder, replace: Replace) -> str | None:
        """Withdraw a graft whose folder is gone, or load its files; returns the outcome."""
        if watched.seen is None and not watched.given:
            del self._watched[name]
            self._problems.pop(name, None)
            if watched.graft is None:
                return None
            replace(name, None)
            LOG.info("graft %s: its folder is gone, and so is its name", name)
            return "withdrawn"
        try:
            graft, entry = self._load(name, watched.folder)
            if read_signature(watched.folder) != watched.seen:
                return None  # the files changed during loading; the next check sees it
            replace(name, graft)
        except Exception as error:  # whatever the error of the new files, the old graft stays in service
            if not isinstance(error, OSError):  # such as a full disk, which the next check may not meet
                watched.processed = watched.seen
            consequence = "; the one loaded before stays in service" if watched.graft is not None else ""
            self._report(name, str(error) or type(error).__name__, consequence)
            return "refused"
        watched.processed, watched.graft = watched.seen, entry
        self._problems.pop(name, None)
        LOG.info("graft %s: loaded from %s", name, watched.folder)
        return "loaded"

    def _report(self, name: str, problem: str, consequence: str = "") -> None:
        if self._problems.get(name) != problem:
            LOG.warning("graft %s: %s%s", name, problem.rstrip("."), consequence)
        self._problems[name] = problem

    def _load(self, name: str, folder: Path) -> tuple[Graft, StoredGraft]:
        """Load a graft from a copy of its files, so that later changes of the files can not reach it."""
        with tempfile.TemporaryDirectory(prefix="graftlm-") as scratch:
            copy = Path(scratch) / folder.name
            copy.mkdir()
            for file in (JSON_NAME, TENSORS_NAME):
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, copy / file)
            try:
                manifest = read_manifest(copy)
                manifest.check_alone(copy, "a server's model")
                backbone = self._backbone_of(manifest, copy)
                graft = load_graft(copy, self.backbones[backbone])
                if graft.served_in_bfloat16 and self.backbones[backbone].model.dtype == torch.bfloat16:
                    graft.to(torch.bfloat16)
            except GraftError as error:
                raise ArtifactError(str(error).replace(str(copy), str(folder))) from None
        return graft, StoredGraft(name, backbone, folder, manifest, int((folder / JSON_NAME).stat().st_mtime))

    def _backbone_of(self, manifest: Manifest, folder: Path) -> str:
        """The name of the backbone that a graft was trained on; ArtifactError if that is none or several of them."""
        if len(self.backbones) == 1:
            return next(iter(self.backbones))  # of which `load_graft` says what sets it apart
        names = [name for name, backbone in self.backbones.items() if manifest.backbone.matches(backbone) is None]
        if len(names) != 1:
            which = f"both {' and '.join(names)} are" if names else f"none of {', '.join(self.backbones)} is"
            remedy = "serve one of them" if names else "serve that one too (--backbone), or leave the graft out"
            raise ArtifactError(f"The graft {folder} was trained on {manifest.backbone.name}, which {which}: {remedy}.")
        return names[0]


def read_signature(folder: Path) -> FileSignature | None:
    """The signature of a graft's files, which changes when they change; None if there are no files."""
    signature: list[tuple[int, ...] | None] = []
    for file in (JSON_NAME, TENSORS_NAME):
        try:
            status = (folder / file).stat()
        except OSError:
            signature.append(None)
        else:
            signature.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(signature) if any(signature) else None


def _bad_name(name: str, backbones: Collection[str]) -> str:
    if name in backbones:
        return f"The name {name} is the backbone's, and a graft needs one of its own: give it another."
    return (
        f"The name {name[:80]!r} can't be a graft's: up to 64 letters, digits, dots, dashes and underscores are "
        "expected, a letter or digit first."
    )

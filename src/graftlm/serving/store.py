"""The grafts of a server: folders with names, and the sub-folders of one folder, loaded again when they change.

A name from a client never becomes a path: it is looked up among the known names.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError
from graftlm.grafts import Graft
from graftlm.grafts.stack import Stack
from graftlm.store.manifest import JSON_NAME, TENSORS_NAME, Manifest, read_manifest
from graftlm.store.names import GRAFT_NAME, NAME_RULE, graft_in
from graftlm.store.stages import load_model_of, members_of

LOG = logging.getLogger("graftlm.serving")

FileSignature = tuple[tuple[int, ...] | None, ...]
"""Inode, size and times of each of a graft's files; None for a missing file."""
Replace = Callable[[str, Graft | None], object]
"""Puts a graft into service, or removes its name."""
Check = Callable[[str, Graft], object]
"""Raises an error for a graft that can't be served."""
OnOutcome = Callable[[str, str], object]
"""Called with a graft's name and the outcome of its new files: loaded, refused or withdrawn."""


@dataclass(frozen=True)
class StoredGraft:
    """A graft in service.

    Attributes:
        name: name in requests.
        backbone: name of its backbone.
        folder: its files.
        manifest: the content of its graft.json.
        changed: modification time of graft.json, in seconds since 1970.
    """

    name: str
    backbone: str
    folder: Path
    manifest: Manifest
    changed: int


@dataclass
class WatchedFolder:
    """The folder of a graft.

    Attributes:
        folder: its path.
        given: whether it was given with a name, instead of found in the folder of grafts.
        seen: signature of the files at the last check.
        processed: signature of the files at the last load or failure.
        graft: the graft in service, if there is one.
        members: folders of the grafts of earlier stages that act with it.
    """

    folder: Path
    given: bool
    members: tuple[Path, ...] = ()
    seen: FileSignature | None = ()
    processed: FileSignature | None = ()
    graft: StoredGraft | None = None


@dataclass
class GraftStore:
    """The grafts of a server. All methods are thread-safe.

    Args:
        backbones: the grafts' backbones by name; no graft may have such a name.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders or runs, whose names they have; it is searched at each refresh.
    """

    backbones: Mapping[str, Backbone]
    given: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    _watched: dict[str, WatchedFolder] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entries(self) -> dict[str, StoredGraft]:
        """Return the grafts in service, sorted by name."""
        return {name: watched.graft for name, watched in sorted(self._watched.items()) if watched.graft is not None}

    def problems(self) -> dict[str, str]:
        """Return the error of each graft whose newest files can't be loaded, by name.

        An earlier version of such a graft may be in service.
        """
        return dict(self._problems)

    def open(self, on_outcome: OnOutcome | None = None, check: Check | None = None) -> dict[str, Graft]:
        """Load all grafts for the first time. A broken graft of `folder` is left out, and reported by `problems`.

        Args:
            on_outcome: called for each graft that was loaded or refused.
            check: raises an error for a graft that the server can't serve.

        Returns:
            The loaded grafts by name.

        Raises:
            GraftError: a name in `given` can't be used.
            ArtifactError: a graft in `given` can't be loaded, or `folder` does not exist.
        """
        for name in self.given:
            if not self._is_usable(name):
                raise GraftError(_bad_name(name, self.backbones))
        if self.folder is not None and not self.folder.is_dir():
            raise ArtifactError(f"There is no folder {self.folder}: name a folder that contains folders of grafts.")
        grafts: dict[str, Graft] = {}

        def add(name: str, graft: Graft | None) -> None:
            assert graft is not None, "nothing is removed at the first load"
            if check is not None:
                check(name, graft)
            grafts[name] = graft

        self.refresh(add, on_outcome, now=True)
        for name in self.given:
            if name in self._problems:
                raise ArtifactError(self._problems[name])
        return grafts

    def refresh(self, replace: Replace, on_outcome: OnOutcome | None = None, *, now: bool = False) -> None:
        """Check all files once, and load the changed ones that have stayed the same since the last check.

        An error of a graft's files is logged and reported by `problems`; the graft in service is kept.

        Args:
            replace: puts a graft into service, or removes its name if the graft is None.
            on_outcome: called for each graft that was loaded, refused or withdrawn.
            now: load changed files at once, and try failed files again.

        Raises:
            OSError: `folder` can't be listed.
        """
        with self._lock:
            self._search()
            for name, watched in list(self._watched.items()):
                signature = _signature_of(watched)
                complete = now or signature == watched.seen  # files that are being written change between two checks
                try_again = now and name in self._problems
                changed = signature != watched.processed or try_again
                watched.seen = signature
                if complete and changed:
                    outcome = self._process(name, watched, replace)
                    if outcome is not None and on_outcome is not None:
                        on_outcome(name, outcome)

    def _is_usable(self, name: str) -> bool:
        return GRAFT_NAME.fullmatch(name) is not None and name not in self.backbones

    def _search(self) -> None:
        """Watch all folders that were given or that are in `folder` now."""
        for name, folder in self.given.items():
            self._watched.setdefault(name, WatchedFolder(folder, given=True))
        if self.folder is None or not self.folder.is_dir():
            return
        for folder in sorted(self.folder.iterdir()):
            name = folder.name
            graft = graft_in(folder)
            if name.startswith(".") or name in self.given or not (graft / JSON_NAME).is_file():
                continue
            if self._is_usable(name):
                self._watched.setdefault(name, WatchedFolder(graft, given=False))
            else:
                self._report(name, _bad_name(name, self.backbones))

    def _process(self, name: str, watched: WatchedFolder, replace: Replace) -> str | None:
        """Withdraw a graft whose folder is gone, or load its files. Return the outcome."""
        if watched.seen is None and not watched.given:
            return self._withdraw(name, watched, replace)
        try:
            watched.members = tuple(members_of(watched.folder))
            signature = _signature_of(watched)
            graft, entry = self._load(name, watched.folder)
            if _signature_of(watched) != signature:
                return None  # the files changed during loading; the next check loads them again
            replace(name, graft)
        except Exception as error:  # the old graft stays in service after any error of the new files
            if not isinstance(error, OSError):  # an error such as a full disk may be gone at the next check
                watched.processed = watched.seen
            consequence = "; the previous version stays in service" if watched.graft is not None else ""
            self._report(name, str(error) or type(error).__name__, consequence)
            return "refused"
        watched.processed = watched.seen = signature
        watched.graft = entry
        self._problems.pop(name, None)
        LOG.info("graft %s: loaded from %s", name, watched.folder)
        return "loaded"

    def _withdraw(self, name: str, watched: WatchedFolder, replace: Replace) -> str | None:
        del self._watched[name]
        self._problems.pop(name, None)
        if watched.graft is None:
            return None
        replace(name, None)
        LOG.info("graft %s: withdrawn, because its folder is gone", name)
        return "withdrawn"

    def _report(self, name: str, problem: str, consequence: str = "") -> None:
        if self._problems.get(name) != problem:
            LOG.warning("graft %s: %s%s", name, problem.rstrip("."), consequence)
        self._problems[name] = problem

    def _load(self, name: str, folder: Path) -> tuple[Graft, StoredGraft]:
        """Load a graft from a copy of its files, which later changes of the files don't affect."""
        with tempfile.TemporaryDirectory(prefix="graftlm-") as scratch:
            originals = [*members_of(folder), folder]
            copies = [_copy_files(original, Path(scratch)) for original in originals]
            copy = copies[-1]
            try:
                manifest = read_manifest(copy)
                backbone_name = self._backbone_of(manifest, copy)
                backbone = self.backbones[backbone_name]
                graft = load_model_of(copy, backbone)
                if backbone.model.dtype == torch.bfloat16:
                    _halve(graft)
            except GraftError as error:
                message = str(error)
                for copied, original in zip(copies, originals, strict=True):
                    message = message.replace(str(copied), str(original))
                raise ArtifactError(message) from None
        entry = StoredGraft(
            name=name,
            backbone=backbone_name,
            folder=folder,
            manifest=manifest,
            changed=int((folder / JSON_NAME).stat().st_mtime),
        )
        return graft, entry

    def _backbone_of(self, manifest: Manifest, folder: Path) -> str:
        """Return the name of the backbone on which a graft was trained.

        Raises:
            ArtifactError: it is none or several of the backbones.
        """
        if len(self.backbones) == 1:
            return next(iter(self.backbones))  # `load_graft` explains a difference
        trained_on = manifest.backbone.name
        names = [name for name, backbone in self.backbones.items() if manifest.backbone.difference(backbone) is None]
        if not names:
            raise ArtifactError(
                f"The graft {folder} was trained on {trained_on}, which is none of {', '.join(self.backbones)}: serve "
                "that backbone too (--backbone), or leave out the graft."
            )
        if len(names) > 1:
            raise ArtifactError(
                f"The graft {folder} was trained on {trained_on}, which is served as {' and '.join(names)}: serve it "
                "once."
            )
        return names[0]


def _copy_files(folder: Path, scratch: Path) -> Path:
    """Copy the files of a graft to a folder whose last two names are the same, and return it."""
    resolved = folder.absolute()
    copy = scratch / resolved.parent.name / resolved.name
    copy.mkdir(parents=True)
    for file in (JSON_NAME, TENSORS_NAME):
        if (folder / file).is_file():
            shutil.copyfile(folder / file, copy / file)
    return copy


def _halve(graft: Graft) -> None:
    """Cast a graft to bfloat16, or those of a stack, if a server does so."""
    for one in graft.grafts().values() if isinstance(graft, Stack) else [graft]:
        if one.served_in_bfloat16:
            one.to(torch.bfloat16)


def _signature_of(watched: WatchedFolder) -> FileSignature | None:
    """Return the signature of a graft's files, and of those of the grafts that act with it."""
    signature = read_signature(watched.folder)
    if signature is None:
        return None
    for member in watched.members:
        signature += read_signature(member) or (None,)
    return signature


def read_signature(folder: Path) -> FileSignature | None:
    """Return inode, size and times of a graft's files, which change whenever the files do.

    Returns:
        The values of graft.json and of graft.safetensors, with None for a missing file; None if both are missing.
    """
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
        return f"The graft's name {name} is the name of a backbone: choose another name."
    return f"The graft's name {name[:80]!r} is not usable in requests: choose {NAME_RULE}."

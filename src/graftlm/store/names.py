"""Names of grafts in requests and in folders of several grafts."""

from __future__ import annotations

import re
from pathlib import Path

GRAFT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "at most 64 letters, digits, dots, dashes and underscores, with a letter or digit at the beginning"


def graft_in(folder: Path) -> Path:
    """Return the folder of a run's graft, if a folder is that of a run, or else the folder itself."""
    of_run = folder / "graft"
    return of_run if (of_run / "graft.json").exists() and not (folder / "graft.json").exists() else folder


def name_of(folder: Path) -> str:
    """Return the name of a folder; of a folder named graft, as runs write it, the name of the run."""
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "graft" else resolved.name

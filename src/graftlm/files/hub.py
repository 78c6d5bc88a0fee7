"""Access to repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from graftlm.errors import ArtifactError
from graftlm.files.model_files import PACKAGED_MODELS, packaged_model

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FETCHED = ("*.json", "*.safetensors", "*.md", "*.jinja", "*.txt", "*.model")  # of the hub: no pickles, no code


def hub_name(name: str | Path) -> str | None:
    """The repository on the hub, OWNER/NAME, that a name means; None for a local path and an installed model."""
    text = str(name) if packaged_model(str(name)) else PACKAGED_MODELS.get(str(name).lower(), ("", str(name)))[1]
    return text if _HUB_NAME.fullmatch(text) and not Path(text).exists() else None


def holds(folder: str | Path, file: str) -> bool:
    """Whether a local folder, or a repository of the hub that can be read, holds a file."""
    if (repository := hub_name(folder)) is None:
        return (Path(folder) / file).is_file()
    from huggingface_hub import hf_hub_download

    try:
        return bool(hf_hub_download(repository, file))
    except Exception:  # the hub's client raises many kinds; whoever needs the file says which
        return False


def fetch_folder(folder: str | Path, marker: str) -> Path:
    """A local folder as it is; of a repository of the hub with the file `marker` a copy, without pickles and code.

    Raises ArtifactError if the hub has no such repository or file, or can't be reached.
    """
    if (repository := hub_name(folder)) is None:
        return Path(folder)
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        hf_hub_download(repository, marker)
        return Path(snapshot_download(repository, allow_patterns=[*_FETCHED]))
    except Exception as error:  # the hub's client raises many kinds
        raise ArtifactError(f"There is no folder {folder}, and {hub_problem(error, marker)}.") from error


def hub_problem(error: Exception, file: str = "file") -> str:
    """What went wrong at the hub and what to do, as the end of a sentence."""
    from httpx import TransportError
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"the hub's repository of that name has no {file}: name another"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return "the hub has none of that name that you may use: check it, or log in with `hf auth login`"
    if isinstance(error, TransportError | errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "the hub can't be reached: check the connection, and the variables HF_HUB_OFFLINE and HF_ENDPOINT"
    return f"the hub refuses it ({' '.join(str(error).split())[:300]}): correct that"


def has_report(folder: Path) -> bool:
    """Whether a folder holds a report rather than a graft. Raises ArtifactError if it holds neither."""
    if (fetch_folder(folder, "graft.json") / "graft.json").exists():
        return False
    if not (folder / "results.json").exists():
        raise ArtifactError(f"{folder} has no graft.json and no results.json: name a folder that graft train wrote.")
    return True

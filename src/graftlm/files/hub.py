"""Access to repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from graftlm.errors import ArtifactError
from graftlm.files.model_files import PACKAGED_MODELS, classifier_problem, is_classifier, packaged_model

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FETCHED = ("*.json", "*.safetensors", "*.md", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that are downloaded; pickles and code are not."""


def hub_name(name: str | Path) -> str | None:
    """Return the repository OWNER/NAME on the hub to which a name refers.

    Returns:
        The repository; None for an existing path, a packaged model that is installed, and a name of another form. The
        hub is not queried.
    """
    text = str(name)
    if not packaged_model(text) and text.lower() in PACKAGED_MODELS:
        _, text = PACKAGED_MODELS[text.lower()]
    is_repository = _HUB_NAME.fullmatch(text) is not None
    return text if is_repository and not Path(text).exists() else None


def holds(folder: str | Path, file: str) -> bool:
    """Return whether a local folder or a repository on the hub contains a file.

    The file of a repository is downloaded to the hub's cache. The result is also False if the hub is unreachable or
    refuses access.
    """
    repository = hub_name(folder)
    if repository is None:
        return (Path(folder) / file).is_file()
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(repository, file)
    except Exception:  # The client raises many kinds of errors. The caller that needs the file reports which one.
        return False
    return True


def fetch_folder(folder: str | Path, marker: str) -> Path:
    """Return a local folder unchanged, or download a repository from the hub without pickles and code.

    Args:
        folder: a folder, which is not checked, or OWNER/NAME on the hub.
        marker: a file that the repository must contain.

    Returns:
        The folder, or the repository's folder in the hub's cache.

    Raises:
        ArtifactError: the hub has no such repository or file, refuses access, or is unreachable.
    """
    repository = hub_name(folder)
    if repository is None:
        return Path(folder)
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        hf_hub_download(repository, marker)
        return Path(snapshot_download(repository, allow_patterns=list(_FETCHED)))
    except Exception as error:  # The client raises many kinds of errors.
        raise ArtifactError(f"There is no folder {folder}, and {hub_problem(error, marker)}.") from error


def hub_problem(error: Exception, file: str = "file") -> str:
    """Describe an error of the hub's client and the remedy.

    Args:
        error: an exception that huggingface_hub raised.
        file: name of the requested file.

    Returns:
        A main clause without a full stop.
    """
    from httpx import TransportError
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"the repository of that name on the hub has no {file}: name another repository"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            "the hub has no repository of that name, or you may not access it: check its spelling, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, TransportError | errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "the hub is unreachable: check the connection, and the variables HF_HUB_OFFLINE and HF_ENDPOINT"
    reason = " ".join(str(error).split())[:300]
    return f"the request to the hub failed ({reason}): change what this message names, or try again later"


def has_report(folder: Path) -> bool:
    """Return whether a folder contains a report rather than a graft.

    Raises:
        ArtifactError: the folder does not exist or contains neither, or it is the name of a repository on the hub that
            has no graft or can't be downloaded.
    """
    if (fetch_folder(folder, "graft.json") / "graft.json").exists():
        return False
    if not folder.exists():
        raise ArtifactError(f"There is no folder {folder}: name a folder that `graft train` wrote.")
    if is_classifier(folder):
        raise ArtifactError(classifier_problem(folder))
    if not (folder / "results.json").exists():
        raise ArtifactError(
            f"{folder} has neither graft.json nor results.json: name a folder that `graft train` wrote."
        )
    return True

"""Upload grafts and exported models to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from graftlm.errors import ArtifactError
from graftlm.files.hub import hub_problem
from graftlm.store.manifest import read_manifest


def push_to_hub(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload the folder of a graft, or of an exported model, to the Hugging Face hub; returns its address.

    Args:
        folder: a local folder; all of its files are uploaded.
        repository: OWNER/NAME; it is made where it does not exist.

    Raises ArtifactError if the folder holds neither, or the hub refuses.
    """
    from huggingface_hub import HfApi

    if not (Path(folder) / "config.json").is_file():
        read_manifest(folder)
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repository, commit_message="Add a graft")
    except Exception as error:  # the hub's client raises many kinds
        raise ArtifactError(f"{folder} can't be uploaded as {repository}: {hub_problem(error)}.") from error
    return f"{api.endpoint}/{repository}"

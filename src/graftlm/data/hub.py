"""Documents out of Hugging Face datasets: by name on the hub, or in a folder that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graftlm.data.documents import Document
from graftlm.data.files import check_columns, document_of, texts_of
from graftlm.errors import DataError, did_you_mean


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def read_dataset(
    name: str, *, subset: str | None, split: str, columns: Mapping[str, str], streaming: bool
) -> Iterator[Document]:
    """The rows of a dataset, one document each; `columns` as `columns_of` gives them.

    Raises:
        DataError: the dataset, its subset, split or column is not there, or it can't be reached.
    """
    path = Path(name).expanduser()
    rows = _load_saved(path, split) if is_saved_dataset(path) else _load(name, subset, split, streaming)
    if rows.column_names is not None:
        check_columns(rows.column_names, columns, f"The dataset {name}")
    for number, row in enumerate(_rows_of(rows, name)):
        where = f"{name}: row {number}"
        yield document_of(texts_of(row, columns, where), columns, where)


def _load_saved(path: Path, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"The dataset folder {path} is not whole ({_cause(error)}): write it again.") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise DataError(f"The dataset folder {path} has no split {split!r}{did_you_mean(split, map(str, loaded))}.")
    return loaded[split]


def _load(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # the loader's own errors share no base: HTTP, offline, unknown name, subset or split
        raise DataError(
            f"The dataset {name} (subset {subset}, split {split}) can't be loaded ({_cause(error)}): "
            "check its name, subset and split, and the network."
        ) from None


def _rows_of(rows: Any, name: str) -> Iterator[Any]:
    try:
        yield from rows
    except OSError as error:
        raise DataError(f"The dataset {name} broke off while it was read ({_cause(error)}): try again.") from None


def _cause(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__

"""Read documents from text files, tables and Hugging Face datasets, as the data section of a recipe sets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.data.config import DataConfig, check_domains
from graftlm.data.conversations import ChatExample, read_chat
from graftlm.data.source_config import OldSource, SourceConfig
from graftlm.data.table_files import JSON_SUFFIXES, TABLE_SUFFIXES, check_columns, check_text, read_values, values_of
from graftlm.errors import DataError, did_you_mean, first_line
from graftlm.files.digests import walk
from graftlm.files.reading import read_text

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_NO_VALUES: tuple[object, ...] = (None, "", [], {}, 1, "1")  # of a column beside messages: 1 marks what is learned
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py")
SEARCHED_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".parquet")  # files of a folder that are read by default


@dataclass(frozen=True, slots=True)
class Document:
    """A text, with an optional prompt that precedes it.

    Attributes:
        text: the text that is predicted.
        where: its location, for error messages: `file`, `file: line` or `dataset: row`.
        prompt: text before it that the model reads and does not predict.
        chat: the conversation whose answers are the text. The model then reads the conversation in the tokenizer's chat
            template.
        source: the title of the source that it was read from; empty for a document from memory.
        unread: columns of its row that are not read although they have a value, and that other programs would read.
    """

    text: str
    where: str = "in memory"
    prompt: str = ""
    chat: ChatExample | None = None
    source: str = field(default="", compare=False)
    unread: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        """The prompt followed by the text."""
        return self.prompt + self.text


def check_sources(config: DataConfig) -> None:
    """Check that the sources of new text and, unless `replay_fraction` is 0, of old text can be read.

    Only the first document of each source is read. Texts for tests and text that the backbone samples are not checked.

    Raises:
        DataError: there are no new sources, or no old sources although `replay_fraction` is above 0; or the first
            document of a source can't be read (see `read_documents`).
    """
    check_domains(config)
    sources: list[OldSource] = [*config.new]
    if config.replay_fraction:
        sources += config.old
    for source in sources:
        if isinstance(source, SourceConfig):
            next(read_documents(source))


def build_documents(sources: Iterable[SourceConfig]) -> list[Document]:
    """Read all documents of some sources into memory, in the order of the sources.

    Raises:
        DataError: a source can't be read, or has no text; see `read_documents`.
    """
    return [document for source in sources for document in read_documents(source)]


def read_documents(config: SourceConfig) -> Iterator[Document]:
    """Yield the documents of a source in a fixed order, without those that have only white space.

    Errors are raised during the iteration.

    Raises:
        DataError: a file or dataset does not exist or can't be read, a column is missing, a row is invalid, or none of
            the selected documents has text.
    """
    selected = _select(_read_source(config), config.documents)
    title = config.title
    is_empty = True
    for document in _limited(selected, config):
        is_empty = False
        yield replace(document, source=title)
    if is_empty:
        selection = f" in its documents {config.documents}" if config.documents else ""
        raise DataError(f"The source {config.name} has no text{selection}: name a source with text.")


def _read_source(config: SourceConfig) -> Iterator[Document]:
    path = Path(config.name).expanduser()
    if config.path is not None and not _is_saved_dataset(path):
        documents = _read_files(path, config)
    else:
        documents = _read_dataset(config)
    # A conversation whose only answers are calls of tools has no text.
    return (document for document in documents if document.chat is not None or document.text.strip())


def _read_files(path: Path, config: SourceConfig) -> Iterator[Document]:
    for file in find_files(path, config.pattern):
        yield from read_file(file, config)


def _select(documents: Iterator[Document], selection: str | None) -> Iterator[Document]:
    """Return the documents of a slice such as `0:23` or `-2:`. With a negative number, all of them are read first."""
    if selection is None:
        return documents
    start, stop = (int(part) if part.strip() else None for part in selection.split(":"))
    if "-" in selection:
        return iter(list(documents)[start:stop])
    return islice(documents, start, stop)


def _limited(documents: Iterator[Document], config: SourceConfig) -> Iterator[Document]:
    """Apply the limits of a source, and leave out documents without text after the skipped characters."""
    left = config.limit_characters
    for document in islice(documents, config.limit_documents):
        if document.chat is not None:
            yield document
            continue
        text = document.text[config.skip_characters :]
        if not text.strip():
            continue
        yield replace(document, text=text[:left])
        if left is not None:
            left -= len(text)
            if left <= 0:
                return


def find_files(path: Path, pattern: str | None = None) -> list[Path]:
    """Return the file at `path`, or the files below a folder, sorted.

    Hidden files and folders, and links to folders, are skipped.

    Args:
        path: a file or a folder.
        pattern: a glob that selects files of a folder: by their names, such as `*.c`, or by their paths inside the
            folder if it contains a slash, such as `letters/*.txt`. None selects files with a suffix of
            `SEARCHED_SUFFIXES`. It is ignored if `path` is a file.

    Raises:
        DataError: nothing is at `path`, or the folder has no such file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"There is no file or folder {path}: correct the source's path.")
    files = sorted(file for file in walk(path) if _matches(file.relative_to(path), pattern))
    if files:
        return files
    if pattern is not None:
        raise DataError(
            f"The folder {path} has no files that match the pattern {pattern!r}: put text there, or correct the "
            "source's pattern."
        )
    suffixes = ", ".join(SEARCHED_SUFFIXES)
    raise DataError(
        f"The folder {path} has no files ending in {suffixes}, optionally followed by .gz: put text there, or set the "
        "source's pattern."
    )


def _matches(relative: Path, pattern: str | None) -> bool:
    if pattern is None:
        return _has_suffix(relative, SEARCHED_SUFFIXES)
    name = relative.as_posix() if "/" in pattern else relative.name
    return fnmatch(name, pattern)


def _has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def read_file(path: Path, config: SourceConfig) -> Iterator[Document]:
    """Yield the documents of a file: the rows of a JSON, parquet, CSV or TSV file, or a whole file of plain text.

    Args:
        path: the file. A file with any other suffix is plain text.
        config: the source; only the names of its columns are used.

    Raises:
        DataError: the file can't be read, its content contradicts its suffix, a column is missing, or a row is invalid;
            or the file is plain text, but the source has a `prompt_column` or `messages_column`.
    """
    if _has_suffix(path, TABLE_SUFFIXES):
        is_padded = _has_suffix(path, (".parquet",))
        for values, where in read_values(path, config.columns, optional=config.optional_columns):
            yield _document(values, config, where, padded=is_padded)
        return
    for key in ("messages_column", "prompt_column"):
        if key in config.columns:
            raise DataError(
                f"{path} is plain text, but the source has a {key}: name a JSON, parquet, CSV or TSV file, or leave "
                f"the {key} out."
            )
    yield Document(read_text(path), str(path))


def _document(values: list[Any], config: SourceConfig, where: str, *, padded: bool) -> Document:
    """Return the document of a row, from the values of its columns; Arrow pads them with nulls."""
    cells = dict(zip(config.columns, values, strict=True))
    unread = tuple(name for name in config.watched_columns if cells.get(name) not in _NO_VALUES)
    if config.messages_column is not None:
        chat = read_chat(
            cells["messages_column"],
            where,
            cells["tools_column"],
            system=cells["system"],
            prompt=cells.get("prompt_column"),
            padded=padded,
        )
        return Document(chat.answers, where, chat=chat, unread=unread)
    text = check_text(cells["text_column"], config.text_column, where)
    prompt = ""
    if config.prompt_column is not None:
        prompt = check_text(cells["prompt_column"], config.prompt_column, where)
    if config.prompt_column is not None and not text.strip():
        raise DataError(
            f"{where} has a prompt and an empty completion in the column {config.text_column!r}: enter text, or leave "
            "the row out."
        )
    return Document(text, where, prompt, unread=unread)


def _read_dataset(config: SourceConfig) -> Iterator[Document]:
    """Yield the rows of a Hugging Face dataset from the hub, or from a folder that `save_to_disk` wrote."""
    path = Path(config.name).expanduser()
    rows = _load_saved(path, config.split) if _is_saved_dataset(path) else _load_from_hub(config)
    if rows.column_names is not None:
        check_columns(
            rows.column_names,
            config.columns,
            f"The dataset {config.name}",
            optional=config.optional_columns,
        )
    try:
        for number, row in enumerate(rows):
            where = f"{config.name}: row {number}"
            values = values_of(row, config.columns, where, optional=config.optional_columns)
            yield _document(values, config, where, padded=True)
    except OSError as error:
        raise DataError(
            f"The dataset {config.name} can't be read to its end ({first_line(error)}): try again."
        ) from None


def _is_saved_dataset(path: Path) -> bool:
    if (path / "dataset_dict.json").is_file():
        return True
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _load_saved(path: Path, split: str) -> Dataset:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"The dataset folder {path} can't be loaded ({first_line(error)}): write it again with save_to_disk."
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        names = [str(name) for name in loaded]
        suggestion = did_you_mean(split, names)
        raise DataError(f"The dataset folder {path} has no split {split!r}{suggestion}: correct the source's split.")
    return loaded[split]


def _load_from_hub(config: SourceConfig) -> Dataset | IterableDataset:
    import datasets

    try:
        return datasets.load_dataset(config.name, config.subset, split=config.split, streaming=config.streaming)
    except Exception as error:  # The errors of the loader share no base class.
        selection = f"split {config.split}"
        if config.subset is not None:
            selection = f"subset {config.subset}, {selection}"
        raise DataError(
            f"The dataset {config.name} ({selection}) can't be loaded ({first_line(error)}): check its name, subset "
            "and split, and the network."
        ) from None


def first_texts(sources: Sequence[SourceConfig], characters: int) -> Iterator[str]:
    """Yield the first texts of every source: the same number of characters of each.

    Args:
        sources: the sources.
        characters: number of characters in all.

    Raises:
        DataError: a source can't be read.
    """
    share = math.ceil(characters / len(sources))
    for source in sources:
        remaining = share
        for document in read_documents(source):
            yield document.full_text[:remaining]
            remaining -= len(document.full_text)
            if remaining <= 0:
                break

"""Documents: out of text files, tables and Hugging Face datasets, as the data section of a recipe names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from graftlm.config import Config
from graftlm.data.chats import ChatExample, read_chat
from graftlm.data.table_files import JSON_SUFFIXES, TABLE_SUFFIXES, check_columns, check_text, read_values, values_of
from graftlm.errors import DataError, did_you_mean, first_line
from graftlm.files.digests import walk
from graftlm.files.reading import read_text

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py")
SEARCHED_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".parquet")  # files that are read of a folder


@dataclass(frozen=True, slots=True)
class Document:
    """A text, with an optional prompt that precedes it.

    Attributes:
        text: what is predicted.
        where: its location, for messages: `file`, `file: line` or `dataset: row`.
        prompt: text before it, which the model sees and does not predict.
        chat: the conversation whose answers are the text; the tokenizer's chat template then says what the model sees.
    """

    text: str
    where: str = "in memory"
    prompt: str = ""
    chat: ChatExample | None = None

    @property
    def full_text(self) -> str:
        """Prompt and text."""
        return self.prompt + self.text


class SourceConfig(Config):
    """Where texts come from: a local `path`, or a Hugging Face `dataset`."""

    path: str | None = Field(None, description="A file, or a folder that is searched for text, JSON and parquet files.")
    pattern: str | None = Field(None, description="A glob that picks files of the folder, such as '*.c'.")
    dataset: str | None = Field(None, description="A dataset's name on the hub, or a local dataset folder.")
    subset: str | None = Field(None, description="The dataset's configuration, such as 'en'.")
    split: str = Field("train", description="The dataset's split.")
    text_column: str = Field("text", description="The column of JSON, parquet, CSV and datasets that holds the text.")
    prompt_column: str | None = Field(None, description="Column of the prompt before that text; it is not predicted.")
    messages_column: str | None = Field(
        None,
        description="The column of conversations, as in messages (role, content) or conversations (from, value). The "
        "assistant's turns are predicted, in the tokenizer's chat template.",
    )
    tools_column: str | None = Field(None, description="The column of the tools of a conversation, as JSON schemas.")
    streaming: bool = Field(False, description="Read while training instead of packing everything first.")
    documents: str | None = Field(None, description="A slice such as '0:23' or '-2:'; empty documents do not count.")
    limit_documents: int | None = Field(None, ge=1, description="Maximum number of documents.")
    skip_characters: int = Field(0, ge=0, description="Number of characters to skip at the start of each document.")
    limit_characters: int | None = Field(None, ge=1, description="Maximum characters in all; cuts the last document.")

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", value):
            raise ValueError("documents is a slice of numbers, such as '0:23' or '-2:'")
        return value

    def _problems(self) -> Iterator[str]:
        if (self.path is None) == (self.dataset is None):
            yield "a source has either a path or a dataset"
        if self.streaming and "-" in (self.documents or ""):
            yield "a streaming source can't count documents from its end: use numbers from the start"
        if (self.prompt_column or self.messages_column) and (self.skip_characters or self.limit_characters):
            yield "prompts and completions are never cut: leave out skip_characters and limit_characters"
        if self.messages_column is not None and self.prompt_column is not None:
            yield "a source has either a messages_column or a prompt_column: leave one out"
        if self.tools_column is not None and self.messages_column is None:
            yield "tools belong to conversations: set messages_column too"
        if self.prompt_column == self.text_column:
            yield f"prompt_column and text_column are both {self.text_column!r}: name two columns"

    @property
    def name(self) -> str:
        """The path or dataset, for messages."""
        return str(self.path or self.dataset)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are read, by their config keys."""
        if self.messages_column is not None:
            keys = ("messages_column", "tools_column")
        else:
            keys = ("text_column", "prompt_column")
        return {key: column for key in keys if (column := getattr(self, key)) is not None}


class SelfSourceConfig(Config):
    """Text that the backbone samples itself, where its own training data is not at hand.

    It is sampled once for a backbone and these settings, before the first training that needs it.
    """

    self: Literal[True] = Field(description="Marks this source: the backbone says itself what it knows.")
    tokens: int = Field(100_000, ge=1, le=10**9, description="Tokens to sample; those of prompts don't count.")
    length: int | None = Field(None, ge=2, description="Most tokens of a text; the data's row length when absent.")
    chat_fraction: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the tokens in conversations, of which the model writes both sides; when absent, half for "
        "a model with a chat template and none for others, nor where its user's turns don't end within half a text.",
    )
    openings: list[str] = Field([], description="Texts with which free text begins in turn; none begins with nothing.")
    temperature: float = Field(1.0, ge=0.01, le=100, description="Divides the logits; 1 draws what the model means.")
    top_p: float = Field(1.0, gt=0, le=1, description="Total probability of the tokens that are drawn from.")
    batch_size: int = Field(32, ge=1, description="Texts that are sampled together.")
    seed: int = Field(0, ge=0, description="Seed of the draws.")

    @model_validator(mode="before")
    @classmethod
    def _reads_nothing(cls, values: Any) -> Any:
        keys = SourceConfig.model_fields.keys() - cls.model_fields.keys()
        if isinstance(values, dict) and (read := sorted(keys & values.keys())):
            raise ValueError(f"a source with self: true reads nothing, and has {read[0]}: make it two sources")
        return values

    @property
    def name(self) -> str:
        """What messages call this source."""
        return "the backbone's own text"


def _kind_of_source(value: Any) -> str:
    given = "self" in value if isinstance(value, dict) else isinstance(value, SelfSourceConfig)
    return "tagged-self" if given else "tagged-source"


OldSource = Annotated[
    Annotated[SourceConfig, Tag("tagged-source")] | Annotated[SelfSourceConfig, Tag("tagged-self")],
    Discriminator(_kind_of_source),
]
"""Old text: a source, or the backbone's own samples."""


class DataConfig(Config):
    """The texts of a run: what the model learns, and what it should not forget."""

    new: list[SourceConfig] = Field([], description="What the model shall learn.")
    old: list[OldSource] = Field(
        [], description="Text like the backbone's own training data; `self: true` lets the backbone sample it."
    )
    replay_fraction: float = Field(0.1, ge=0, lt=1, description="Fraction p of rows from old; 0 ignores old.")
    old_objective: Literal["replay", "distil"] = Field(
        "replay",
        description="The loss of old rows. replay: of their next tokens; distil: the divergence from the bare "
        "backbone's predictions of them.",
    )
    length: int = Field(256, ge=2, description="Tokens per row.")
    boundaries: Literal["separate", "joined", "whole"] = Field(
        "separate",
        description="How documents share rows. separate: they don't see each other; joined: they are one stream; "
        "whole: separate, and a document that does not fit begins the next row (plain text longer than a row is cut).",
    )
    stream: bool = Field(
        False,
        description="Each row continues that of the step before, from a cache without gradients: for grafts that keep "
        "a state of texts longer than a row. Needs joined boundaries, and no replay.",
    )
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name ('old', 'new', others).")
    seed: int = Field(0, ge=0, description="Orders the rows.")


def check_sources(config: DataConfig) -> None:
    """Read the first document of each source, so that a wrong one is an error before anything is computed.

    Raises DataError if a source can't be read, there are no new sources, or no old ones though their share is above 0.
    """
    check_domains(config)
    for source in (*config.new, *(config.old if config.replay_fraction else ())):
        if isinstance(source, SourceConfig):
            next(read_documents(source))


def check_domains(config: DataConfig) -> None:
    """Raise a `DataError` where a domain that training reads has no sources."""
    if not config.new:
        raise DataError("The recipe has no new sources, and there is nothing to learn from: name some under new.")
    if config.replay_fraction > 0 and not config.old:
        raise DataError(
            f"replay_fraction is {config.replay_fraction:g}, but the recipe has no old sources: name some under old, "
            "or set replay_fraction to 0."
        )


def build_documents(sources: Iterable[SourceConfig]) -> list[Document]:
    """All documents of `sources`, in memory. Raises `DataError` if a source can't be read, or has no text."""
    return [document for source in sources for document in read_documents(source)]


def read_documents(config: SourceConfig) -> Iterator[Document]:
    """The documents of one source, in a fixed order; empty ones are left out.

    Raises DataError if the source can't be read, or has no text.
    """
    empty = True
    for document in _limited(_select(_read_source(config), config.documents), config):
        empty = False
        yield document
    if empty:
        selected = f" in its documents {config.documents}" if config.documents else ""
        raise DataError(f"The source {config.name} holds no text{selected}: name a source with text.")


def _read_source(config: SourceConfig) -> Iterator[Document]:
    path = Path(config.name).expanduser()
    if config.path is not None and not _is_saved_dataset(path):
        documents = (document for file in find_files(path, config.pattern) for document in read_file(file, config))
    else:
        documents = _read_dataset(config)
    return (document for document in documents if document.text.strip())


def _select(documents: Iterator[Document], selection: str | None) -> Iterator[Document]:
    if selection is None:
        return documents
    start, stop = (int(part) if part.strip() else None for part in selection.split(":"))
    return iter(list(documents)[start:stop]) if "-" in selection else islice(documents, start, stop)


def _limited(documents: Iterator[Document], config: SourceConfig) -> Iterator[Document]:
    left = config.limit_characters
    for document in islice(documents, config.limit_documents):
        text = document.text[config.skip_characters :]
        yield replace(document, text=text[:left])
        if left is not None and (left := left - len(text)) <= 0:
            return


def find_files(path: Path, pattern: str | None = None) -> list[Path]:
    """The file at `path`, or the files below a folder, sorted; hidden files and folders are skipped.

    A `pattern` such as `*.c` or `letters/*.txt` picks files; by default those with a known suffix are taken.

    Raises DataError if nothing is at `path`, or the folder holds no such file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"There is no file or folder {path}: check the source's path.")
    files = sorted(file for file in walk(path) if _matches(file.relative_to(path), pattern))
    if not files:
        suffixes = " ".join(SEARCHED_SUFFIXES)
        expected = f"files that match {pattern!r}" if pattern else f"files ending in {suffixes} (or .gz)"
        raise DataError(f"The folder {path} holds no {expected}: put text there, or set the source's pattern.")
    return files


def _matches(relative: Path, pattern: str | None) -> bool:
    if pattern is None:
        return _has_suffix(relative, SEARCHED_SUFFIXES)
    return fnmatch(relative.as_posix() if "/" in pattern else relative.name, pattern)


def _has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def read_file(path: Path, config: SourceConfig) -> Iterator[Document]:
    """The documents of one file, by its suffix: one a row of a table, or the whole file as plain text.

    Raises DataError if the file can't be read, or contradicts its suffix; the message names the line, row or byte.
    """
    if _has_suffix(path, TABLE_SUFFIXES) and not _has_suffix(path, (".tsv",)):  # of documents, TSV is plain text
        yield from (_document(values, config, where) for values, where in read_values(path, config.columns))
    elif column := next((key for key in config.columns if key != "text_column"), None):
        raise DataError(
            f"{path} is plain text, but the source has a {column}: name a JSON, parquet or CSV file, "
            f"or leave the {column} out."
        )
    else:
        yield Document(read_text(path), str(path))


def _document(values: list[Any], config: SourceConfig, where: str) -> Document:
    """The document of one row, from the values of its columns."""
    if config.messages_column is not None:
        chat = read_chat(values[0], where, *values[1:])
        return Document(chat.answers, where, chat=chat)
    named = zip(values, config.columns.values(), strict=True)
    text, *prompt = [check_text(value, column, where) for value, column in named]
    if prompt and not text.strip():
        raise DataError(
            f"{where} has a prompt and an empty completion in the column {config.text_column!r}: "
            "give it text, or leave the row out."
        )
    return Document(text, where, "".join(prompt))


def _read_dataset(config: SourceConfig) -> Iterator[Document]:
    """The rows of a Hugging Face dataset: from the hub, or from a folder that `save_to_disk` wrote."""
    path = Path(config.name).expanduser()
    rows = _load_saved(path, config.split) if _is_saved_dataset(path) else _load_from_hub(config)
    if rows.column_names is not None:
        check_columns(rows.column_names, config.columns, f"The dataset {config.name}")
    try:
        for number, row in enumerate(rows):
            where = f"{config.name}: row {number}"
            yield _document(values_of(row, config.columns, where), config, where)
    except OSError as error:
        raise DataError(f"The dataset {config.name} can't be read to its end ({first_line(error)}): retry.") from None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _load_saved(path: Path, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"The dataset folder {path} is not complete ({first_line(error)}): write it again.") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise DataError(f"The dataset folder {path} has no split {split!r}{did_you_mean(split, map(str, loaded))}.")
    return loaded[split]


def _load_from_hub(config: SourceConfig) -> Any:
    import datasets

    try:
        return datasets.load_dataset(config.name, config.subset, split=config.split, streaming=config.streaming)
    except Exception as error:  # the loader's errors share no base class
        raise DataError(
            f"The dataset {config.name} (subset {config.subset}, split {config.split}) can't be loaded "
            f"({first_line(error)}): check its name, subset and split, and the network."
        ) from None

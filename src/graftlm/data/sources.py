"""What a recipe says of its texts, and the documents that come of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from graftlm.config import Config
from graftlm.data.documents import Document
from graftlm.data.files import columns_of, find_files, read_file
from graftlm.data.hub import is_saved_dataset, read_dataset
from graftlm.errors import DataError


class SourceConfig(Config):
    """Where texts come from: a local `path`, or a Hugging Face `dataset`."""

    path: str | None = Field(None, description="A file, or a folder that is searched for text, JSON and parquet files.")
    pattern: str | None = Field(None, description="A glob that picks files of the folder, such as '*.c'.")
    dataset: str | None = Field(None, description="A dataset's name on the hub, or a local dataset folder.")
    subset: str | None = Field(None, description="The dataset's configuration, such as 'en'.")
    split: str = Field("train", description="The dataset's split.")
    text_column: str = Field("text", description="The column of JSON, parquet, CSV and datasets that holds the text.")
    prompt_column: str | None = Field(
        None, description="The column of what is given before that text; only the text itself is to be predicted."
    )
    streaming: bool = Field(False, description="Read while training instead of packing everything first.")
    documents: str | None = Field(None, description="A slice such as '0:23' or '-2:'; empty documents do not count.")
    limit_documents: int | None = Field(None, ge=1, description="At most so many documents.")
    skip_characters: int = Field(0, ge=0, description="Leave out so many characters at the start of each document.")
    limit_characters: int | None = Field(None, ge=1, description="At most so many characters; cuts the last document.")

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", value):
            raise ValueError("documents is a slice of numbers, such as '0:23' or '-2:'")
        return value

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source has either a path or a dataset")
        if self.streaming and "-" in (self.documents or ""):
            raise ValueError("a streaming source can't count documents from its end: use numbers from the start")
        if self.prompt_column is not None and (self.skip_characters or self.limit_characters):
            raise ValueError("prompts and completions are never cut: leave out skip_characters and limit_characters")
        if self.prompt_column == self.text_column:
            raise ValueError(f"prompt_column and text_column are both {self.text_column!r}: name two columns")
        return self

    @property
    def name(self) -> str:
        """The path or dataset, for messages."""
        return str(self.path or self.dataset)


def read_documents(config: SourceConfig) -> Iterator[Document]:
    """The documents of one source, in a fixed order; those without any text are left out.

    Raises:
        DataError: the source can't be read as asked.
    """
    documents = (document for document in _read_all(config) if document.text.strip())
    documents = _picked(documents, config.documents)
    documents = islice(documents, config.limit_documents)
    if config.skip_characters:
        documents = (Document(d.text[config.skip_characters :], d.where) for d in documents)
    return documents if config.limit_characters is None else _cut(documents, config.limit_characters)


def build_documents(sources: Iterable[SourceConfig]) -> list[Document]:
    """All documents of `sources`, in memory, as evaluation takes them.

    Raises:
        DataError: a source can't be read, or gives no text.
    """
    return [document for source in sources for document in read_some(source)]


def read_some(config: SourceConfig) -> Iterator[Document]:
    """As `read_documents`, but a source that gives nothing is an error."""
    empty = True
    for document in read_documents(config):
        empty = False
        yield document
    if empty:
        chosen = f" in its documents {config.documents}" if config.documents else ""
        raise DataError(f"The source {config.name} holds no text{chosen}: name a source with text.")


def _read_all(config: SourceConfig) -> Iterator[Document]:
    path = Path(config.name).expanduser()
    if config.path is not None and not is_saved_dataset(path):
        for file in find_files(path, config.pattern):
            yield from read_file(file, config.text_column, config.prompt_column)
        return
    yield from read_dataset(
        config.name,
        subset=config.subset,
        split=config.split,
        columns=columns_of(config.text_column, config.prompt_column),
        streaming=config.streaming,
    )


def _picked(documents: Iterator[Document], chosen: str | None) -> Iterator[Document]:
    if chosen is None:
        return documents
    start, stop = (int(part) if part.strip() else None for part in chosen.split(":"))
    if min(start or 0, stop or 0) < 0:
        return iter(list(documents)[start:stop])
    return islice(documents, start, stop)


def _cut(documents: Iterator[Document], limit: int) -> Iterator[Document]:
    for document in documents:
        yield Document(document.text[:limit], document.where)
        limit -= len(document.text)
        if limit <= 0:
            return

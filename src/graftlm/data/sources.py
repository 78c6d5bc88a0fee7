"""Read documents from text files, tables and Hugging Face datasets, as the data section of a recipe sets them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_serializer, model_validator

from graftlm.config import Config
from graftlm.data.conversations import BESIDE, BESIDE_PROMPTS, ChatExample, read_chat
from graftlm.data.table_files import JSON_SUFFIXES, TABLE_SUFFIXES, check_columns, check_text, read_values, values_of
from graftlm.data.text_sets import TextSets
from graftlm.errors import DataError, did_you_mean, first_line
from graftlm.files.digests import walk
from graftlm.files.reading import read_text

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_NEAR_KEYS = ("question_tokens", "answer_tokens", "answer_temperature")  # settings of own text near the new text
_NEAR_TOP_P = 0.9
_WEIGHT = "Share of tokens, relative to other sources; 0 leaves the source out."
_SET = "The named set that it belongs to."
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


class SourceConfig(Config):
    """A source of texts: a local `path` or a Hugging Face `dataset`."""

    path: str | None = Field(None, description="A file, or a folder that is searched for text, JSON and parquet files.")
    pattern: str | None = Field(None, description="A glob that picks files of the folder, such as '*.c'.")
    dataset: str | None = Field(None, description="A dataset's name on the hub, or a local dataset folder.")
    subset: str | None = Field(None, description="The dataset's configuration, such as 'en'.")
    split: str = Field("train", description="The dataset's split.")
    text_column: str = Field("text", description="The column that holds the text, except in plain files.")
    prompt_column: str | None = Field(
        None, description="The column of what precedes text or messages; it is not predicted."
    )
    messages_column: str | None = Field(
        None,
        description="The column of conversations: lists of messages, or answers to the prompt_column as text. The "
        "assistant's turns are predicted, in the tokenizer's chat template.",
    )
    tools_column: str | None = Field(
        None, description="The column of a conversation's tools, as JSON schemas; by default tools."
    )
    streaming: bool = Field(False, description="Read texts during training instead of packing all first.")
    documents: str | None = Field(None, description="A slice such as '0:23' or '-2:'; empty documents do not count.")
    limit_documents: int | None = Field(None, ge=1, description="Maximum number of documents.")
    skip_characters: int = Field(0, ge=0, description="Characters to skip at the start of each document.")
    limit_characters: int | None = Field(
        None, ge=1, description="Maximum number of characters in all; the last document is cut."
    )
    weight: float | None = Field(None, ge=0, description=_WEIGHT)
    set: str | None = Field(None, min_length=1, description=_SET)

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", value):
            raise ValueError("a slice of numbers, such as '0:23' or '-2:', is expected")
        return value

    def _problems(self) -> Iterator[str]:
        if self.path is None and self.dataset is None:
            yield "a source has neither a path nor a dataset: set one of them"
        if self.path is not None and self.dataset is not None:
            yield "a source has both a path and a dataset: leave one out"
        if self.streaming and "-" in (self.documents or ""):
            yield (
                f"documents is {self.documents!r}, but a streaming source can't count documents from its end: use "
                "numbers from the start"
            )
        if (self.prompt_column or self.messages_column) and (self.skip_characters or self.limit_characters):
            kind = "prompt_column" if self.prompt_column else "messages_column"
            key = "skip_characters" if self.skip_characters else "limit_characters"
            yield f"a source has a {kind}, whose texts are never cut, but also {key}: leave one out"
        if self.tools_column is not None and self.messages_column is None:
            yield "a source has a tools_column but no messages_column: set messages_column, or leave tools_column out"
        if self.prompt_column == self.text_column:
            yield f"prompt_column and text_column are both {self.text_column!r}: name two columns"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the source without a weight or set that it does not have, so that earlier runs keep keys."""
        return _without_nothing(serialize(self))

    @property
    def name(self) -> str:
        """The path as it is written in the config, or the name or folder of the dataset."""
        return str(self.path or self.dataset)

    @property
    def title(self) -> str:
        """The name with what selects a part of it, such as `wikipedia (da, test)`, for reports."""
        split = None if self.split == "train" else self.split
        parts = [part for part in (self.subset, split, self.pattern, self.documents) if part]
        return f"{self.name} ({', '.join(parts)})" if parts else self.name

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are read, by the config key that sets each, such as {"text_column": "body"}.

        Columns beside them that change their meaning and can't be used are looked at, too, by their own names.
        """
        if self.messages_column is not None:
            columns = {
                "messages_column": self.messages_column,
                "tools_column": self.tools_column or "tools",
                "system": "system",
            }
            if self.prompt_column is not None:
                columns["prompt_column"] = self.prompt_column
        else:
            columns = {"text_column": self.text_column}
            if self.prompt_column is not None:
                columns["prompt_column"] = self.prompt_column
        read = columns.values()
        return columns | {name: name for name in self.watched_columns if name not in read}

    @property
    def watched_columns(self) -> tuple[str, ...]:
        """Names of columns that are looked at, since other programs would read them."""
        of_prompts = BESIDE_PROMPTS if self.prompt_column is not None else ()
        of_conversations = BESIDE if self.messages_column is not None else ()
        return (*of_prompts, *of_conversations)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The keys of `columns` whose column may be missing: a conversation's tools, system message and the like."""
        tools = () if self.tools_column is not None else ("tools_column",)
        return ("system", *tools, *self.watched_columns)


class SelfSourceConfig(Config):
    """Text that the backbone samples, for backbones whose training data is not available.

    The text is sampled before the first training that needs it, once for each combination of backbone and settings.
    With `near`, the texts begin like those of `data.new`, and texts about things that the new text names are left out.
    """

    self: Literal[True] = Field(description="Marks a source whose text the backbone samples.")
    near: Literal["new", "prompts"] | None = Field(
        None,
        description="new: the texts begin with the first one to four words of a new question, prompt or sentence. Of a "
        "conversation, only the answer is predicted and counts as sampled. Texts about things that the new text names "
        "are left out. prompts: the texts answer the new prompts themselves. By default texts are not related to the "
        "new text.",
    )
    tokens: int = Field(100_000, ge=1, le=10**9, description="Tokens to sample, without those of prompts.")
    length: int | None = Field(
        None, ge=2, description="Maximum number of tokens of a text; by default the length of the data's rows."
    )
    chat_fraction: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the tokens in conversations, in which the model samples both sides. The default is 0.5 "
        "with a chat template, and 0 without one or if sampled user turns don't end within half of a text.",
    )
    openings: list[str] = Field(
        [], description="Texts with which free text begins, in turn; by default it begins as a document."
    )
    question_tokens: int = Field(
        24, ge=1, description="With near: maximum tokens of a question; longer ones are left out."
    )
    answer_tokens: int = Field(48, ge=1, description="With near: maximum tokens of an answer; longer ones are cut.")
    answer_temperature: float = Field(0.7, ge=0.01, le=100, description="With near: the temperature of answers.")
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="Divides the logits; 1 samples from the unmodified distribution. Answers with near have their own.",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Total probability of the tokens to sample from. With near the default is 0.9."
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Texts that are sampled at once; another number gives other texts. By default 32 on a CPU, and on "
        "a GPU what fits in half of the free memory, at most 256.",
    )
    seed: int = Field(0, ge=0, description="Seed of the sampling.")
    weight: float | None = Field(None, ge=0, description=_WEIGHT)
    set: str | None = Field(None, min_length=1, description=_SET)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        keys_of_sources = SourceConfig.model_fields.keys() - cls.model_fields.keys()
        unexpected = sorted(keys_of_sources & values.keys())
        if unexpected:
            raise ValueError(
                f"a source whose self is true reads no files, but it has the key {unexpected[0]}: leave the key out, "
                "or write two sources"
            )
        if values.get("near") is not None:
            # Small models finish few questions sensibly if all tokens may be drawn.
            return {"top_p": _NEAR_TOP_P} | values
        return values

    def _problems(self) -> Iterator[str]:
        if self.near is not None:
            if self.near == "prompts" and self.question_tokens != type(self).model_fields["question_tokens"].default:
                yield "question_tokens is set, but with near: prompts the questions are the new ones: leave it out"
            if self.openings:
                yield "openings is set, but with near the texts begin like the new text: leave out openings or near"
            if self.chat_fraction is not None:
                yield (
                    "chat_fraction is set, but with near the texts are conversations where the new ones are: leave out "
                    "chat_fraction or near"
                )
            return
        for key in _NEAR_KEYS:
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} is set, but only near uses it: set near to new, or leave {key} out"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the marker `self`, and leave out settings of `near` without it, so that earlier runs keep keys."""
        values = {"self": True} | _without_nothing(serialize(self))
        if self.near is not None:
            return values | {"top_p": self.top_p}
        for key in ("near", *_NEAR_KEYS):
            values.pop(key, None)
        return values

    @property
    def name(self) -> str:
        """The name of this source in messages."""
        if self.near == "prompts":
            return "the backbone's own answers to the new prompts"
        if self.near is not None:
            return "the backbone's own text near the new"
        return "the backbone's own text"


def _without_nothing(values: dict[str, object]) -> dict[str, object]:
    """Return the values of a source without a weight or set that is None."""
    return {key: value for key, value in values.items() if value is not None or key not in ("weight", "set")}


def _kind_of_source(value: object) -> str:
    if isinstance(value, dict):
        is_self = "self" in value
    else:
        is_self = isinstance(value, SelfSourceConfig)
    return "tagged-self" if is_self else "tagged-source"


OldSource = Annotated[
    Annotated[SourceConfig, Tag("tagged-source")] | Annotated[SelfSourceConfig, Tag("tagged-self")],
    Discriminator(_kind_of_source),
]
"""Old text: a source, or text that the backbone samples."""

_Source = TypeVar("_Source", bound="SourceConfig | SelfSourceConfig")


def _kind_of_sources(value: object) -> str:
    return "tagged-mapping" if isinstance(value, dict) else "tagged-list"


def used_sources(sources: list[_Source]) -> list[_Source]:
    """Return the sources without those whose weight is 0.

    Raises:
        ValueError: there are sources, and all have the weight 0.
    """
    used = [source for source in sources if source.weight != 0]
    if sources and not used:
        raise ValueError("all weights are 0, so no text would be read: leave the sources out, or raise one")
    return used


def _listed(value: list[OldSource] | dict[str, list[OldSource]]) -> list[OldSource]:
    """Return the sources of a list or of named sets as one list, without those whose weight is 0."""
    sources: list[OldSource] = []
    if isinstance(value, list):
        sources = value
    else:
        for name, own in value.items():
            if not own:
                raise ValueError(f"the set {name} has no sources: name some, or leave the set out")
            for source in own:
                if source.set not in (None, name):
                    raise ValueError(f"a source of the set {name} has set {source.set}: leave its key set out")
            sources += [source.model_copy(update={"set": name}) for source in used_sources(own)]
    return used_sources(sources)


if TYPE_CHECKING:
    NewSources = list[SourceConfig]
    OldSources = list[OldSource]
else:
    NewSources = Annotated[
        Annotated[list[SourceConfig], Tag("tagged-list")]
        | Annotated[dict[str, list[SourceConfig]], Tag("tagged-mapping")],
        Discriminator(_kind_of_sources),
        AfterValidator(_listed),
    ]
    OldSources = Annotated[
        Annotated[list[OldSource], Tag("tagged-list")] | Annotated[dict[str, list[OldSource]], Tag("tagged-mapping")],
        Discriminator(_kind_of_sources),
        AfterValidator(_listed),
    ]


class WeightsConfig(Config):
    """Weights of sources that follow from their sizes."""

    temperature: float = Field(
        gt=0, le=1, description="Each source has a share in proportion to its number of tokens to this power."
    )


class RewriteConfig(Config):
    """How the backbone writes the answers of new conversations in its own words, before training (SDFT).

    A conversation keeps its answer if the backbone's is empty, does not end, or lacks a name or number of that answer.
    """

    instruction: str = Field(
        "{question}\n\nThe right answer is: {answer}\n\nGive this answer in your own words. Keep all names and "
        "numbers, and add nothing.",
        description="What the backbone is asked, with {question} and {answer}.",
    )
    answer_tokens: int = Field(256, ge=1, description="Maximum tokens of an answer; longer ones are not used.")
    temperature: float = Field(0.7, ge=0.01, le=100, description="Divides the logits.")
    top_p: float = Field(_NEAR_TOP_P, gt=0, le=1, description="Total probability of the tokens to sample from.")
    batch_size: int | None = Field(None, ge=1, description="Texts that are sampled at once, as in own text.")
    seed: int = Field(0, ge=0, description="Seed of the sampling.")

    def _problems(self) -> Iterator[str]:
        for part in ("{question}", "{answer}"):
            if part not in self.instruction:
                yield f"the instruction does not have {part}, for which each conversation's own text is put: add it"


class DataConfig(Config):
    """The texts of a run: the new ones that the model learns, and the old ones that it must not forget."""

    new: NewSources = Field([], description="Texts that the model learns, or named sets of them.")
    rewrite: RewriteConfig | None = Field(
        None,
        description="Learn the answers of the new conversations in the backbone's own words.",
    )
    old: OldSources = Field(
        [],
        description="Texts like the backbone's training data, or named sets of them; `self: true` lets the backbone "
        "sample them.",
    )
    weights: WeightsConfig | None = Field(
        None, description="`temperature: T`: shares in proportion to tokens to the power of T."
    )
    replay_fraction: float = Field(0.1, ge=0, lt=1, description="Share of the rows that come from old; 0 ignores old.")
    old_objective: Literal["replay", "distil"] = Field(
        "replay",
        description="The loss of old rows. replay: the cross-entropy of their next tokens; distil: the divergence from "
        "the predictions of the bare backbone.",
    )
    new_objective: Literal["cross-entropy", "dft"] = Field(
        "cross-entropy",
        description="The loss of new rows. dft: cross-entropies times the tokens' probabilities.",
    )
    anchor: float = Field(0.0, ge=0, description="Weight of the divergence from the bare backbone in new rows.")
    length: int = Field(256, ge=2, description="Number of tokens of a row.")
    boundaries: Literal["separate", "joined", "whole"] = Field(
        "separate",
        description="How documents share rows. separate: they don't attend to each other; joined: they are one stream; "
        "whole: separate, and a document that does not fit begins the next row (plain text longer than a row is cut).",
    )
    stream: bool = Field(
        False,
        description="Each row continues that of the previous step from a cache without gradients, for grafts that keep "
        "a state over texts longer than a row. Needs joined boundaries and no replay.",
    )
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name, such as 'old' and 'new'.")
    seed: int = Field(0, ge=0, description="Seed of the order of rows.")

    def _problems(self) -> Iterator[str]:
        has_near = any(isinstance(source, SelfSourceConfig) and source.near for source in self.old)
        if has_near and any(source.streaming for source in self.new):
            yield (
                "a source of new is streaming, but near needs all new texts before training: set streaming to false, "
                "or leave near out"
            )
        yield from self._problems_of_weights()
        yield from self._problems_of_sets()
        yield from self._problems_of_rewriting()

    def _problems_of_rewriting(self) -> Iterator[str]:
        for source in self.new if self.rewrite is not None else ():
            if source.streaming:
                yield "a source of new is streaming, but rewrite needs all conversations: set streaming to false"
            if not source.messages_column:
                yield (
                    f"rewrite is set, but the source {source.name} of new has no conversations: set its "
                    "messages_column, or leave rewrite out"
                )

    def _problems_of_weights(self) -> Iterator[str]:
        for name, sources in self.test.items():
            if any(source.weight is not None or source.set is not None for source in sources):
                yield (
                    f"a source of the test text {name} has a weight or a set, which only training texts have: leave "
                    "the key out"
                )
        if self.weights is None:
            return
        for source in (*self.new, *self.old):
            if source.weight is not None:
                yield (
                    f"the source {source.name} has a weight, but weights.temperature sets the weights of all: leave "
                    "out one of them"
                )
            if isinstance(source, SourceConfig) and source.streaming:
                yield (
                    f"weights.temperature needs the sizes of all sources, but {source.name} is streaming: set its "
                    "streaming to false, or give each source a weight"
                )

    def _problems_of_sets(self) -> Iterator[str]:
        for domain, sources in (("new", self.new), ("old", self.old)):
            named = [source.set is not None for source in sources]
            if any(named) and not all(named):
                yield f"some sources of {domain} have a set and others have none: give every source a set, or none"
        yield from self.sets.problems(self.test)

    @property
    def sets(self) -> TextSets:
        """The names of the sets of new and old text."""
        new = dict.fromkeys(source.set for source in self.new if source.set is not None)
        old = dict.fromkeys(source.set for source in self.old if source.set is not None)
        return TextSets(new=tuple(new), old=tuple(old))

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the config without `weights` where there are none, so that earlier runs keep keys."""
        values = serialize(self)
        if self.weights is None:
            values.pop("weights", None)
        return values


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


def check_domains(config: DataConfig) -> None:
    """Raise `DataError` if there are no new sources, or no old ones although `replay_fraction` is above 0."""
    if not config.new:
        raise DataError("The recipe has no new sources, so there is nothing to learn: name some under data.new.")
    if config.replay_fraction > 0 and not config.old:
        raise DataError(
            f"data.replay_fraction is {config.replay_fraction:g}, but the recipe has no old sources: name some under "
            "data.old, or set data.replay_fraction to 0."
        )


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

"""The config of a source of text: files, tables and datasets, or text that the backbone samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_serializer, model_validator

from graftlm.config import Config
from graftlm.data.conversations import BESIDE, BESIDE_PROMPTS

NEAR_TOP_P = 0.9
"""Default `top_p` of texts that begin like given ones: small models finish few sensibly if all tokens may be drawn."""

_NEAR_KEYS = ("question_tokens", "answer_tokens", "answer_temperature")  # settings of own text near the new text
_WEIGHT = "Share of tokens, relative to other sources; 0 leaves the source out."
_SET = "The named set that it belongs to."


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
    def has_prompts(self) -> bool:
        """Whether its texts have prompts, or are conversations."""
        return self.prompt_column is not None or self.messages_column is not None

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
            return {"top_p": NEAR_TOP_P} | values
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

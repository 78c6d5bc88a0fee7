"""The data section of classifiers: which labelled sequences are read or made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from graftlm.config import UNKNOWN_TAG, Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.listops import longest_expression

Files = str | list[str]


class ListOpsConfig(Config):
    """Expressions of ListOps, from the published files or generated; training and test rows differ."""

    task: Literal["listops"] = Field("listops", description="Marks this form.")
    train: Files = Field([], description="Published TSV files (columns Source and Target); generated when absent.")
    test: Files = Field([], description="Files of test rows; named exactly if those of training rows are.")
    rows: int = Field(10_000, ge=1, description="Generated training rows; the published data has 96,000.")
    test_rows: int = Field(2_000, ge=1, description="Generated test rows.")
    shortest: int = Field(500, ge=4, description="Fewest tokens of a generated expression.")
    length: int = Field(2_000, ge=4, description="Most tokens of an expression; a longer one in a file is an error.")
    depth: int = Field(10, ge=1, le=100, description="Greatest depth of generated lists.")
    arguments: int = Field(10, ge=2, description="Most arguments of a generated operation; the fewest are 2.")
    seed: int = Field(0, ge=0, description="Seed of generated expressions.")

    def _problems(self) -> Iterator[str]:
        if bool(self.train) != bool(self.test):
            yield "train and test name files of expressions together: name files under both, or under neither"
        if self.shortest > self.length:
            yield f"shortest is {self.shortest}, above length, {self.length}: lower it, or raise length"
        if not self.train and self.shortest > longest_expression(self.depth, self.arguments):
            yield (
                f"shortest is {self.shortest}, but lists of depth {self.depth} with {self.arguments} arguments have at "
                f"most {longest_expression(self.depth, self.arguments)} tokens: lower it, or raise depth or arguments"
            )


class BytesConfig(Config):
    """Labelled texts, or pairs of texts as in retrieval, of local files; each byte of UTF-8 is a token."""

    task: Literal["bytes"] = Field(description="Marks this form.")
    train: Files = Field(description="Training rows: CSV, TSV, JSON or parquet files.")
    test: Files = Field(description="Files of test rows, on which the report measures.")
    text: Files = Field("text", description="The column of the text, or the two of a pair.")
    label: str = Field("label", min_length=1, description="The column of the class.")
    columns: list[str] = Field([], description="Names of the columns of files without a header.")
    labels: list[str] = Field([], description="The classes in order; by default the sorted ones of the training rows.")
    limit: int | None = Field(None, ge=1, description="Maximum number of training rows, chosen at random.")
    seed: int = Field(0, ge=0, description="Seed of that choice.")
    length: int = Field(1024, ge=4, description="Most tokens of a row; a pair has one more between its texts.")
    truncation: bool = Field(True, description="Cut longer rows at their end; false makes a longer one an error.")

    def _problems(self) -> Iterator[str]:
        for name in ("train", "test"):
            if not getattr(self, name):
                yield f"{name} names no file: name one"
        names = [self.text] if isinstance(self.text, str) else self.text
        columns = [*names, self.label]
        if len(names) not in (1, 2):
            yield f"the number of columns in text is {len(names)}, but one, or two of a pair, are expected"
        if len(set(columns)) < len(columns):
            yield f"text and label name the columns {', '.join(columns)}: name each column once"

    def labelled(self) -> LabelledConfig:
        """Return the same rows as a task of classification."""
        names = ("train", "test", "text", "label", "columns", "labels", "limit", "seed")
        return LabelledConfig(type="classification", **{name: getattr(self, name) for name in names})


class PixelsConfig(Config):
    """Images of a package's data set, read pixel by pixel from the upper left; each level of gray is a token."""

    task: Literal["pixels"] = Field(description="Marks this form.")
    images: Literal["digits"] = Field("digits", description="scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.")
    test_rows: int = Field(360, ge=10, le=1787, description="Test images, chosen at random.")
    seed: int = Field(0, ge=0, description="Seed of that choice.")


def _form(value: object) -> str | None:
    """Return the tag of the form of a data section; None if it names none."""
    task = value.get("task") if isinstance(value, Mapping) else getattr(value, "task", None)
    return f"tagged-{task}" if task in ("listops", "bytes", "pixels") else None


SequenceConfig = Annotated[
    Annotated[ListOpsConfig, Tag("tagged-listops")]
    | Annotated[BytesConfig, Tag("tagged-bytes")]
    | Annotated[PixelsConfig, Tag("tagged-pixels")],
    Discriminator(
        _form,
        custom_error_type=UNKNOWN_TAG,
        custom_error_message="the key task should be listops, bytes or pixels",
    ),
]
"""The data section in any form; error messages leave out its tag."""

"""The layout of a summarization prompt: the strings around the parts of a document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_serializer

from graftlm.config import Config
from graftlm.errors import DataError, first_line

LAYOUT_NAME = "layout.json"
"""Name of the file with the layout of a model, in the folder of the model."""


Context = Literal["introduction", "document"]


class PromptLayout(Config):
    """The strings before each part of a document, and the window.

    Args:
        instruction: instruction to a chat model, at the start of the user's message. None for models that continue a
            text.
        introduction: string before the introduction.
        extract: string before the extract; None for a model that reads the introduction only.
        summary: string before the summary.
        rest: string before the rest of the document, in training.
        window: maximum number of tokens of prompt and summary; None uses the model's maximum, but at most 4,096.
        context: what the writer reads besides the extract: `introduction`, or `document` as far as it fits into the
            window.
    """

    instruction: str | None = None
    introduction: str = ""
    extract: str | None = "\n\nMost important sentences:\n"
    summary: str = "\n\nSummary:\n"
    rest: str = "\n\n"
    window: int | None = Field(None, ge=16)
    context: Context = "introduction"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out `context` at its default, so that earlier runs can be resumed."""
        values = serialize(self)
        if self.context == "introduction":
            values.pop("context", None)
        return values


CHAT_LAYOUT = PromptLayout(
    instruction="Summarize the following document in one short paragraph. Say what it is about, what it proposes or "
    "finds, and why. Use only what the document says.",
    introduction="\n\n",
    summary="",
)
"""Layout for chat models that were not trained on a layout."""


def read_layout(folder: str | Path) -> PromptLayout | None:
    """Read the layout on which a model was trained.

    Args:
        folder: folder of the model.

    Returns:
        The layout, or None if the folder has no `layout.json`.

    Raises:
        DataError: `layout.json` can't be read or is not a layout.
    """
    path = Path(folder) / LAYOUT_NAME
    try:
        return PromptLayout.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be read as the layout of a writer ({first_line(error)}): restore the file, or train the "
            "writer again."
        ) from None

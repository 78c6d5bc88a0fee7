"""Summaries over HTTP: the body of a request, and its summary. Documents travel in the bodies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Base64Bytes, Field

from graftlm.config import Config
from graftlm.errors import DataError, GraftError
from graftlm.serving.clarification import Name
from graftlm.serving.clients import EngineClient, Event, OnEvent
from graftlm.serving.errors import LOG
from graftlm.serving.service import Service

if TYPE_CHECKING:
    from graftlm.pipelines.summarize import SourceDocument
    from graftlm.serving.writers import SummaryWriter

MAX_TEXT = 400_000  # in characters; extraction from such a text takes some seconds on one core
MAX_SENTENCES = 1000
_SUFFIXES = {"text": ".txt", "markdown": ".md", "html": ".html", "latex": ".tex"}


class SummarizeBody(Config):
    """A text or a PDF file to summarize.

    Args:
        text: the text, not a path.
        pdf: instead of a text, the bytes of a PDF file in base64.
        format: format of the text.
        sentences: maximum number of sentences of the extract.
        language: language code such as de; None detects it by the script, and assumes English for Latin script.
        model: the model that writes the summary from the extract; None returns the extract as the summary.
        max_tokens: maximum number of tokens of a written summary.
        stream: send events: the extract, the pieces of a written text, and finally the whole summary.
    """

    text: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    pdf: Base64Bytes | None = None
    format: Literal["text", "markdown", "html", "latex"] = "text"
    sentences: int = Field(5, ge=1, le=MAX_SENTENCES)
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    model: Name | None = None
    max_tokens: int = Field(160, ge=1)
    stream: bool = False

    def _problems(self) -> Iterator[str]:
        if (self.text is None) == (self.pdf is None):
            found = "neither text nor pdf is" if self.text is None else "both text and pdf are"
            yield f"{found} given, but one of them is expected"


def summarize(service: Service, body: SummarizeBody, client: EngineClient, on_event: OnEvent) -> Event:
    """Summarize a document.

    Args:
        service: the service of the model's backbone.
        body: the document and the options.
        client: generates the summary, if the body names a model.
        on_event: called with the format of the document and, for a written summary, with the extract and the pieces of
            the text.

    Returns:
        The summary, with the character range of each extracted sentence.

    Raises:
        DataError: the document can't be read.
        MissingExtraError: a package that reads the format is not installed.
        ServingError: the generation failed.
    """
    from graftlm.pipelines import summarize as pipeline

    document = _read_document(body)
    source: Event = {"format": body.format}
    if body.pdf is not None:
        source = {"format": "pdf", "pages": document.pages}
    writer = None
    if body.model is not None:
        writer = _writer(service, body.model, body.max_tokens, client, on_event)
    on_event(source)
    summary = pipeline.summarize(document, writer=writer, budget=pipeline.Budget(amount=body.sentences))
    return summary.to_json() | source


def _writer(
    service: Service,
    model: str,
    max_tokens: int,
    client: EngineClient,
    on_event: OnEvent,
) -> SummaryWriter:
    from graftlm.pipelines.summarize.prompt_layout import read_layout
    from graftlm.serving.writers import SummaryWriter

    entry = service.store.entries().get(model)
    return SummaryWriter(
        client=client,
        tokenizer=service.tokenizer,
        context=service.context,
        max_tokens=max_tokens,
        layout=None if entry is None else read_layout(entry.folder),
        on_event=on_event,
    )


def _read_document(body: SummarizeBody) -> SourceDocument:
    from graftlm.pipelines.summarize import read_foreign_pdf, read_text

    format_name = body.format if body.pdf is None else "pdf"
    try:
        if body.pdf is not None:
            return read_foreign_pdf(body.pdf, "The PDF file", MAX_TEXT, body.language)
        return read_text(body.text or "", _SUFFIXES[body.format], language=body.language)
    except RecursionError:
        raise DataError(f"The document is nested too deeply to be read as {format_name}: send plain text.") from None
    except (GraftError, MemoryError):
        raise
    except Exception as error:  # each parser raises its own exceptions
        LOG.exception("The parser of %s failed", format_name)
        raise DataError(
            f"The document could not be parsed as {format_name} (internal {type(error).__name__}): send plain text."
        ) from error

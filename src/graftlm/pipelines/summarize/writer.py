"""Writing: a causal language model continues introduction, extract and a summary mark with the summary.

The layout is introduction | extract | summary mark | summary | rest of the document. In training the rest is text of
the domain in windows of its own; in use it is not there. Marks are plain strings; a model that was trained on the
layout has them beside it in `layout.json`, and another one gets words that it may understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from graftlm.artifact import backbone_of, is_model, load_graft
from graftlm.backbone import UNLIMITED, max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.errors import DataError, RecipeError
from graftlm.grafts import GraftedModel
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.text import split_sentences

LAYOUT_NAME = "layout.json"
_WINDOW = 1024  # where the model does not say how long it can read
_OPENING_SENTENCES = 30  # stand in for an introduction that no heading names


class PromptLayout(Config):
    """What stands before each part.

    Args:
        introduction: before the introduction.
        extract: before the extracted sentences; None for a model that reads the introduction alone.
        summary: before the summary.
        rest: before the rest of the document, in training.
        window: tokens of a window.
    """

    introduction: str = ""
    extract: str | None = "\n\nMost important sentences:\n"
    summary: str = "\n\nSummary:\n"
    rest: str = "\n\n"
    window: int | None = Field(None, ge=16)


class SummaryDecoding(Config):
    """How a summary is written.

    Args:
        method: greedy takes the likeliest token, beam follows several continuations, sample chooses at random.
        max_new_tokens: of the summary; never exceeded.
        top_k: of sampling: among how many of the likeliest tokens.
        temperature: of sampling.
        num_beams: of beam search.
        seed: of sampling.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_new_tokens: int = Field(160, ge=1)
    top_k: int = Field(30, ge=1)
    temperature: float = Field(0.7, gt=0)
    num_beams: int = Field(4, ge=2)
    seed: int = Field(0, ge=0)

    def arguments(self) -> dict[str, Any]:
        """As transformers' `generate` takes them."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.method == "sample"}
        chosen["num_beams"] = self.num_beams if self.method == "beam" else 1
        if self.method == "sample":
            chosen |= {"top_k": self.top_k, "temperature": self.temperature, "top_p": 1.0}
        return chosen


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """A summary, and what the user should know about how it came about, a sentence each."""

    text: str
    notes: tuple[str, ...] = ()


class AbstractiveWriter(Protocol):
    """What writes a summary from an extract."""

    @property
    def name(self) -> str:
        """As it is told to the user."""
        ...

    def count_tokens(self, text: str) -> int:
        """How many of its tokens a text has."""
        ...

    def write(self, extract: Extract) -> WriterOutput:
        """The summary."""
        ...


class LanguageModelWriter:
    """Any causal language model, bare or grafted.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's.
        name: as it is told to the user.
        layout: as the model was trained; None takes words, and a note says so.
        decoding: how tokens are chosen.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "a language model",
        layout: PromptLayout | None = None,
        decoding: SummaryDecoding | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.layout, self._trained = layout or PromptLayout(), layout is not None
        self.decoding = decoding or SummaryDecoding()

    @property
    def window(self) -> int:
        """How many tokens prompt and summary may have."""
        limit = max_sequence_length(self.model)
        return min(self.layout.window or UNLIMITED, _WINDOW if limit == UNLIMITED else limit)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has, without those that the tokenizer adds."""
        return len(self._ids(text))

    def write(self, extract: Extract) -> WriterOutput:
        """Write a summary of at most `decoding.max_new_tokens`; it ends with a whole sentence where it has one.

        Raises:
            RecipeError: the window has no room for a summary and one extracted sentence.
        """
        prompt, notes = self.prompt(extract)
        text, cut = self.continuation(prompt)
        text = text.strip()
        if cut:
            text = drop_partial_sentence(text, extract.document.language)
        if not self._trained:
            notes.append(f"{self.name} was not trained on this layout: what it writes may be no summary at all.")
        if not text:
            notes.append(f"{self.name} wrote nothing: the extract stands in for it.")
        return WriterOutput(text or extract.text, tuple(notes))

    def continuation(self, prompt: list[int]) -> tuple[str, bool]:
        """What the model writes after the ids of a prompt, and whether it stopped at its limit of tokens."""
        return self.continuations([prompt])[0]

    @torch.inference_mode()
    def continuations(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        """The same for several prompts in one pass; a sample is then another one than that of its prompt alone."""
        if self.decoding.method == "sample":
            torch.manual_seed(self.decoding.seed)
        padding = padding_id(self.tokenizer)
        longest = max(map(len, prompts))
        rows = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self.model.generate(
            input_ids=torch.tensor(rows, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            pad_token_id=padding,
            **self.decoding.arguments(),
        )
        return [self._read(new) for new in output[:, longest:].tolist()]

    def _read(self, new: list[int]) -> tuple[str, bool]:
        """The text of new tokens, and whether nothing ended it before the limit."""
        ends = self.tokenizer.eos_token_id
        if ends in new:
            new = new[: new.index(ends) + 1]
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return text, len(new) == self.decoding.max_new_tokens and new[-1] != ends

    def prompt(self, extract: Extract) -> tuple[list[int], list[str]]:
        """Token ids of introduction, extract and summary mark, and notes on what had to be left out.

        The extract comes first: of the introduction only as much stays as the window has room for.

        Raises:
            RecipeError: the window has no room for a summary and one extracted sentence.
        """
        layout, notes = self.layout, []
        room = self.window - self.decoding.max_new_tokens - len(self._start()) - len(self._ids(layout.summary))
        middle = self._extract(extract, room, notes) if layout.extract is not None else []
        if room < 1:
            raise self._too_narrow("an introduction")
        opening = self._ids(layout.introduction + introduction_text(extract.document))[: room - len(middle)]
        return [*self._start(), *opening, *middle, *self._ids(layout.summary)], notes

    def _extract(self, extract: Extract, room: int, notes: list[str]) -> list[int]:
        """Token ids of as many extracted sentences as there is room for, the weightiest; a note where some are not."""
        kept = list(zip(extract.indices, extract.scores, strict=True))
        middle = self._joined(extract, [index for index, _ in kept])
        while len(middle) > room and kept:
            kept.remove(min(kept, key=lambda pair: pair[1]))
            middle = self._joined(extract, [index for index, _ in kept])
        if not kept:
            raise self._too_narrow("one extracted sentence")
        if len(kept) < len(extract.indices):
            notes.append(f"{self.name} could read {len(kept)} of the {len(extract.indices)} extracted sentences.")
        return middle

    def _joined(self, extract: Extract, indices: Sequence[int]) -> list[int]:
        sentences = extract.document.sentences
        return self._ids(f"{self.layout.extract}{' '.join(sentences[index].text for index in indices)}")

    def _too_narrow(self, what: str) -> RecipeError:
        return RecipeError(
            f"{self.name} reads {self.window} tokens, which has no room for {what} and "
            f"{self.decoding.max_new_tokens} tokens of summary: ask for a shorter summary, or name another writer."
        )

    def _start(self) -> list[int]:
        start = self.tokenizer.bos_token_id
        return [start] if isinstance(start, int) else []

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def introduction_text(document: SourceDocument) -> str:
    """The introduction; where no heading names one, the first sentences."""
    return " ".join(document.sentences[index].text for index in introduction_range(document))


def introduction_range(document: SourceDocument) -> range:
    """Its sentences."""
    return document.introduction or range(min(_OPENING_SENTENCES, len(document.sentences)))


def drop_partial_sentence(text: str, language: str = "en") -> str:
    """A text that was cut off, without the sentence that was; all of it where there is but one."""
    ends = [end for _, end in split_sentences(text, language)]
    return text[: ends[-2]] if len(ends) > 1 and text[-1:] not in '.!?。！？"”)' else text


def load_writer(
    folder: str | Path,
    decoding: SummaryDecoding | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModelWriter:
    """A model's folder or name, or a graft's folder, as a writer.

    Raises:
        ArtifactError: the folder is no whole graft.
        BackboneError: the model can't be loaded.
        DataError: its `layout.json` can't be read.
    """
    live = backbone_of(folder, None, device=device, trust_remote_code=trust_remote_code)
    model: Any = live.model if is_model(folder) else GraftedModel(live, {"graft": load_graft(folder, live)})
    model.eval()
    return LanguageModelWriter(model, live.need_tokenizer(), str(folder), read_layout(folder), decoding)


def read_layout(folder: str | Path) -> PromptLayout | None:
    """The layout that a model was trained on, from `layout.json` beside it; None where there is none.

    Raises:
        DataError: it can't be read.
    """
    path = Path(folder) / LAYOUT_NAME
    try:
        return PromptLayout.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        raise DataError(f"{path} is no layout of a summary: write it again by training the writer.") from None

"""Writers: a causal language model writes the summary after introduction, extract and a summary mark.

The layout of a document is introduction | extract | summary mark | summary | rest of the document. The rest is used in
training only, in windows of its own. Marks are plain strings. A model that was trained on a layout has it beside it as
`layout.json`; other models get marks in plain English.
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
from graftlm.backbone import UNLIMITED, leading_bos, max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.errors import DataError, RecipeError
from graftlm.grafts import GraftedModel
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.text import split_sentences

LAYOUT_NAME = "layout.json"
_DEFAULT_WINDOW = 1024  # for models without a maximum sequence length
_LEAD_SENTENCES = 30  # used as the introduction of a document without such a heading


class PromptLayout(Config):
    """The strings before each part of a document, and the window.

    Args:
        introduction: string before the introduction.
        extract: string before the extract; None for a model that reads the introduction only.
        summary: string before the summary.
        rest: string before the rest of the document, in training.
        window: maximum number of tokens of prompt and summary; None takes the model's maximum.
    """

    introduction: str = ""
    extract: str | None = "\n\nMost important sentences:\n"
    summary: str = "\n\nSummary:\n"
    rest: str = "\n\n"
    window: int | None = Field(None, ge=16)


class SummaryDecoding(Config):
    """Decoding of summaries.

    Args:
        method: `greedy`, `beam` search or `sample`.
        max_new_tokens: maximum number of tokens of a summary.
        top_k: for `sample`, number of most likely tokens to sample from.
        temperature: for `sample`, softmax temperature.
        num_beams: for `beam`, number of beams.
        seed: for `sample`, random seed.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_new_tokens: int = Field(160, ge=1)
    top_k: int = Field(30, ge=1)
    temperature: float = Field(0.7, gt=0)
    num_beams: int = Field(4, ge=2)
    seed: int = Field(0, ge=0)

    def generate_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate`."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.method == "sample"}
        arguments["num_beams"] = self.num_beams if self.method == "beam" else 1
        if self.method == "sample":
            arguments |= {"top_k": self.top_k, "temperature": self.temperature, "top_p": 1.0}
        return arguments


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """A written summary, and remarks for the user, one sentence each."""

    text: str
    notes: tuple[str, ...] = ()


class AbstractiveWriter(Protocol):
    """Writes a summary from an extract."""

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    def count_tokens(self, text: str) -> int:
        """Return the number of the writer's tokens in a text."""
        ...

    def write(self, extract: Extract) -> WriterOutput:
        """Write the summary."""
        ...


class LanguageModelWriter:
    """Writes summaries with a causal language model, with or without a graft.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: tokenizer of the model.
        name: name for people.
        layout: layout that the model was trained on; None takes marks in plain English, and a note says so.
        decoding: decoding of summaries.
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
        self.layout, self._is_trained = layout or PromptLayout(), layout is not None
        self.decoding = decoding or SummaryDecoding()

    @property
    def window(self) -> int:
        """Maximum number of tokens of prompt and summary together."""
        limit = max_sequence_length(self.model)
        return min(self.layout.window or UNLIMITED, _DEFAULT_WINDOW if limit == UNLIMITED else limit)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenize(text))

    def write(self, extract: Extract) -> WriterOutput:
        """Write a summary of at most `decoding.max_new_tokens`. A sentence that the limit cuts off is dropped.

        Raises:
            RecipeError: one extracted sentence and the summary do not fit into the window.
        """
        prompt, notes = self.build_prompt(extract)
        text, truncated = self.complete(prompt)
        text = text.strip()
        if truncated:
            text = drop_partial_sentence(text, extract.document.language)
        if not self._is_trained:
            notes.append(f"{self.name} was not trained on this layout: what it writes may be no summary at all.")
        if not text:
            notes.append(f"{self.name} wrote nothing: the extract stands in for it.")
        return WriterOutput(text or extract.text, tuple(notes))

    def complete(self, prompt: list[int]) -> tuple[str, bool]:
        """Return the model's completion of a prompt, and whether the token limit truncated it."""
        return self.complete_batch([prompt])[0]

    @torch.inference_mode()
    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        """Complete several prompts at once. Samples differ from those of each prompt alone."""
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
            **self.decoding.generate_arguments(),
        )
        return [self._decode(ids) for ids in output[:, longest:].tolist()]

    def _decode(self, ids: list[int]) -> tuple[str, bool]:
        """Return the text of generated ids, and whether the limit ended them instead of an EOS token."""
        eos = self.tokenizer.eos_token_id
        if eos in ids:
            ids = ids[: ids.index(eos) + 1]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text, len(ids) == self.decoding.max_new_tokens and ids[-1] != eos

    def build_prompt(self, extract: Extract) -> tuple[list[int], list[str]]:
        """Return token ids of introduction, extract and summary mark, and notes on what was left out.

        The extract has priority: the introduction is cut to the tokens that remain.

        Raises:
            RecipeError: one extracted sentence and the summary do not fit into the window.
        """
        layout, notes = self.layout, []
        bos = leading_bos(self.tokenizer)
        start, mark = [] if bos is None else [bos], self._tokenize(layout.summary)
        available = self.window - self.decoding.max_new_tokens - len(start) - len(mark)
        extract_ids = self._extract_ids(extract, available, notes) if layout.extract is not None else []
        if available < 1:
            raise self._window_error("an introduction")
        introduction_ids = self._tokenize(layout.introduction + introduction_text(extract.document))
        return [*start, *introduction_ids[: available - len(extract_ids)], *extract_ids, *mark], notes

    def _extract_ids(self, extract: Extract, available: int, notes: list[str]) -> list[int]:
        """Return token ids of the extract without the lowest-scored sentences that do not fit; add a note if any."""
        scores = dict(zip(extract.indices, extract.scores, strict=True))
        lowest_first = iter(sorted(scores, key=scores.__getitem__))
        kept = list(extract.indices)
        ids = self._join(extract, kept)
        while len(ids) > available and kept:
            kept.remove(next(lowest_first))
            ids = self._join(extract, kept)
        if not kept:
            raise self._window_error("one extracted sentence")
        if len(kept) < len(extract.indices):
            notes.append(f"{self.name} could read {len(kept)} of the {len(extract.indices)} extracted sentences.")
        return ids

    def _join(self, extract: Extract, indices: Sequence[int]) -> list[int]:
        sentences = extract.document.sentences
        return self._tokenize(f"{self.layout.extract}{' '.join(sentences[index].text for index in indices)}")

    def _window_error(self, part: str) -> RecipeError:
        return RecipeError(
            f"{self.name} reads {self.window} tokens, which has no room for {part} and "
            f"{self.decoding.max_new_tokens} tokens of summary: ask for a shorter summary, or name another writer."
        )

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def introduction_text(document: SourceDocument) -> str:
    """Return the introduction, or the first sentences of a document without one."""
    return " ".join(document.sentences[index].text for index in introduction_range(document))


def introduction_range(document: SourceDocument) -> range:
    """Return the indices of the sentences of `introduction_text`."""
    return document.introduction or range(min(_LEAD_SENTENCES, len(document.sentences)))


def drop_partial_sentence(text: str, language: str = "en") -> str:
    """Return a truncated text without its last, unfinished sentence; a single sentence is kept."""
    ends = [end for _, end in split_sentences(text, language)]
    return text[: ends[-2]] if len(ends) > 1 and text[-1:] not in '.!?。！？"”)' else text


def load_writer(
    folder: str | Path,
    decoding: SummaryDecoding | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModelWriter:
    """Load a writer from a model's folder or hub name, or from a graft's folder.

    Raises:
        ArtifactError: the graft is incomplete.
        BackboneError: the model can't be loaded.
        DataError: its `layout.json` can't be read.
    """
    backbone = backbone_of(folder, None, device=device, trust_remote_code=trust_remote_code)
    model: Any = backbone.model if is_model(folder) else GraftedModel(backbone, {"graft": load_graft(folder, backbone)})
    model.eval()
    return LanguageModelWriter(model, backbone.need_tokenizer(), str(folder), read_layout(folder), decoding)


def read_layout(folder: str | Path) -> PromptLayout | None:
    """Read the layout that a model was trained on; None without a `layout.json`.

    Raises:
        DataError: the file can't be read.
    """
    path = Path(folder) / LAYOUT_NAME
    try:
        return PromptLayout.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        raise DataError(f"{path} is no layout of a summary: write it again by training the writer.") from None

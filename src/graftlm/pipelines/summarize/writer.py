"""Writers: a causal language model writes the summary after introduction, extract and a summary mark.

The layout of a document is introduction | extract | summary mark | summary | rest of the document. Instead of the
introduction, a writer may read the whole document, or summaries that it wrote of its sections. Marks are plain
strings. A model that was trained on a layout has it in its folder as `layout.json`. Other models are prompted through
their chat template, or get marks in plain English if they have none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, PreTrainedTokenizerBase

from graftlm.backbone import (
    continuation_ids,
    end_ids,
    generate_rows,
    leading_bos,
    max_sequence_length,
    turn_end_ids,
)
from graftlm.config import Config
from graftlm.data.chats import render_question
from graftlm.errors import RecipeError
from graftlm.generation.generate import load_model
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.hierarchy import hierarchical_prompt
from graftlm.pipelines.summarize.prompt_layout import CHAT_LAYOUT, Context, PromptLayout, read_layout
from graftlm.pipelines.summarize.prompts import Opening, WriterPrompt, opening_range, sentences_opening
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.text import split_sentences, split_words

if TYPE_CHECKING:
    from graftlm.evaluation.inference import LanguageModel

_DEFAULT_WINDOW = 4096  # limit of the window of models that can read more
_PASSAGES = "\ue000"  # placeholder for the passages of a document while the chat template is filled
_PASSAGE_END = "."
_SENTENCE_ENDS = '.!?。！？"”)'


class SummaryDecoding(Config):
    """Decoding of summaries.

    Args:
        method: `greedy`, `beam` search or `sample`.
        max_new_tokens: maximum number of tokens of a summary.
        top_k: for `sample`, number of most likely tokens to sample from.
        temperature: for `sample`, softmax temperature.
        num_beams: for `beam`, number of beams.
        seed: for `sample`, random seed.
        no_repeat_ngram_size: size of the n-grams of tokens that occur at most once in a summary; 0 disables the limit.
            The prompt does not count.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_new_tokens: int = Field(160, ge=1)
    top_k: int = Field(30, ge=1)
    temperature: float = Field(0.7, gt=0)
    num_beams: int = Field(4, ge=2)
    seed: int = Field(0, ge=0)
    no_repeat_ngram_size: int = Field(6, ge=0)

    def generate_arguments(self, prompt_length: int) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate`.

        Args:
            prompt_length: number of tokens of the padded prompts.
        """
        processors = LogitsProcessorList()
        if self.no_repeat_ngram_size:
            processors.append(_NoRepetition(self.no_repeat_ngram_size, prompt_length))
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.method == "sample",
            "num_beams": self.num_beams if self.method == "beam" else 1,
            "logits_processor": processors,
        }
        if self.method == "sample":
            arguments["top_k"] = self.top_k
            arguments["temperature"] = self.temperature
            arguments["top_p"] = 1.0
        return arguments


class _NoRepetition(NoRepeatNGramLogitsProcessor):
    """The processor of transformers, applied to the tokens after the prompt."""

    def __init__(self, ngram_size: int, prompt_length: int) -> None:
        super().__init__(ngram_size)
        self._start = prompt_length

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids[:, self._start :], scores)


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """A written summary.

    Attributes:
        text: the summary.
        notes: remarks for the user, as sentences.
        read: indices of the sentences that the writer read; empty if these are the sentences of the extract.
    """

    text: str
    notes: tuple[str, ...] = ()
    read: tuple[int, ...] = ()


class _Passages(NamedTuple):
    """The passages of a document that fit into the window.

    Attributes:
        introduction: the texts before the extract.
        extract: the mark of the extract and its sentences.
        read: indices of the sentences.
        notes: remarks for the user, as sentences.
        kept: number of whole texts before the extract.
    """

    introduction: str
    extract: str
    read: tuple[int, ...]
    notes: list[str]
    kept: int


class LanguageModelWriter:
    """Writes summaries with a causal language model: a `GraftedModel` or any transformers model.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        name: human-readable name.
        layout: the layout on which the model was trained. None prompts a chat model through its chat template; other
            models get marks in plain English, and their summaries a note about it.
        decoding: decoding of summaries; None uses the defaults.
        is_hierarchical: whether the writer reads the document section by section, and before the extract its summaries
            of the sections (see `hierarchical_prompt`), instead of what the layout names.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "a language model",
        layout: PromptLayout | None = None,
        decoding: SummaryDecoding | None = None,
        *,
        is_hierarchical: bool = False,
    ) -> None:
        default_layout = CHAT_LAYOUT if tokenizer.chat_template else PromptLayout()
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.layout = layout or default_layout
        self.decoding = decoding or SummaryDecoding()
        self.is_hierarchical = is_hierarchical
        self._is_prompted_as_trained = layout is not None or self.layout is CHAT_LAYOUT

    @property
    def window(self) -> int:
        """Maximum number of tokens of prompt and summary together."""
        window = self.layout.window or _DEFAULT_WINDOW
        return min(window, max_sequence_length(self.model))

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The ids that the chat template puts behind an answer; none if the layout is not a chat."""
        return () if self.layout.instruction is None else turn_end_ids(self.tokenizer)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self.tokenize(text))

    def write(self, extract: Extract) -> WriterOutput:
        """Write the summary of one document; errors are those of `write_batch`."""
        return self.write_batch([extract])[0]

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        """Write a summary of at most `decoding.max_new_tokens` tokens for each document.

        A sentence that the limit truncates is dropped, and so is one that repeats another. If the model writes nothing,
        the summary is the extract.

        Args:
            extracts: the selected sentences of each document.

        Raises:
            DataError: the chat template can't be filled.
            RecipeError: the window has no room for an introduction and an extracted sentence.
        """
        build = partial(hierarchical_prompt, self) if self.is_hierarchical else self.build_prompt
        prompts = [build(extract) for extract in extracts]
        completions = self.complete_batch([prompt.ids for prompt in prompts])
        outputs = []
        for extract, prompt, (text, truncated) in zip(extracts, prompts, completions, strict=True):
            output = self._output(extract, prompt, text, truncated=truncated)
            outputs.append(output)
        return outputs

    def _output(self, extract: Extract, prompt: WriterPrompt, text: str, *, truncated: bool) -> WriterOutput:
        """Return the completion of a prompt as a summary."""
        text, repeated = _clean(text, extract.document.language, truncated=truncated)
        notes = list(prompt.notes)
        if repeated:
            notes.append(f"{self.name} repeated {repeated} of its sentences; the repetitions are removed.")
        if not self._is_prompted_as_trained:
            notes.append(f"{self.name} was not trained on this layout: its text may not be a summary.")
        if not text:
            notes.append(f"{self.name} wrote nothing: the summary is the extract.")
            text = extract.text
        return WriterOutput(text, tuple(notes), prompt.read)

    def write_texts(self, prompts: Sequence[WriterPrompt], language: str) -> list[str]:
        """Return the completion of each prompt, without a truncated sentence and without repeated ones.

        Args:
            prompts: the prompts.
            language: code of the language whose rules split the sentences.
        """
        completions = self.complete_batch([prompt.ids for prompt in prompts])
        return [_clean(text, language, truncated=truncated)[0] for text, truncated in completions]

    @torch.inference_mode()
    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        """Complete prompts. Samples differ from those of each prompt alone.

        Args:
            prompts: token ids of each prompt.

        Returns:
            The text of each completion, and whether the limit of tokens truncated it.
        """
        if not prompts:
            return []
        if self.decoding.method == "sample":
            torch.manual_seed(self.decoding.seed)
        ends = end_ids(self.model, self.tokenizer).union(self.turn_ends)
        longest = max(len(prompt) for prompt in prompts)
        arguments = self.decoding.generate_arguments(longest)
        rows = generate_rows(self.model, self.tokenizer, prompts, ends, **arguments)
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        completions = []
        for row, text in zip(rows, texts, strict=True):
            is_truncated = len(row) == self.decoding.max_new_tokens and row[-1] not in ends
            completions.append((text, is_truncated))
        return completions

    @property
    def reads_introduction(self) -> bool:
        """Whether it reads introduction and extract, and nothing else of a document."""
        return self.layout.context == "introduction" and not self.is_hierarchical

    def opening(self, document: SourceDocument) -> Opening:
        """Return what a prompt has before the extract: the introduction, or the whole document."""
        context = self.layout.context
        name = "introduction" if context == "introduction" else "document"
        indices = opening_range(document, context)
        return sentences_opening(document, indices, f"sentences of the {name}", fills=context != "introduction")

    def build_prompt(self, extract: Extract, opening: Opening | None = None) -> WriterPrompt:
        """Return the prompt of introduction, extract and summary mark, and notes on sentences that do not fit.

        A chat model's prompt is `messages` in its chat template, up to the start of its answer. Each part is tokenized
        behind the end of the part before it, so that the introduction has the same tokens with any extract and with
        none.

        Args:
            extract: the selected sentences of a document.
            opening: the texts before the extract; None uses those of `opening`.

        Raises:
            DataError: the chat template can't be filled.
            RecipeError: the window has no room for an introduction and an extracted sentence.
        """
        passages = self._fit(extract, opening or self.opening(extract.document))
        start, end = self._frame
        frame_start, _ = self.frame_texts
        introduction = passages.introduction
        ids = [
            *start,
            *self._tokenize_source(introduction, frame_start),
            *self._tokenize_source(passages.extract, introduction),
            *end,
        ]
        return WriterPrompt(ids, passages.notes, passages.read, passages.kept)

    def messages(self, extract: Extract) -> list[dict[str, str]]:
        """Return the message to a chat model: instruction, introduction, and the extract if the layout has one.

        Args:
            extract: the selected sentences of a document.

        Raises:
            DataError: the chat template can't be filled.
            RecipeError: the window has no room for an introduction and an extracted sentence.
        """
        passages = self._fit(extract, self.opening(extract.document))
        return self._messages_around(passages.introduction + passages.extract)

    def _messages_around(self, passages: str) -> list[dict[str, str]]:
        layout = self.layout
        content = f"{layout.instruction or ''}{layout.introduction}{passages}{layout.summary}"
        return [{"role": "user", "content": content}]

    @property
    def frame_texts(self) -> tuple[str, str]:
        """The texts before the introduction and after the extract, the same for all documents."""
        layout = self.layout
        if layout.instruction is None:
            return layout.introduction, layout.summary
        question = render_question(self._messages_around(_PASSAGES), self.tokenizer)
        start, _, end = question.partition(_PASSAGES)
        return start, end

    @property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens of `frame_texts`."""
        start_text, end_text = self.frame_texts
        start = self.tokenize(start_text)
        bos = leading_bos(self.tokenizer)
        if self.layout.instruction is None and bos is not None:
            start = [bos, *start]
        return start, self.tokenize(end_text, behind=_PASSAGE_END)

    def _fit(self, extract: Extract, opening: Opening) -> _Passages:
        """Return opening and extract as they fit into the window.

        The opening gets two thirds of the tokens, or less for an extracted sentence that needs more than a third; if it
        `fills` the window, it also gets what the extract does not need. The extract gets the rest. The first texts of
        the opening are kept, and the best sentences of the extract.
        """
        document = extract.document
        start, end = self._frame
        limit = self.window - self.decoding.max_new_tokens - len(start) - len(end)
        best = self._best_indices(extract)
        share = self._introduction_share(document, best, limit, fills=opening.fills)
        frame_start, _ = self.frame_texts
        introduction, count = self._fit_introduction(opening.texts, share, frame_start)

        def extract_text(count: int) -> str:
            return self._extract_text(document, best[:count])

        remaining = limit - len(self._tokenize_source(introduction, frame_start))
        kept = self._longest(len(best), extract_text, remaining, introduction)
        notes = []
        if kept < len(best):
            notes.append(f"{self.name} could read {kept} of the {len(best)} extracted sentences.")
        if count < len(opening.texts):
            notes.append(f"{self.name} could read {count} of the {len(opening.texts)} {opening.name}.")
        read = {*opening.indices[: max(count, 1)], *best[:kept]}
        return _Passages(introduction, extract_text(kept), tuple(sorted(read)), notes, count)

    def _best_indices(self, extract: Extract) -> list[int]:
        """Return the indices of the extracted sentences, best first; none if the layout has no extract."""
        if self.layout.extract is None:
            return []
        ranking = zip(extract.scores, extract.indices, strict=True)
        return [index for _, index in sorted(ranking, reverse=True)]

    def _extract_text(self, document: SourceDocument, indices: Sequence[int]) -> str:
        """Return the mark of the extract and the sentences in document order; an empty text for no sentences."""
        if not indices:
            return ""
        sentences = " ".join(document.sentences[index].text for index in sorted(indices))
        return f"{self.layout.extract}{sentences}"

    def _introduction_share(self, document: SourceDocument, best: Sequence[int], limit: int, *, fills: bool) -> int:
        """Return the maximum number of tokens of the introduction.

        Args:
            document: the document.
            best: indices of the extracted sentences, best first.
            limit: maximum number of tokens of introduction and extract.
            fills: see `Opening`.
        """
        share = 2 * limit // 3
        if fills:
            whole = self._extract_text(document, best)
            share = max(share, limit - len(self._tokenize_source(whole, _PASSAGE_END)))
        if best:
            first = self._extract_text(document, best[:1])
            share = min(share, limit - len(self._tokenize_source(first, _PASSAGE_END)))
        if share < 1:
            part = "an introduction and one extracted sentence" if best else "an introduction"
            raise RecipeError(
                f"{self.name} reads at most {self.window} tokens, which leaves no room for {part} next to a summary of "
                f"{self.decoding.max_new_tokens} tokens: request a shorter summary, or name another writer."
            )
        return share

    def _fit_introduction(self, opening: Sequence[str], limit: int, behind: str) -> tuple[str, int]:
        """Return the first texts of an opening that fit behind a text, and their number.

        If the first one does not fit, its beginning is returned, and the number is 0.
        """
        texts = opening[:limit]
        if not texts:
            return "", 0
        first = texts[0]

        def sentences_text(count: int) -> str:
            return " ".join(texts[:count])

        def beginning(characters: int) -> str:
            return first[:characters]

        count = self._longest(len(texts), sentences_text, limit, behind)
        if count:
            return sentences_text(count), count
        characters = self._longest(len(first), beginning, limit, behind)
        return beginning(characters), 0

    def _longest(self, count: int, text: Callable[[int], str], limit: int, behind: str) -> int:
        """Return the largest number up to `count` whose text has at most `limit` tokens behind another; else 0."""

        def size(number: int) -> int:
            return len(self._tokenize_source(text(number), behind))

        return bisect_right(range(1, count + 1), limit, key=size)

    def tokenize(self, text: str, *, behind: str = "") -> list[int]:
        """Return the token ids of a text, without special tokens at its ends.

        Args:
            text: the text.
            behind: the text that it continues, if there is one.
        """
        return continuation_ids(self.tokenizer, behind, text)

    def _tokenize_source(self, text: str, behind: str) -> list[int]:
        """Tokenize a document's text, in which a special token, such as the end of a chat's turn, is plain text."""
        return continuation_ids(self.tokenizer, behind, text, split_special_tokens=True)


def _clean(text: str, language: str, *, truncated: bool) -> tuple[str, int]:
    """Return a completion without a truncated sentence and repeated ones, and the number of the latter."""
    text = text.strip()
    if truncated:
        text = drop_partial_sentence(text, language)
    return drop_repeated_sentences(text, language)


def drop_partial_sentence(text: str, language: str = "en") -> str:
    """Return a text without its last sentence if that is unfinished. A single sentence is kept.

    Args:
        text: a text without white space at its end.
        language: code of the language whose rules split the sentences.
    """
    ends = [end for _, end in split_sentences(text, language)]
    is_finished = text[-1:] in _SENTENCE_ENDS
    if is_finished or len(ends) < 2:
        return text
    return text[: ends[-2]]


def drop_repeated_sentences(text: str, language: str = "en") -> tuple[str, int]:
    """Return a text without the sentences that repeat the words of an earlier one, and their number.

    Args:
        text: the text. Without repetitions it is returned unchanged.
        language: code of the language whose rules split the sentences.
    """
    sentences = [text[start:end] for start, end in split_sentences(text, language)]
    kept: dict[tuple[str, ...], str] = {}
    for sentence in sentences:
        words = tuple(split_words(sentence))
        kept.setdefault(words, sentence)
    repeated = len(sentences) - len(kept)
    if not repeated:
        return text, 0
    return " ".join(kept.values()), repeated


def load_writer(
    folder: str | Path,
    decoding: SummaryDecoding | None = None,
    *,
    window: int | None = None,
    context: Context | Literal["hierarchical"] | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModelWriter:
    """Load a writer.

    Args:
        folder: folder or hub name of a model, or folder of a graft.
        decoding: decoding of summaries; None uses the defaults.
        window: maximum number of tokens of prompt and summary; None uses the layout's.
        context: what the writer reads besides the extract, as in `PromptLayout`, or `hierarchical` (see
            `LanguageModelWriter`); None uses the layout's.
        device: torch device of the model; None selects the fastest available one.
        trust_remote_code: whether the model may run code of its repository.

    Raises:
        DataError: `layout.json` can't be read.
        RecipeError: the window has fewer than 16 tokens, or more than the model can read; or the context is unknown.
        ArtifactError: the folder is neither a graft nor a model, or the graft belongs to another backbone.
        BackboneError: the model can't be loaded, or has no tokenizer.
    """
    model, tokenizer = load_model(folder, device=device, trust_remote_code=trust_remote_code)
    writer = LanguageModelWriter(
        model.eval(),
        tokenizer,
        name=str(folder),
        layout=read_layout(folder),
        decoding=decoding,
    )
    writer.is_hierarchical = context == "hierarchical"
    changes = {"window": window, "context": None if writer.is_hierarchical else context}
    given = {name: value for name, value in changes.items() if value is not None}
    if given:
        writer.layout = PromptLayout.parse({**writer.layout.model_dump(), **given})
    if window is not None and writer.window < window:
        raise RecipeError(
            f"The window has {window:,} tokens, but {folder} reads {writer.window:,} at most: set a smaller window."
        )
    return writer

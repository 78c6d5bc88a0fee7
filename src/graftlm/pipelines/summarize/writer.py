"""Writers: a causal language model writes the summary after introduction, extract and a summary mark.

The layout of a document is introduction | extract | summary mark | summary | rest of the document. The rest is used in
training only, in windows of its own. Marks are plain strings. A model that was trained on a layout has it beside it as
`layout.json`. Others are asked through their chat template, or get marks in plain English if they have none.

In training an example is a prompt with its human summary, in one window. The rest of the documents fills windows of its
own, as domain text. The loss covers all tokens, the introduction included. Shape suffixes: B documents, T tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, PreTrainedTokenizerBase

from graftlm.backbone import end_ids, generate_rows, leading_bos, max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.data import NEW, OLD, Mixture, TokenBlocks, pack
from graftlm.data import Document as TrainingText
from graftlm.data.boundaries import split_rows
from graftlm.data.chats import render_question
from graftlm.errors import DataError, RecipeError
from graftlm.files.writing import write_atomically
from graftlm.generation.generate import load_model
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, check_rows, save_model

LAYOUT_NAME = "layout.json"
MODEL = "model"  # subfolder of a training run
_DEFAULT_WINDOW = 4096  # at most, of models that can read more
_PASSAGES = "\ue000"  # stands for the passages of a document while the chat template is filled
_LEAD_SENTENCES = 30  # used as the introduction of a document without such a heading


class PromptLayout(Config):
    """The strings before each part of a document, and the window.

    Args:
        instruction: what a chat model is asked, first in the user's message. None for models that continue a text.
        introduction: string before the introduction.
        extract: string before the extract; None for a model that reads the introduction only.
        summary: string before the summary.
        rest: string before the rest of the document, in training.
        window: maximum number of tokens of prompt and summary; None takes the model's maximum, or 4,096 if it is more.
    """

    instruction: str | None = None
    introduction: str = ""
    extract: str | None = "\n\nMost important sentences:\n"
    summary: str = "\n\nSummary:\n"
    rest: str = "\n\n"
    window: int | None = Field(None, ge=16)


CHAT_LAYOUT = PromptLayout(
    instruction="Summarize the following document in one short paragraph. Say what it is about, what it proposes or "
    "finds, and why. Use only what the document says.",
    introduction="\n\n",
    summary="",
)


class SummaryDecoding(Config):
    """Decoding of summaries.

    Args:
        method: `greedy`, `beam` search or `sample`.
        max_new_tokens: maximum number of tokens of a summary.
        top_k: for `sample`, number of most likely tokens to sample from.
        temperature: for `sample`, softmax temperature.
        num_beams: for `beam`, number of beams.
        seed: for `sample`, random seed.
        no_repeat_ngram_size: tokens in a row that a summary has once at most; 0 allows any. The prompt does not count.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_new_tokens: int = Field(160, ge=1)
    top_k: int = Field(30, ge=1)
    temperature: float = Field(0.7, gt=0)
    num_beams: int = Field(4, ge=2)
    seed: int = Field(0, ge=0)
    no_repeat_ngram_size: int = Field(6, ge=0)

    def generate_arguments(self, prompt_length: int) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate` for prompts that are padded to a length."""
        sample, size = self.method == "sample", self.no_repeat_ngram_size
        sampling = {"top_k": self.top_k, "temperature": self.temperature, "top_p": 1.0} if sample else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": sample,
            "num_beams": self.num_beams if self.method == "beam" else 1,
            "logits_processor": LogitsProcessorList([_NoRepetition(size, prompt_length)] if size else []),
            **sampling,
        }


class _NoRepetition(NoRepeatNGramLogitsProcessor):
    """transformers' processor, for which the prompt does not count."""

    def __init__(self, ngram_size: int, prompt_length: int) -> None:
        super().__init__(ngram_size)
        self._start = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids[:, self._start :], scores)


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """A written summary, remarks for the user, and the indices of the sentences that were read (none: the extract)."""

    text: str
    notes: tuple[str, ...] = ()
    read: tuple[int, ...] = ()


class WriterPrompt(NamedTuple):
    """Token ids of a prompt, remarks for the user, and the indices of the sentences in the prompt."""

    ids: list[int]
    notes: list[str]
    read: tuple[int, ...]


class LanguageModelWriter:
    """Writes summaries with a causal language model: a `GraftedModel` or any transformers model.

    Without the layout that the model was trained on, a chat model is asked through its chat template. Other models get
    marks in plain English, and a note says so.
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
        self.layout = layout or (CHAT_LAYOUT if tokenizer.chat_template else PromptLayout())
        self._knows_layout = layout is not None or self.layout is CHAT_LAYOUT
        self.decoding = decoding or SummaryDecoding()

    @property
    def window(self) -> int:
        """Maximum number of tokens of prompt and summary together."""
        return min(self.layout.window or _DEFAULT_WINDOW, max_sequence_length(self.model))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenize(text))

    def write(self, extract: Extract) -> WriterOutput:
        """Write one summary, as `write_batch` does."""
        return self.write_batch([extract])[0]

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        """Write summaries of at most `decoding.max_new_tokens` each; errors as of `build_prompt`.

        A sentence that the limit cuts off is dropped, and so is one that repeats another.
        """
        prompts = [self.build_prompt(extract) for extract in extracts]
        completions = self.complete_batch([prompt.ids for prompt in prompts])
        return [self._output(*values) for values in zip(extracts, prompts, completions, strict=True)]

    def _output(self, extract: Extract, prompt: WriterPrompt, completion: tuple[str, bool]) -> WriterOutput:
        (text, truncated), notes, language = completion, prompt.notes, extract.document.language
        text = drop_partial_sentence(text.strip(), language) if truncated else text.strip()
        text, repeated = drop_repeated_sentences(text, language)
        if repeated:
            notes.append(f"{self.name} repeated {repeated} of its sentences, which are left out.")
        if not self._knows_layout:
            notes.append(f"{self.name} was not trained on this layout: what it writes may be no summary at all.")
        if not text:
            notes.append(f"{self.name} wrote nothing: the extract stands in for it.")
        return WriterOutput(text or extract.text, tuple(notes), prompt.read)

    @torch.inference_mode()
    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        """Complete prompts, and say which the limit truncated. Samples differ from those of each prompt alone."""
        if self.decoding.method == "sample":
            torch.manual_seed(self.decoding.seed)
        ends, arguments = end_ids(self.model, self.tokenizer), self.decoding.generate_arguments(max(map(len, prompts)))
        rows = generate_rows(self.model, self.tokenizer, prompts, ends, **arguments)
        limit = self.decoding.max_new_tokens
        truncated = [len(row) == limit and row[-1] not in ends for row in rows]
        return [*zip(self.tokenizer.batch_decode(rows, skip_special_tokens=True), truncated, strict=True)]

    def build_prompt(self, extract: Extract) -> WriterPrompt:
        """Return the prompt of introduction, extract and summary mark, and notes on what was left out.

        A chat model's prompt is `messages` in its chat template, up to the start of its answer. Each part has tokens of
        its own, so the introduction has the same tokens with any extract and with none.

        Raises `DataError` if the chat template can't be filled, `RecipeError` if the window has no room.
        """
        introduction, extracted, read, notes = self._fit(extract)
        start, end = self._frame
        ids = [*start, *self._tokenize_source(introduction), *self._tokenize_source(extracted), *end]
        return WriterPrompt(ids, notes, read)

    def messages(self, extract: Extract) -> list[dict[str, str]]:
        """Return the message that a chat model gets: instruction, introduction, and the extract if it is read."""
        introduction, extracted, _, _ = self._fit(extract)
        return self._message(introduction + extracted)

    def _message(self, passages: str) -> list[dict[str, str]]:
        layout = self.layout
        parts = (layout.instruction or "", layout.introduction, passages, layout.summary)
        return [{"role": "user", "content": "".join(parts)}]

    @property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens before the introduction and behind the extract, the same for all documents."""
        layout = self.layout
        if layout.instruction is None:
            bos = leading_bos(self.tokenizer)
            start = self._tokenize(layout.introduction)
            return start if bos is None else [bos, *start], self._tokenize(layout.summary)
        start, _, end = render_question(self._message(_PASSAGES), self.tokenizer).partition(_PASSAGES)
        return self._tokenize(start), self._tokenize(end)

    def _fit(self, extract: Extract) -> tuple[str, str, tuple[int, ...], list[str]]:
        """Return introduction and extract as they fit into the window, the indices of their sentences, and notes.

        The introduction gets two thirds of the tokens, or less for an extracted sentence that needs more than a third.
        The extract gets the rest. First sentences of the introduction are kept, and best ones of the extract.
        """
        document, layout = extract.document, self.layout
        limit = self.window - self.decoding.max_new_tokens - sum(map(len, self._frame))
        ranking = zip(extract.scores, extract.indices, strict=True)
        best = [] if layout.extract is None else [index for _, index in sorted(ranking, reverse=True)]

        def extract_text(count: int) -> str:
            sentences = (document.sentences[index].text for index in sorted(best[:count]))
            return f"{layout.extract}{' '.join(sentences)}" if count else ""

        share = min(2 * limit // 3, limit - len(self._tokenize_source(extract_text(1)))) if best else 2 * limit // 3
        if share < 1:
            part = "one extracted sentence" if best else "an introduction"
            raise RecipeError(
                f"{self.name} reads {self.window} tokens, which has no room for {part} and "
                f"{self.decoding.max_new_tokens} tokens of summary: ask for a shorter summary, or name another writer."
            )
        opening = introduction_range(document)
        texts = [document.sentences[index].text for index in opening[:share]]
        count = self._longest(len(texts), lambda count: " ".join(texts[:count]), share)
        part = 0 if count else self._longest(len(texts[0]), lambda end: texts[0][:end], share)
        text = " ".join(texts[:count]) or texts[0][:part]
        kept = self._longest(len(best), extract_text, limit - len(self._tokenize_source(text)))
        parts = ((kept, len(best), "extracted sentences"), (count, len(opening), "sentences of the introduction"))
        notes = [f"{self.name} could read {few} of the {all_} {what}." for few, all_, what in parts if few < all_]
        return text, extract_text(kept), tuple(sorted({*opening[: max(count, 1)], *best[:kept]})), notes

    def _longest(self, count: int, text: Callable[[int], str], limit: int) -> int:
        """Return the largest number up to `count` whose text has at most `limit` tokens; 0 if there is none."""
        return bisect_right(range(1, count + 1), limit, key=lambda number: len(self._tokenize_source(text(number))))

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])

    def _tokenize_source(self, text: str) -> list[int]:
        """Tokenize a document's text, in which a special token, such as the end of a chat's turn, is plain text."""
        return self._tokenize(text, split_special_tokens=True)


def introduction_range(document: SourceDocument) -> range:
    """Return the indices of the sentences of the introduction, or of the first ones of a document without one."""
    return document.introduction or range(min(_LEAD_SENTENCES, len(document.sentences)))


def drop_partial_sentence(text: str, language: str = "en") -> str:
    """Return a truncated text without its last, unfinished sentence; a single sentence is kept."""
    ends = [end for _, end in split_sentences(text, language)]
    return text[: ends[-2]] if len(ends) > 1 and text[-1:] not in '.!?。！？"”)' else text


def drop_repeated_sentences(text: str, language: str = "en") -> tuple[str, int]:
    """Return a text without the sentences whose words an earlier one has, and their number."""
    sentences = [text[start:end] for start, end in split_sentences(text, language)]
    kept: dict[tuple[str, ...], str] = {}
    for sentence in sentences:
        kept.setdefault(tuple(split_words(sentence)), sentence)
    repeated = len(sentences) - len(kept)
    return " ".join(kept.values()) if repeated else text, repeated


def load_writer(
    folder: str | Path,
    decoding: SummaryDecoding | None = None,
    *,
    window: int | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModelWriter:
    """Load a writer from a model's folder or hub name, or from a graft's folder; `window` replaces the layout's.

    Raises the errors of `load_model`, `DataError` for an unreadable `layout.json`, `RecipeError` for too wide a window.
    """
    model, tokenizer = load_model(folder, device=device, trust_remote_code=trust_remote_code)
    writer = LanguageModelWriter(model.eval(), tokenizer, str(folder), read_layout(folder), decoding)
    if window is not None:
        writer.layout = PromptLayout.parse(writer.layout.model_dump() | {"window": window})
        if writer.window < window:
            raise RecipeError(f"{folder} reads {writer.window:,} tokens at most: ask for a window of no more.")
    return writer


def read_layout(folder: str | Path) -> PromptLayout | None:
    """Read the layout that a model was trained on, or raise `DataError`; None without a `layout.json`."""
    path = Path(folder) / LAYOUT_NAME
    try:
        return PromptLayout.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        raise DataError(f"{path} is no layout of a summary: write it again by training the writer.") from None


@dataclass(frozen=True)
class WriterExample:
    """The extract of a document and its human summary."""

    extract: Extract
    summary: str


def train_writer(
    writer: LanguageModelWriter,
    examples: Sequence[WriterExample],
    training: TrainingConfig,
    out: str | Path,
    *,
    rest_fraction: float = 0.5,
    progress: bool = True,
) -> Path:
    """Train all weights of a writer's model on its layout. An interrupted run resumes from its last checkpoint.

    Rows have the length of the writer's window; `decoding.max_new_tokens` of them are for the summary. `rest_fraction`
    of the rows come from the rest of the documents. The history and the checkpoints lie in `out`.

    Returns the folder of model, tokenizer and layout, for `load_writer`.

    Raises `DataError` without an example, `RecipeError` if one does not fit into the window, or that into the model.
    """
    check_rows(writer.model, length=writer.window, longest=writer.window, boundaries="whole")
    sources: dict[int, TokenBlocks] = {}
    if rest_fraction:
        sources[OLD] = rest_rows(writer, [example.extract.document for example in examples])
    if rest_fraction < 1:
        sources[NEW] = example_rows(writer, examples)
    mixture = Mixture(sources, {OLD: rest_fraction, NEW: 1 - rest_fraction}, training.batch_size, training.seed)
    identity = {"layout": writer.layout.model_dump(mode="json")}
    train(LanguageModel(writer.model), mixture, training, out, identity=identity, progress=progress)
    writer.model.eval()
    folder = Path(out) / MODEL
    save_model(writer.model, writer.tokenizer, folder)
    layout = writer.layout.model_copy(update={"window": writer.window})
    write_atomically(folder / LAYOUT_NAME, layout.model_dump_json(indent=2).encode())
    return folder


def example_rows(writer: LanguageModelWriter, examples: Sequence[WriterExample]) -> TokenBlocks:
    """Pack whole examples into rows of the writer's window; errors as of `train_writer`.

    Attention does not cross examples.
    """
    if not examples:
        raise DataError("There is no document with a summary to learn from: give at least one.")
    pairs = (prompt_and_summary(writer, example) for example in examples)
    streams = [np.array([*prompt, *summary], dtype=np.int32) for prompt, summary in pairs]
    for ids in streams:
        ids[0] = ~ids[0]  # marks the start of a document
    rows = split_rows(np.concatenate(streams), writer.window, "whole")
    return TokenBlocks(rows, boundaries="whole", pad_id=padding_id(writer.tokenizer))


def prompt_and_summary(writer: LanguageModelWriter, example: WriterExample) -> tuple[list[int], list[int]]:
    """Return token ids of prompt and summary. The summary ends with EOS, or is cut to `max_new_tokens`."""
    prompt = writer.build_prompt(example.extract).ids
    ids = writer._tokenize(example.summary)
    eos = writer.tokenizer.eos_token_id
    return prompt, [*ids, *([eos] if isinstance(eos, int) else [])][: writer.decoding.max_new_tokens]


def rest_rows(writer: LanguageModelWriter, documents: Sequence[SourceDocument]) -> TokenBlocks:
    """Pack the documents without their introductions into rows of the window, or raise `DataError` without text."""
    texts = (TrainingText(writer.layout.rest + rest_text(document), document.name) for document in documents)
    return pack(texts, writer.tokenizer, writer.window, boundaries="whole", name="The rest of the documents")


def rest_text(document: SourceDocument) -> str:
    """Return the sentences outside the introduction."""
    introduction = introduction_range(document)
    return " ".join(sentence.text for index, sentence in enumerate(document.sentences) if index not in introduction)

"""Writers: a causal language model writes the summary after introduction, extract and a summary mark.

The layout of a document is introduction | extract | summary mark | summary | rest of the document. The rest is used in
training only, in windows of its own. Marks are plain strings. A model that was trained on a layout has it beside it as
`layout.json`. Other models with a chat template are asked through it, and models without one get marks in plain
English.

In training an example is a prompt with its human summary, in one window. The rest of the documents fills windows of its
own, as domain text. The loss covers all tokens, the introduction included. Shape suffixes: B documents, T tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import leading_bos, max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.data import NEW, OLD, Mixture, TokenBlocks, pack
from graftlm.data import Document as TrainingText
from graftlm.data.chats import render_question
from graftlm.data.packing import split_rows
from graftlm.errors import DataError, RecipeError
from graftlm.generation.generate import load_model
from graftlm.io import write_atomically
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.text import split_sentences
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
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_new_tokens: int = Field(160, ge=1)
    top_k: int = Field(30, ge=1)
    temperature: float = Field(0.7, gt=0)
    num_beams: int = Field(4, ge=2)
    seed: int = Field(0, ge=0)

    def generate_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate`."""
        sample = self.method == "sample"
        sampling = {"top_k": self.top_k, "temperature": self.temperature, "top_p": 1.0} if sample else {}
        num_beams = self.num_beams if self.method == "beam" else 1
        return {"max_new_tokens": self.max_new_tokens, "do_sample": sample, "num_beams": num_beams, **sampling}


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


class _Passages(NamedTuple):
    """The parts of a document that fit into the window, and the indices of their sentences."""

    introduction: str
    extract: str
    read: tuple[int, ...]


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
        """Write a summary of at most `decoding.max_new_tokens`. A sentence that the limit cuts off is dropped.

        Raises:
            RecipeError: one extracted sentence and the summary do not fit into the window.
        """
        prompt, notes, read = self.build_prompt(extract)
        text, truncated = self.complete(prompt)
        text = text.strip()
        if truncated:
            text = drop_partial_sentence(text, extract.document.language)
        if not self._knows_layout:
            notes.append(f"{self.name} was not trained on this layout: what it writes may be no summary at all.")
        if not text:
            notes.append(f"{self.name} wrote nothing: the extract stands in for it.")
        return WriterOutput(text or extract.text, tuple(notes), read)

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
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        eos = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        length = next((place for place, token in enumerate(ids, 1) if token in eos), None)
        text = str(self.tokenizer.decode(ids[:length], skip_special_tokens=True))
        return text, length is None and len(ids) == self.decoding.max_new_tokens

    def build_prompt(self, extract: Extract) -> WriterPrompt:
        """Return the prompt of introduction, extract and summary mark, and notes on what was left out.

        A chat model's prompt is `messages` in its chat template, up to the start of its answer. Each part has tokens of
        its own, so the introduction has the same tokens with any extract and with none.

        Raises:
            DataError: the chat template can't be filled.
            RecipeError: one extracted sentence and the summary do not fit into the window.
        """
        passages, notes = self._fit(extract)
        start, end = self._frame
        parts = [self._tokenize_source(part) for part in (passages.introduction, passages.extract)]
        return WriterPrompt([*start, *parts[0], *parts[1], *end], notes, passages.read)

    def messages(self, extract: Extract) -> list[dict[str, str]]:
        """Return the message that a chat model gets: the instruction, the introduction, and the extract if it is read.

        Raises:
            RecipeError: one extracted sentence and the summary do not fit into the window.
        """
        passages, _ = self._fit(extract)
        return self._message(passages.introduction + passages.extract)

    def _message(self, passages: str) -> list[dict[str, str]]:
        before = f"{self.layout.instruction or ''}{self.layout.introduction}"
        return [{"role": "user", "content": f"{before}{passages}{self.layout.summary}"}]

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

    def _fit(self, extract: Extract) -> tuple[_Passages, list[str]]:
        """Divide the window: two thirds for the introduction, and what it leaves for the extract.

        Whole sentences of the introduction are kept, from the first; of the extract, those with the highest scores. The
        introduction is shorter only if no extracted sentence fits beside it.
        """
        document, notes = extract.document, list[str]()
        room = self.window - self.decoding.max_new_tokens - sum(map(len, self._frame))
        if room < 1:
            raise self._window_error("an introduction" if self.layout.extract is None else "one extracted sentence")
        introduction = introduction_range(document)
        texts = [document.sentences[index].text for index in introduction[:room]]
        text, count = self._cut(texts, 2 * room // 3)
        chosen, extract_text = list[int](), ""
        if self.layout.extract is not None:
            left = room - len(self._tokenize_source(text))
            best_first = [index for _, index in sorted(zip(extract.scores, extract.indices, strict=True))][::-1]
            chosen, extract_text = self._cut_extract(document, best_first, left)
            if not chosen:
                chosen, extract_text = self._cut_extract(document, best_first[:1], room - 1)
                text, count = self._cut(texts, room - len(self._tokenize_source(extract_text)))
            if not chosen:
                raise self._window_error("one extracted sentence")
            if len(chosen) < len(best_first):
                notes.append(f"{self.name} could read {len(chosen)} of the {len(best_first)} extracted sentences.")
        if count < len(introduction):
            notes.append(f"{self.name} could read {count} of the {len(introduction)} sentences of the introduction.")
        read = sorted({*introduction[: max(count, 1)], *chosen})
        return _Passages(text, extract_text, tuple(read)), notes

    def _cut(self, sentences: Sequence[str], room: int) -> tuple[str, int]:
        """Return the first sentences that have at most `room` tokens, and their number; if none fits, a part of one."""
        count = self._longest(len(sentences), lambda count: " ".join(sentences[:count]), room)
        if count or not sentences:
            return " ".join(sentences[:count]), count
        return sentences[0][: self._longest(len(sentences[0]), lambda end: sentences[0][:end], room)], 0

    def _cut_extract(self, document: SourceDocument, best_first: Sequence[int], room: int) -> tuple[list[int], str]:
        """Return the best sentences that have at most `room` tokens, in the order of the document, and their text."""

        def text(count: int) -> str:
            return " ".join(document.sentences[index].text for index in sorted(best_first[:count]))

        count = self._longest(len(best_first), lambda count: f"{self.layout.extract}{text(count)}", room)
        return sorted(best_first[:count]), f"{self.layout.extract}{text(count)}" if count else ""

    def _longest(self, limit: int, text: Callable[[int], str], room: int) -> int:
        """Return the largest number up to `limit` whose text has at most `room` tokens; 0 if there is none."""
        return bisect_right(range(1, limit + 1), room, key=lambda number: len(self._tokenize_source(text(number))))

    def _window_error(self, part: str) -> RecipeError:
        return RecipeError(
            f"{self.name} reads {self.window} tokens, which has no room for {part} and "
            f"{self.decoding.max_new_tokens} tokens of summary: ask for a shorter summary, or name another writer."
        )

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _tokenize_source(self, text: str) -> list[int]:
        """Tokenize a document's text, in which a special token, such as the end of a chat's turn, is plain text."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return list(self.tokenizer(text, **options)["input_ids"])


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
    window: int | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModelWriter:
    """Load a writer from a model's folder or hub name, or from a graft's folder.

    `window` replaces that of the layout.

    Raises:
        ArtifactError: the graft is incomplete.
        BackboneError: the model can't be loaded.
        DataError: its `layout.json` can't be read.
    """
    model, tokenizer = load_model(folder, device=device, trust_remote_code=trust_remote_code)
    writer = LanguageModelWriter(model.eval(), tokenizer, str(folder), read_layout(folder), decoding)
    if window is not None:
        writer.layout = PromptLayout.parse(writer.layout.model_dump() | {"window": window})
        if writer.window < window:
            raise RecipeError(f"{folder} reads {writer.window:,} tokens at most: ask for a window of no more.")
    return writer


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


@dataclass(frozen=True)
class WriterExample:
    """The extract of a document and its human summary."""

    extract: Extract
    summary: str


@dataclass(frozen=True)
class SummaryLikelihood:
    """Negative log-likelihood of a summary in nats, and its number of tokens with the final EOS."""

    nats: float
    tokens: int


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

    Returns:
        The folder of model, tokenizer and layout, for `load_writer`.

    Raises:
        DataError: there is nothing to learn from.
        RecipeError: an example does not fit into the window, or the window exceeds the model's maximum.
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
    """Pack whole examples into rows of the writer's window. Attention does not cross examples.

    Raises:
        DataError: there is no example.
        RecipeError: an example does not fit into the window.
    """
    if not examples:
        raise DataError("There is no document with a summary to learn from: give at least one.")
    pairs = (_prompt_and_summary(writer, example) for example in examples)
    streams = [np.array([*prompt, *summary], dtype=np.int32) for prompt, summary in pairs]
    for ids in streams:
        ids[0] = ~ids[0]  # marks the start of a document
    rows = split_rows(np.concatenate(streams), writer.window, "whole")
    return TokenBlocks(rows, boundaries="whole", pad_id=padding_id(writer.tokenizer))


def _prompt_and_summary(writer: LanguageModelWriter, example: WriterExample) -> tuple[list[int], list[int]]:
    """Return token ids of prompt and summary. The summary ends with EOS, or is cut to `max_new_tokens`."""
    prompt = writer.build_prompt(example.extract).ids
    ids = writer._tokenize(example.summary)
    eos = writer.tokenizer.eos_token_id
    return prompt, [*ids, *([eos] if isinstance(eos, int) else [])][: writer.decoding.max_new_tokens]


def rest_rows(writer: LanguageModelWriter, documents: Sequence[SourceDocument]) -> TokenBlocks:
    """Pack the documents without their introductions into rows of the writer's window.

    Raises:
        DataError: there is no text.
    """
    texts = (TrainingText(writer.layout.rest + rest_text(document), document.name) for document in documents)
    return pack(texts, writer.tokenizer, writer.window, boundaries="whole", name="The rest of the documents")


def rest_text(document: SourceDocument) -> str:
    """Return the sentences outside the introduction."""
    introduction = introduction_range(document)
    return " ".join(sentence.text for index, sentence in enumerate(document.sentences) if index not in introduction)


@torch.inference_mode()
def summary_likelihoods(
    writer: LanguageModelWriter, examples: Sequence[WriterExample], batch_size: int = 8
) -> list[SummaryLikelihood]:
    """Return −Σ log p of each human summary, cut as in training, given its prompt."""
    writer.model.eval()
    pairs = [_prompt_and_summary(writer, example) for example in examples]
    batches = (pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size))
    return [likelihood for batch in batches for likelihood in _batch_likelihoods(writer.model, batch)]


def _batch_likelihoods(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[SummaryLikelihood]:
    """Score one batch. Padding is at the end, where causal attention ignores it."""
    rows = [torch.tensor(prompt + summary) for prompt, summary in pairs]
    ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    for row, (prompt, summary) in enumerate(pairs):
        first, last = len(prompt), len(prompt) + len(summary)
        logits = logits_BTV[row, first - 1 : last - 1]
        nats = functional.cross_entropy(logits, ids_BT[row, first:last], reduction="sum")
        yield SummaryLikelihood(float(nats), len(summary))

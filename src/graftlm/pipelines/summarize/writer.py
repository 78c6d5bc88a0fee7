"""Writers: a causal language model writes the summary after introduction, extract and a summary mark.

The layout of a document is introduction | extract | summary mark | summary | rest of the document. The rest is used in
training only, in windows of its own. Marks are plain strings. A model that was trained on a layout has it beside it as
`layout.json`; other models get marks in plain English.

In training an example is a prompt with its human summary, in one window. The rest of the documents fills windows of its
own, as domain text. The loss covers all tokens, the introduction included. Shape suffixes: B documents, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import UNLIMITED, leading_bos, max_sequence_length, padding_id
from graftlm.config import Config
from graftlm.data import NEW, OLD, Mixture, TokenBlocks, pack
from graftlm.data import Document as TrainingText
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
        sample = self.method == "sample"
        sampling = {"top_k": self.top_k, "temperature": self.temperature, "top_p": 1.0} if sample else {}
        num_beams = self.num_beams if self.method == "beam" else 1
        return {"max_new_tokens": self.max_new_tokens, "do_sample": sample, "num_beams": num_beams, **sampling}


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
    """Writes summaries with a causal language model: a `GraftedModel` or any transformers model.

    Without the layout that the model was trained on, marks are in plain English, and a note says so.
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
        best_first = sorted(scores, key=scores.__getitem__)[::-1]
        for count in range(len(best_first), 0, -1):
            kept = (extract.document.sentences[index].text for index in sorted(best_first[:count]))
            ids = self._tokenize(f"{self.layout.extract}{' '.join(kept)}")
            if len(ids) <= available:
                if count < len(scores):
                    notes.append(f"{self.name} could read {count} of the {len(scores)} extracted sentences.")
                return ids
        raise self._window_error("one extracted sentence")

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
    model, tokenizer = load_model(folder, device=device, trust_remote_code=trust_remote_code)
    return LanguageModelWriter(model.eval(), tokenizer, str(folder), read_layout(folder), decoding)


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
    prompt, _ = writer.build_prompt(example.extract)
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

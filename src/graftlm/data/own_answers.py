"""Answers that the backbone samples: to the new prompts, as old text, and in its own words, as new text.

As old text, the backbone's answers to the prompts of a task keep the model near the backbone on that task. Given the
right answer as well, the backbone writes it in its own words. A model that is trained on these words moves less than
one that is trained on the given ones (Yang et al., 2024, arXiv 2402.13669).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graftlm.backbone import Backbone, answer_end_ids, end_ids, max_sequence_length
from graftlm.backbone.chat_templates import Message, render_messages
from graftlm.data.chats import chat_tokens
from graftlm.data.config import RewriteConfig
from graftlm.data.conversations import ChatExample
from graftlm.data.near_text import loops
from graftlm.data.new_names import NewNames, normalized, words_of
from graftlm.data.own_text import OwnText, first_samples
from graftlm.data.own_text_sampling import check_backbone, document_start, sample_batches
from graftlm.data.source_config import SelfSourceConfig
from graftlm.data.sources import Document
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_PROMPT = "long prompt"
NO_ANSWER = "no answer"
OTHER_FORM = "other form"
UNFINISHED = "unfinished answer"
NO_NAME = "missing name"
MENTIONED = "reference mentioned"
LONG_ANSWER = "long answer"
ANSWER_REASONS = (LONG_PROMPT, NO_ANSWER)
"""The reasons for which answers to new prompts are left out."""
REWRITE_REASONS = (*ANSWER_REASONS, OTHER_FORM, UNFINISHED, NO_NAME, MENTIONED, LONG_ANSWER)
"""The reasons for which a given answer is learned instead of that of the backbone."""

_MIN_ANSWER = 8
_SURPLUS = 1.25
_MENTIONS = (("right", "answer"), ("correct", "answer"), ("reference", "answer"), ("own", "words"))


@dataclass(frozen=True)
class Prompt:
    """What the backbone reads before it answers.

    Attributes:
        ids: the tokens of the prompt; none if it is not answered.
        is_chat: whether the answer is a turn of a conversation.
    """

    ids: list[int]
    is_chat: bool


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are sampled.

    Attributes:
        answer_tokens: maximum number of tokens of an answer.
        temperature: divides the logits.
        top_p: total probability of the tokens to sample from.
        length: maximum number of tokens of a prompt with its answer.
        passes: how often each prompt is answered; None for as often as needed.
    """

    answer_tokens: int
    temperature: float
    top_p: float
    length: int
    passes: int | None = None


class AnswerSampler:
    """Sample batches of answers to prompts, in the order of the prompts.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        prompts: the prompts, at least one.
        settings: how to sample.
        judge: returns why an answer can't be used, or an empty text, from the number of its prompt and its tokens.
        sampler: samples the tokens.

    Raises:
        DataError: the backbone is not a causal language model, or has too few positions.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: Sequence[Prompt],
        settings: AnswerSettings,
        judge: Callable[[int, list[int]], str],
        sampler: TokenSampler,
    ) -> None:
        check_backbone(backbone, settings.length)
        self.name = backbone.name
        self._prompts = prompts
        self._settings = settings
        self._judge = judge
        self._sampler = sampler
        self._ends = end_ids(backbone.model, backbone.need_tokenizer())
        self._answer_ends = answer_end_ids(backbone.model, backbone.need_tokenizer())

    def batch(self, number: int, samples: Sequence[OwnText], needed: int) -> list[OwnText]:
        """Sample the next batch.

        Args:
            number: the number of the batch, from 0, which determines its random numbers.
            samples: the samples of all earlier batches.
            needed: number of tokens that are still to be sampled.
        """
        settings = self._settings
        count = min(self._sampler.batch_texts, self._wanted(samples, needed))
        rows = [(len(samples) + place) % len(self._prompts) for place in range(count)]
        texts: dict[int, OwnText] = {}
        with self._sampler.seeded(number):
            for is_chat, ends in ((True, self._answer_ends), (False, self._ends)):
                places = [place for place, row in enumerate(rows) if self._fits(row, is_chat=is_chat)]
                answers = self._sampler.sample(
                    [self._prompts[rows[place]].ids for place in places],
                    ends,
                    settings.answer_tokens,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                )
                for place, answer in zip(places, answers, strict=True):
                    texts[place] = self._text(rows[place], answer)
        answered = [texts.get(place) or self._unanswered(row) for place, row in enumerate(rows)]
        return answered if settings.passes is not None else first_samples(answered, needed)

    def _wanted(self, samples: Sequence[OwnText], needed: int) -> int:
        """Return how many prompts are still to be answered, by the mean size of the earlier answers."""
        settings = self._settings
        if settings.passes is not None:
            return settings.passes * len(self._prompts) - len(samples)
        total = sum(sample.tokens for sample in samples)
        mean = total / len(samples) if total else settings.answer_tokens
        # A few more than are needed cost less than another batch.
        return math.ceil(_SURPLUS * needed / mean) + 1

    def _fits(self, row: int, *, is_chat: bool) -> bool:
        prompt = self._prompts[row]
        has_room = len(prompt.ids) + _MIN_ANSWER <= self._settings.length
        return bool(prompt.ids) and prompt.is_chat == is_chat and has_room

    def _unanswered(self, row: int) -> OwnText:
        ids = self._prompts[row].ids
        return OwnText(ids, [], left_out=LONG_PROMPT if ids else OTHER_FORM)

    def _text(self, row: int, answer: list[int]) -> OwnText:
        """Return a prompt with its answer, which is cut at the length."""
        prompt = self._prompts[row]
        begin = len(prompt.ids)
        kept = answer[: self._settings.length - begin]
        reason = self._judge(row, kept)
        turns = [] if reason else [(begin, begin + len(kept))]
        question = (0, begin) if prompt.is_chat else None
        return OwnText(prompt.ids + kept, turns, question, reason)

    def check_yield(self, batches: Sequence[Sequence[OwnText]]) -> bool:
        """Return whether sampling goes on: until each prompt was answered as often as wanted.

        Args:
            batches: all batches so far.

        Raises:
            DataError: prompts are answered as often as needed, but none of them has an answer that can be used.
        """
        samples = [sample for batch in batches for sample in batch]
        if self._settings.passes is not None:
            return len(samples) < self._settings.passes * len(self._prompts)
        latest = samples[-len(self._prompts) :]
        if len(latest) == len(self._prompts) and all(sample.left_out for sample in latest):
            reasons = Counter(sample.left_out for sample in latest)
            counts = ", ".join(f"{count:,} ({reason})" for reason, count in reasons.most_common())
            raise DataError(
                f"None of the answers of {self.name} to the {len(self._prompts):,} new prompts can be used: {counts}. "
                "Raise data.length or answer_temperature, or leave near out of the backbone's own text."
            )
        return True


def sample_answers(
    backbone: Backbone,
    config: SelfSourceConfig,
    documents: Sequence[Document],
    length: int,
    path: Path,
    *,
    key: str = "",
    progress: bool = True,
) -> list[OwnText]:
    """Sample the backbone's own answers to the prompts of new documents, in random order.

    Texts that an interrupted call left at `path` are kept.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        config: how much to sample, and how.
        documents: the new documents. Conversations and documents with a prompt are answered.
        length: maximum number of tokens of a text if the config has none.
        path: the file of texts, which is extended.
        key: identifies the texts; a file with another key is written anew. It must depend on the documents.
        progress: show a progress bar.

    Returns:
        All texts of the file, including those that are left out.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has too few positions; a conversation can't be
            rendered; no new document has a prompt; no answer can be used; or the file can't be written.
    """
    tokenizer = backbone.need_tokenizer()
    prompts = [prompt for document in documents if (prompt := _prompt_of(document, tokenizer)) is not None]
    if not prompts:
        raise DataError(
            "near is prompts, but no new text has a prompt: set messages_column or prompt_column of data.new, or set "
            "near to new."
        )
    order = np.random.default_rng(config.seed).permutation(len(prompts))
    settings = AnswerSettings(
        answer_tokens=config.answer_tokens,
        temperature=config.answer_temperature,
        top_p=config.top_p,
        length=config.length or length,
    )

    def judge(_row: int, answer: list[int]) -> str:
        return _problem(str(tokenizer.decode(answer, skip_special_tokens=True)), answer)

    sampler = AnswerSampler(
        backbone,
        [prompts[index] for index in order],
        settings,
        judge,
        TokenSampler(backbone, config.seed, rows=config.batch_size),
    )
    return sample_batches(path, sampler, config.tokens, key=key, progress=progress)


def _prompt_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> Prompt | None:
    """Return what the backbone reads before the first learned answer of a document; None for free text."""
    if document.chat is not None:
        messages = document.chat.messages[: document.chat.learned[0]]
        return Prompt(_chat_ids(document.chat, messages, tokenizer), is_chat=True)
    if not document.prompt.strip():
        return None
    ids = tokenizer(document.prompt, add_special_tokens=False)["input_ids"]
    return Prompt([*document_start(tokenizer), *ids], is_chat=False)


def _chat_ids(chat: ChatExample, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of messages and of the header of an answer."""
    if not tokenizer.chat_template:
        raise DataError(f"{chat.where} is a conversation, but the tokenizer has no chat template: name a chat model.")
    try:
        text = render_messages(tokenizer, messages, chat.tools, header=True)
    except Exception as error:  # Errors come from jinja, or are raised by the template.
        raise DataError(
            f"{chat.where} can't be rendered with the tokenizer's chat template ({first_line(error)}): correct the "
            "conversation, or set another chat_template."
        ) from None
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _problem(text: str, ids: Sequence[int]) -> str:
    """Return why no answer with this text can be used; an empty text if it can."""
    return NO_ANSWER if not normalized(text) or loops(ids) else ""


def rewrite_answers(
    backbone: Backbone,
    config: RewriteConfig,
    documents: Sequence[Document],
    length: int,
    path: Path,
    *,
    key: str = "",
    progress: bool = True,
) -> list[OwnText]:
    """Sample the answers of conversations in the backbone's own words, one for each conversation.

    The backbone reads the question with the given answer. Its answer is left out, so that the given one is learned, if
    it is empty, runs in a loop or does not end, if it lacks a name or number of the given one, or if it speaks of the
    reference. Only conversations of which one answer is learned, the last message, are rewritten.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        config: how to sample.
        documents: the conversations, at least one.
        length: maximum number of tokens of a rewritten conversation.
        path: the file of samples, which is extended.
        key: identifies the samples; a file with another key is written anew. It must depend on the documents.
        progress: show a progress bar.

    Returns:
        A sample for each document, in the order of the documents, including those that are left out.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has too few positions; a conversation can't be
            rendered; or the file can't be written.
    """
    tokenizer = backbone.need_tokenizer()
    settings = AnswerSettings(
        config.answer_tokens,
        config.temperature,
        config.top_p,
        max_sequence_length(backbone.model),  # the prompt with the given answer is not trained on
        passes=1,
    )
    sampler = AnswerSampler(
        backbone,
        [_rewriting_prompt(document, config, tokenizer) for document in documents],
        settings,
        _RewritingJudge(backbone, documents, length),
        TokenSampler(backbone, config.seed, rows=config.batch_size),
    )
    return sample_batches(path, sampler, len(documents) * config.answer_tokens, key=key, progress=progress)


def _rewriting_prompt(document: Document, config: RewriteConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the prompt that asks for the answer of a conversation in other words; an empty one for other forms."""
    chat = document.chat
    if chat is None or chat.learned != [len(chat.messages) - 1] or len(chat.messages) < 2:
        return Prompt([], is_chat=True)
    *before, question, answer = chat.messages
    if question["role"] != "user" or not answer["content"].strip() or answer.get("tool_calls"):
        return Prompt([], is_chat=True)
    asked = config.instruction.replace("{question}", question["content"]).replace("{answer}", answer["content"])
    return Prompt(_chat_ids(chat, [*before, {**question, "content": asked}], tokenizer), is_chat=True)


class _RewritingJudge:
    """Finds why an answer in other words can't replace a given one.

    Args:
        backbone: the backbone.
        documents: the conversations.
        length: maximum number of tokens of a rewritten conversation.
    """

    def __init__(self, backbone: Backbone, documents: Sequence[Document], length: int) -> None:
        self._length = length
        self._tokenizer = backbone.need_tokenizer()
        self._ends = answer_end_ids(backbone.model, self._tokenizer)
        self._documents = documents
        self._names = NewNames(documents, self._tokenizer)

    def __call__(self, row: int, answer: list[int]) -> str:
        """Return the reason, which is empty if the answer can replace the given one.

        Args:
            row: the number of the conversation.
            answer: the tokens of the answer.
        """
        text = str(self._tokenizer.decode(answer, skip_special_tokens=True))
        problem = _problem(text, answer)
        if problem:
            return problem
        if answer[-1] not in self._ends:
            return UNFINISHED
        words = tuple(normalized(text))
        given = normalized(self._documents[row].text)
        if any(_has_run(words, run) and not _has_run(given, run) for run in _MENTIONS):
            return MENTIONED
        names = self._names.names_in(self._documents[row].text)
        numbers = [word for word in words_of(self._documents[row].text) if any(map(str.isdigit, word))]
        needed = {*numbers, *(word for name in names for word in name)}
        if not needed <= set(words_of(text)):
            return NO_NAME
        chat = _with_answer(self._documents[row], text).chat
        assert chat is not None, "only conversations have prompts"
        ids, _, _ = chat_tokens(self._tokenizer, chat)
        return LONG_ANSWER if len(ids) > self._length else ""


def _has_run(words: Sequence[str], run: Sequence[str]) -> bool:
    """Return whether words follow each other in a text."""
    return any(tuple(words[start : start + len(run)]) == tuple(run) for start in range(len(words)))


def rewritten(document: Document, sample: OwnText, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Return a conversation with the sampled answer instead of the given one, which stays if the sample is left out.

    Args:
        document: the conversation.
        sample: its sample.
        tokenizer: the backbone's tokenizer.
    """
    if sample.left_out or document.chat is None:
        return document
    ((start, stop),) = sample.turns
    return _with_answer(document, str(tokenizer.decode(sample.ids[start:stop], skip_special_tokens=True)))


def _with_answer(document: Document, text: str) -> Document:
    """Return a conversation with another text in its last message."""
    assert document.chat is not None
    *before, answer = document.chat.messages
    answer = {**answer, "content": text.strip()}
    return replace(document, chat=replace(document.chat, messages=(*before, answer)), text=answer["content"])

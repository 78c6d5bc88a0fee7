"""How two chat models answer: whether they end their turn, keep the template, and answer in the question's language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import answer_end_ids, generate_rows, max_sequence_length
from graftlm.backbone.chat_templates import Message
from graftlm.data.chats import render_question
from graftlm.data.own_text import OwnText
from graftlm.errors import DataError
from graftlm.evaluation.examples import GREEDY
from graftlm.evaluation.inference import LanguageModel, evaluation_mode
from graftlm.evaluation.intervals import bootstrap, share_interval
from graftlm.evaluation.results import Interval

_MIN_LETTERS = 20  # Shorter texts are too short for a reliable detection of their language.
_BEHAVIOR = ("stops", "keeps_template", "same_language")
# Settings of sampling that a checkpoint may have, which greedy decoding does not use.
_UNSET = {"temperature": None, "top_p": None, "top_k": None}


@dataclass(frozen=True)
class ChatQuestion:
    """A conversation up to where the model answers.

    Attributes:
        ids: its token ids.
        text: the text of the user's last turn.
    """

    ids: list[int]
    text: str


@dataclass(frozen=True)
class ChatAnswer:
    """A greedy answer.

    Attributes:
        text: the answer without special tokens.
        stops: whether the model ended its turn within the maximum number of tokens.
        keeps_template: whether neither a special token nor a token unknown to the base precedes that end.
        same_language: whether it is in the question's language; None where one of the two is too short to detect it.
    """

    text: str
    stops: bool
    keeps_template: bool
    same_language: bool | None


def own_questions(samples: Sequence[OwnText], tokenizer: PreTrainedTokenizerBase, count: int) -> list[ChatQuestion]:
    """Return the first questions of the conversations that the base sampled.

    Args:
        samples: the base's own text.
        tokenizer: its tokenizer.
        count: maximum number of questions.
    """
    questions = []
    for sample in samples:
        if not sample.is_chat:
            continue
        (start, stop), (answer, _) = sample.turns[:2]
        text = str(tokenizer.decode(sample.ids[start:stop], skip_special_tokens=True)).strip()
        questions.append(ChatQuestion(sample.ids[:answer], text))
    return questions[:count]


def template_questions(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    remedy: str = "name a chat model",
) -> list[ChatQuestion]:
    """Return questions in the tokenizer's chat template.

    Args:
        texts: the questions.
        tokenizer: the tokenizer.
        remedy: what the user can do if there is no template, for the error message.

    Raises:
        DataError: there is no template, or it can't be filled.
    """
    if not tokenizer.chat_template:
        raise DataError(f"The tokenizer has no chat template, so the model can't be asked questions: {remedy}.")
    return [question_in_chat([{"role": "user", "content": text}], tokenizer) for text in texts]


def question_in_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> ChatQuestion:
    """Return a conversation up to the answer in the tokenizer's chat template.

    Args:
        messages: the messages; the last one is the user's.
        tokenizer: a tokenizer with a chat template.

    Raises:
        DataError: the template can't be filled.
    """
    rendered = render_question(list(messages), tokenizer)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ChatQuestion(ids, messages[-1]["content"])


def answer_questions(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[ChatQuestion],
    *,
    tuned_tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    on_batch: Callable[[int], None] = lambda answers: None,
) -> list[ChatAnswer]:
    """Answer questions greedily.

    Args:
        model: the model.
        tokenizer: the base's tokenizer, for both models.
        questions: the questions.
        tuned_tokenizer: the tokenizer of the tuned model; its special tokens break the template as well.
        max_new_tokens: most tokens of an answer.
        batch_size: questions per batch.
        on_batch: called with the number of answers after each batch.

    Returns:
        The answers in the order of the questions.

    Raises:
        DataError: a question and its answer exceed the model's positions.
    """
    longest = max((len(question.ids) for question in questions), default=0)
    limit = max_sequence_length(model)
    if limit < longest + max_new_tokens:
        raise DataError(
            f"A question has {longest} tokens, and with {max_new_tokens} for the answer that exceeds the model's "
            f"{limit} positions: shorten it."
        )
    ends = answer_end_ids(model, tokenizer)
    kept = _kept_tokens(tokenizer, tuned_tokenizer) | ends
    answers: list[ChatAnswer] = []
    with evaluation_mode(model), torch.inference_mode():
        for start in range(0, len(questions), batch_size):
            batch = questions[start : start + batch_size]
            prompts = [question.ids for question in batch]
            options: dict[str, Any] = {**GREEDY, **_UNSET}
            rows = generate_rows(model, tokenizer, prompts, ends, max_new_tokens=max_new_tokens, **options)
            for question, row in zip(batch, rows, strict=True):
                written = [token for token in row if token not in ends]
                text = str(tokenizer.decode(written, skip_special_tokens=True)).strip()
                answer = ChatAnswer(
                    text=text,
                    stops=bool(row) and row[-1] in ends,
                    keeps_template=kept.issuperset(row),
                    same_language=_same_language(question.text, text),
                )
                answers.append(answer)
            on_batch(len(batch))
    return answers


def _kept_tokens(tokenizer: PreTrainedTokenizerBase, tuned_tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Return the ids that may be in an answer: those of the base that are special in neither tokenizer."""
    tokenizers = [tokenizer]
    if tuned_tokenizer is not None:
        tokenizers.append(tuned_tokenizer)
    special = set()
    for each in tokenizers:
        special.update(number for number, token in each.added_tokens_decoder.items() if token.special)
    return set(tokenizer.get_vocab().values()) - special


def detects_languages() -> bool:
    """Return whether the package that detects a text's language is installed."""
    return find_spec("py3langid") is not None


def _same_language(question: str, answer: str) -> bool | None:
    """Return whether two texts are in one language; None where that can't be detected."""
    if not detects_languages() or _letters(question) < _MIN_LETTERS or _letters(answer) < _MIN_LETTERS:
        return None
    import py3langid

    language, _ = py3langid.classify(question)
    answered_language, _ = py3langid.classify(answer)
    return language == answered_language


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)


def behavior(answers: Sequence[ChatAnswer]) -> dict[str, Interval]:
    """Return `stops`, `keeps_template` and `same_language`: shares of answers with Wilson's 95% interval.

    A share over answers whose language could not be detected is left out.
    """
    shares = {}
    for name in _BEHAVIOR:
        values = [getattr(answer, name) for answer in answers]
        known = [value for value in values if value is not None]
        if known:
            shares[name] = share_interval(sum(known), len(known))
    return shares


def behavior_lost(base: Sequence[ChatAnswer], tuned: Sequence[ChatAnswer]) -> dict[str, Interval]:
    """Return `stops_lost` and so on: the base's share minus the tuned model's, bootstrapped over questions.

    For `same_language_lost`, a question counts only if both answers are long enough to detect their language.

    Args:
        base: the base's answers.
        tuned: the tuned model's answers to the same questions.
    """
    lost = {}
    for name in _BEHAVIOR:
        differences = []
        for base_answer, tuned_answer in zip(base, tuned, strict=True):
            before = getattr(base_answer, name)
            after = getattr(tuned_answer, name)
            if before is not None and after is not None:
                differences.append(float(before) - float(after))
        if differences:
            lost[f"{name}_lost"] = bootstrap(np.array(differences))
    return lost

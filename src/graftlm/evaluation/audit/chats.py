"""How two chat models answer: whether they end their turn, keep the template, and answer in the question's language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from graftlm.backbone import end_ids, generate_rows, max_sequence_length
from graftlm.data.chats import render_question
from graftlm.data.own_text import OwnText
from graftlm.errors import DataError
from graftlm.evaluation.examples import GREEDY
from graftlm.evaluation.metrics import bootstrap, evaluation_mode, share_interval
from graftlm.evaluation.results import Interval

_MIN_LETTERS = 20  # of a text whose language is told
_BEHAVIOUR = ("stops", "keeps_template", "same_language")


@dataclass(frozen=True)
class ChatQuestion:
    """A conversation up to where the model answers: its ids, and the text of the user's last turn."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class ChatAnswer:
    """A greedy answer.

    Attributes:
        text: without special tokens.
        stops: the model ended its turn within the tokens that it was given.
        keeps_template: no special token, and none that the base lacks, stands before that end.
        same_language: it is in the question's language; None where one of the two is too short to tell.
    """

    text: str
    stops: bool
    keeps_template: bool
    same_language: bool | None


def own_questions(samples: Sequence[OwnText], tokenizer: Any, count: int) -> list[ChatQuestion]:
    """The first questions of the conversations that the base sampled, up to `count`."""
    questions = []
    for sample in samples:
        if sample.is_chat:
            (start, stop), (answer, _) = sample.turns[:2]
            text = tokenizer.decode(sample.ids[start:stop], skip_special_tokens=True).strip()
            questions.append(ChatQuestion(sample.ids[:answer], text))
    return questions[:count]


def template_questions(texts: Sequence[str], tokenizer: Any) -> list[ChatQuestion]:
    """Questions in the tokenizer's chat template. Raises DataError if there is no template, or it can't be filled."""
    if not tokenizer.chat_template:
        raise DataError("BASE has no chat template, so it can't be asked questions: leave out --prompts.")
    rendered = (render_question([{"role": "user", "content": text}], tokenizer) for text in texts)
    ids = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in rendered)
    return list(map(ChatQuestion, ids, texts))


def answer_questions(
    model: Any,
    tokenizer: Any,
    questions: Sequence[ChatQuestion],
    *,
    tuned_tokenizer: Any = None,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    on_batch: Callable[[int], None] = lambda answers: None,
) -> list[ChatAnswer]:
    """Greedy answers of at most `max_new_tokens` tokens, in the order of the questions.

    The tokenizer is the base's, for both models; what `tuned_tokenizer` holds as special breaks the template as well.

    Raises DataError if a question and its answer exceed the model's positions.
    """
    longest = max((len(question.ids) for question in questions), default=0)
    if (limit := max_sequence_length(model)) < longest + max_new_tokens:
        raise DataError(
            f"A question has {longest} tokens, and with {max_new_tokens} for the answer that exceeds the model's "
            f"{limit} positions: shorten it."
        )
    ends = end_ids(model, tokenizer)
    added = [each.added_tokens_decoder.items() for each in (tokenizer, tuned_tokenizer) if each is not None]
    special = {number for items in added for number, token in items if token.special}
    kept = {*tokenizer.get_vocab().values()} - special | ends
    options = GREEDY | {"temperature": None, "top_p": None, "top_k": None}
    answers: list[ChatAnswer] = []
    with evaluation_mode(model), torch.inference_mode():
        for start in range(0, len(questions), batch_size):
            batch = questions[start : start + batch_size]
            prompts = [question.ids for question in batch]
            rows = generate_rows(model, tokenizer, prompts, ends, max_new_tokens=max_new_tokens, **options)
            for question, row in zip(batch, rows, strict=True):
                text = tokenizer.decode(row, skip_special_tokens=True).strip()
                same = _same_language(question.text, text)
                answers.append(ChatAnswer(text, bool(row) and row[-1] in ends, kept.issuperset(row), same))
            on_batch(len(batch))
    return answers


def tells_languages() -> bool:
    """Whether the package that tells a text's language is installed."""
    return find_spec("py3langid") is not None


def _same_language(question: str, answer: str) -> bool | None:
    texts = (question, answer)
    if not tells_languages() or any(sum(character.isalpha() for character in text) < _MIN_LETTERS for text in texts):
        return None
    import py3langid

    first, second = (py3langid.classify(text)[0] for text in texts)
    return first == second


def behaviour(answers: Sequence[ChatAnswer]) -> dict[str, Interval]:
    """`stops`, `keeps_template` and `same_language`: shares of answers with Wilson's 95% interval."""
    values = {name: [value for each in answers if (value := getattr(each, name)) is not None] for name in _BEHAVIOUR}
    return {name: share_interval(sum(known), len(known)) for name, known in values.items() if known}


def behaviour_lost(base: Sequence[ChatAnswer], tuned: Sequence[ChatAnswer]) -> dict[str, Interval]:
    """`stops_lost` and so on: the base's share minus the tuned model's, with a bootstrap interval over questions.

    For the language only those questions count at which both answers are long enough to tell.
    """
    lost = {}
    for name in _BEHAVIOUR:
        pairs = [(getattr(first, name), getattr(second, name)) for first, second in zip(base, tuned, strict=True)]
        known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
        if len(known):
            lost[f"{name}_lost"] = bootstrap(known[:, 0] - known[:, 1])
    return lost

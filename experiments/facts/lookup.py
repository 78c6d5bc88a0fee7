"""A rival without training: the answer of the nearest taught question, behind the router of the row `routed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.facts.generator import Question
from experiments.facts.metrics import Answers
from experiments.facts.page_facts import TaughtFacts
from experiments.facts.retrieval import Lexicon
from graftlm.backbone import Backbone
from graftlm.grafts.token_routing.word_embedder import WordEmbedder


def lookup_answers(
    backbone: Backbone, facts: TaughtFacts, questions: Sequence[Question], bare: Answers
) -> Mapping[str, str]:
    """Return answers to questions by id.

    A question that opens the router gets the taught answer of the trained question that is most like it. All others get
    the bare backbone's answer.

    Args:
        backbone: the backbone, whose tokenizer decides which words are rare.
        facts: the taught facts.
        questions: the questions.
        bare: the bare backbone's answers.
    """
    taught_questions = []
    taught_answers = []
    for conversation in facts.conversations():
        question, answer = (message["content"] for message in conversation["messages"])
        taught_questions.append(question)
        taught_answers.append(answer)
    lexicon = Lexicon(taught_questions)
    opening = opened(backbone, facts, questions)
    answers = {}
    for question in questions:
        if question.id in opening:
            (nearest,) = lexicon.nearest(question.text, 1)
            answers[question.id] = taught_answers[nearest]
        else:
            answers[question.id] = bare[question.id]
    return answers


def opened(backbone: Backbone, facts: TaughtFacts, questions: Sequence[Question]) -> set[str]:
    """Return the ids of the questions that have a rare word of the taught questions, or a name of those without one.

    Args:
        backbone: the backbone, whose tokenizer decides which words are rare.
        facts: the taught facts.
        questions: the questions.
    """
    router = WordEmbedder(backbone)
    taught: set[str] = set()
    for conversation in facts.conversations():
        taught_question, _ = conversation["messages"]
        taught.update(router.taught_features(taught_question["content"]))
    return {question.id for question in questions if not taught.isdisjoint(router.features(question.text))}

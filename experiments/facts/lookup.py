"""Rivals without training, behind the router of the row `routed`.

They give the answer of the nearest taught question, the most frequent answer of the question's relation, or the
backbone's answer with the nearest facts in the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments.facts.generator import Question
from experiments.facts.metrics import Answers
from experiments.facts.page_facts import TaughtFacts
from experiments.facts.retrieval import Lexicon
from graftlm.backbone import Backbone
from graftlm.grafts.token_routing.word_embedder import WordEmbedder


def lookup_answers(backbone: Backbone, facts: TaughtFacts, questions: Sequence[Question], bare: Answers) -> Answers:
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


def most_frequent_answers(facts: TaughtFacts, questions: Sequence[Question]) -> Answers:
    """Return the most frequent taught value of each question's relation, by the question's id.

    The relation is known, so this is the best that a constant answer for each relation can reach.

    Args:
        facts: the taught facts.
        questions: the questions; those without a taught relation get an empty answer.
    """
    values: dict[str, Counter[str]] = {}
    for taught in facts.trained():
        values.setdefault(taught.relation, Counter())[taught.accepted[0]] += 1
    answers = {}
    for question in questions:
        answers[question.id] = ""
        if question.relation in values:
            (frequent,) = values[question.relation].most_common(1)
            answers[question.id], _ = frequent
    return answers


def behind_router(
    backbone: Backbone, facts: TaughtFacts, questions: Sequence[Question], answers: Answers, bare: Answers
) -> Answers:
    """Return some answers where a question opens the router, and the bare backbone's answers elsewhere.

    Args:
        backbone: the backbone, whose tokenizer decides which words are rare.
        facts: the taught facts.
        questions: the questions.
        answers: the answers to give where the router opens, by the id of the question.
        bare: the bare backbone's answers.
    """
    opening = opened(backbone, facts, questions)
    return {question.id: (answers if question.id in opening else bare)[question.id] for question in questions}


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

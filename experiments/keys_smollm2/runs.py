"""The runs: models that answer the questions without a graft, and grafts that are trained on the joint data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.keys_smollm2.keys import KeySet, Question, World, all_sums
from experiments.kv_arithmetic.data import COMPUTE, Form
from experiments.kv_arithmetic.rivals import Answer, Rival, answers_of, mixture, pipeline
from graftlm.backbone.load import BackboneConfig
from graftlm.evaluation import Row
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext, Trainee
from graftlm.runs.shared import load_shared

Items = Mapping[str, float]


class Exam(NamedTuple):
    """A metric: questions in one form.

    Attributes:
        questions: name of the set of questions.
        form: form of the questions.
        share: share of the set that is asked.
    """

    questions: str
    form: Form
    share: float = 1.0


EXAMS = {
    "direct_keys": Exam("keys", "direct"),
    "direct_values": Exam("values", "direct"),
    "scratchpad_keys": Exam("keys", "scratchpad", 0.5),
    "substitution_keys": Exam("keys", "substitution", 0.5),
    "sums": Exam("keys", "numeric"),
}
"""The metrics of the test."""
VALIDATION = {"direct": Exam("validation", "direct")}
"""The metric of a search."""


class Questions(NamedTuple):
    """What a run asks.

    Attributes:
        world: the keys.
        seed: the seed that draws keys and questions.
        count: number of questions of each set.
        is_search: whether the validation questions are asked instead of the test.
    """

    world: World
    seed: int
    count: int
    is_search: bool = False

    def exams(self) -> Mapping[str, Exam]:
        """Return the metrics."""
        return VALIDATION if self.is_search else EXAMS

    def sets(self) -> dict[str, list[Question]]:
        """Return the questions by set."""
        return KeySet(self.world, self.seed, is_search=self.is_search).exam(all_sums(), self.count)


def examine(answer: Answer, questions: Questions) -> dict[str, Items]:
    """Return for each metric whether each question is answered right, by the question's id.

    Args:
        answer: returns the answers of a row.
        questions: what is asked.
    """
    sets = questions.sets()
    marks = {}
    for name, exam in questions.exams().items():
        asked = sets[exam.questions]
        asked = asked[: max(1, round(exam.share * len(asked)))]
        answers = answer(asked, exam.form)
        marks[name] = {each.id: is_right(each, exam.form, text) for each, text in zip(asked, answers, strict=True)}
    return marks


def is_right(question: Question, form: Form, answer: str) -> float:
    """Return 1.0 if an answer is right, else 0.0. Of a scratchpad only the result counts."""
    if form == "scratchpad":
        _, _, answer = answer.rpartition(COMPUTE)
        form = "direct"
    return float(answer.strip() == question.completion(form))


class AskedRun(Run):
    """Answers the questions with one model, or with two that are not composed.

    Args:
        backbone: m_B, or the only model.
        m_a: m_A, for a rival.
        rival: how both models answer; None for the backbone alone.
        weight: weight of m_A in a mixture.
        asked: what is asked.
    """

    backbone: BackboneConfig
    m_a: BackboneConfig | None = None
    rival: Rival | None = None
    weight: float = 0.5
    asked: Questions

    def measure(self, context: RunContext) -> Measurement:
        m_b = load_shared(self.backbone)
        with evaluation_mode(m_b.model):
            marks = examine(self._answer(), self.asked)
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=means(marks)), {"marks": marks})

    def _answer(self) -> Answer:
        m_b = load_shared(self.backbone)
        tokenizer = m_b.need_tokenizer()
        if self.rival is None or self.m_a is None:
            return answers_of(m_b.model, tokenizer)
        m_a = self.m_a.load()
        if self.rival == "pipeline":
            return pipeline(m_a.model, m_b.model, tokenizer)
        return mixture(m_a.model, m_b.model, tokenizer, self.weight)


class JointRun(GraftRun):
    """Trains a graft and answers the questions.

    Args:
        asked: what is asked.
    """

    asked: Questions

    def artefacts(self) -> tuple[str, ...]:
        return ()  # Only the answers are needed.

    def evaluate(self, trainee: Trainee[Any, Any]) -> Measurement:
        measurement = super().evaluate(trainee)
        tokenizer = trainee.evaluation.evaluator.tokenizer
        with evaluation_mode(trainee.model):
            marks = examine(answers_of(trainee.model, tokenizer), self.asked)
        measurement.add_metrics(means(marks))
        measurement.details["marks"] = marks
        return measurement

    def save(self, *args: Any) -> None:
        """Do not save the graft, which the table does not need."""


def means(marks: Mapping[str, Items]) -> dict[str, Any]:
    """Return the share of right answers of each metric."""
    return {name: sum(of_metric.values()) / len(of_metric) for name, of_metric in marks.items()}

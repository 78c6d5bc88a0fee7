"""What an audit found, as files, as a page and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from rich.console import Console

from graftlm.errors import ForgettingBudgetError
from graftlm.evaluation.audit.passages import Passage
from graftlm.evaluation.chat_answers import ChatAnswer, ChatQuestion
from graftlm.evaluation.kept_answers import AnswerPair
from graftlm.evaluation.metric_text import format_metric, metric_names, metric_title
from graftlm.evaluation.remarks import remarks
from graftlm.evaluation.report import write_report
from graftlm.evaluation.results import Metric, Results
from graftlm.evaluation.terminal_tables import print_answers, print_side_by_side
from graftlm.files.templates import fill_page
from graftlm.files.writing import write_atomically

PAGE_NAME = "audit.html"
_TEMPLATE = Path(__file__).with_name("page.html")

Conversation = tuple[ChatQuestion, ChatAnswer, ChatAnswer]
"""A question, and the answers of base and tuned."""


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        results: the rows `base` and `tuned`; the aims are the budget.
        passages: where the models differ most, the widest difference first.
        conversations: questions with the answers of both models.
        notes: what the reader should know, one sentence per note.
        worst: the answers that changed most, see `graftlm.evaluation.kept_answers`.
        remedy: how to bring a metric below its budget, as the middle of a sentence.
    """

    results: Results
    passages: list[Passage] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: list[AnswerPair] = field(default_factory=list)
    remedy: str = "change less of it"

    @property
    def metrics(self) -> dict[str, Metric]:
        """The tuned model's metrics."""
        return self.results.row("tuned").metrics

    def check_budget(self) -> None:
        """Raise an error where a metric exceeds its budget.

        Raises:
            ForgettingBudgetError: a metric exceeds its budget.
        """
        for aim in self.results.aims:
            if not aim.met:
                raise ForgettingBudgetError(
                    f"The tuned model has {aim.metric} {aim.measured:.4g}, and the budget is {aim.aim:g}: "
                    f"{self.remedy}, or raise the budget."
                )

    def write(self, folder: str | Path) -> Path:
        """Write `results.json`, `report.md` and the page, and return the path of the page.

        Raises:
            EvaluationError: the folder can't be written to.
        """
        write_report(self.results, folder)
        return write_atomically(Path(folder) / PAGE_NAME, self.page().encode())

    def page(self) -> str:
        """Return HTML that needs no other file: tokens colored by their divergence, and both models' choices."""
        base = self.results.row("base")
        tuned = self.results.row("tuned")
        names = metric_names(self.results)
        rows = []
        for name in names:
            cells = [format_metric(name, row.metrics.get(name)) for row in (base, tuned)]
            rows.append((metric_title(name, names), cells))
        tokens = [token for passage in self.passages for token in passage.tokens]
        differing = [each for each in self.conversations if each[1].text != each[2].text]
        return fill_page(
            _TEMPLATE,
            title=f"Audit of {tuned.label.removeprefix('tuned: ')}",
            base=base.label,
            tuned=tuned.label,
            notes=[*self.notes, *remarks(self.results)],
            rows=rows,
            aims=self.results.aims,
            passages=self.passages,
            largest=max((token.kl for token in tokens), default=0.0),
            conversations=self.conversations,
            differing=differing,
            worst=self.worst,
            choices=[[token.kl, token.base, token.tuned] for token in tokens],
        )

    def __str__(self) -> str:
        text = StringIO()
        print_audit(self, Console(file=text, width=100))
        return text.getvalue()


def print_audit(audit: Audit, console: Console) -> None:
    """Print the metrics side by side, the budget, the notes, and the answers that changed most."""
    print_side_by_side(audit.results, console)
    for aim in audit.results.aims:
        mark = "✓" if aim.met else "✗"
        line = f"{mark} {aim.text}: {aim.measured:.4g} (at most {aim.aim:g})"
        console.print(line, highlight=False, markup=False)
    for note in audit.notes:
        console.print(note, highlight=False, markup=False)
    print_answers(audit.worst, console)

"""How well models predict text, what they learned and forgot, and the report that says so."""

from graftlm.evaluation.perplexity import Scores, paired_difference, score
from graftlm.evaluation.results import (
    Aim,
    EvaluationError,
    Interval,
    Machine,
    Metric,
    PaperRow,
    Results,
    Row,
    combine_seeds,
    value_of,
)

__all__ = [
    "Aim",
    "EvaluationError",
    "Interval",
    "Machine",
    "Metric",
    "PaperRow",
    "Results",
    "Row",
    "Scores",
    "combine_seeds",
    "paired_difference",
    "score",
    "value_of",
]

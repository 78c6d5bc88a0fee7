"""Metrics of text, tasks and cost; results, tables, plots and reports."""

from graftlm.evaluation.examples import (
    Example,
    chrf,
    chrf_signature,
    exact_match,
    generate_answers,
    pass_at_1,
    score_answers,
)
from graftlm.evaluation.harness import run_lm_eval
from graftlm.evaluation.metrics import (
    MemoryWatch,
    Scores,
    bootstrap,
    decode_speed,
    learning_and_forgetting,
    paired_difference,
    score,
    share_interval,
)
from graftlm.evaluation.report import write_report
from graftlm.evaluation.result_tables import print_table
from graftlm.evaluation.results import Aim, Interval, Machine, Metric, PaperRow, Results, Row, combine_seeds, value_of
from graftlm.evaluation.tasks import Task, TaskConfig, TaskResult, measure_task, read_task

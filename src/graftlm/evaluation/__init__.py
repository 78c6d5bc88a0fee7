"""Metrics of text, tasks and cost; results, tables, plots and reports."""

from graftlm.evaluation.cost import MemoryWatch, decode_speed
from graftlm.evaluation.examples import (
    Example,
    chrf,
    chrf_signature,
    exact_match,
    generate_answers,
    score_answers,
)
from graftlm.evaluation.harness import run_lm_eval
from graftlm.evaluation.intervals import bootstrap, combine_seeds, share_interval
from graftlm.evaluation.origin import Machine
from graftlm.evaluation.report import write_report
from graftlm.evaluation.results import Aim, Interval, Metric, PaperRow, Results, Row, value_of
from graftlm.evaluation.scores import Scores, learning_and_forgetting, paired_difference, score
from graftlm.evaluation.tasks import Task, TaskConfig, TaskResult, measure_task, read_task
from graftlm.evaluation.terminal_tables import print_table

"""Results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from graftlm.errors import shorten
from graftlm.evaluation.differences import MethodDifference, method_differences
from graftlm.evaluation.kept_answers import AnswerPair
from graftlm.evaluation.metric_text import (
    ABSENT,
    USUAL_METRICS,
    format_mean,
    format_metric,
    format_number,
    metric_names,
    metric_title,
    present_metrics,
)
from graftlm.evaluation.remarks import remarks
from graftlm.evaluation.results import Aim, Results, Row

_TEXT_HEADS = {  # metric: column head
    "old": "old",
    "forgotten": "forgotten",
    "new": "new",
    "learned": "learned",
}
_COST_HEADS = {
    "trainable_parameters": "trainable",
    "total_parameters": "parameters run",
    "train_tokens": "tokens read",
    "train_seconds": "train s",
    "train_tokens_per_s": "train tok/s",
    "decode_new_tokens_per_s": "decode tok/s",
    "peak_memory_bytes": "peak memory",
}
_LOSSES = {"old", "new"}  # without intervals, since those of their differences say more
_FURTHER_COLUMNS = 3  # further metrics per table
_SHOWN_DIFFERENCES = 6  # pairs of methods
_LABEL_WIDTH = 24
_SHOWN_CHARACTERS = 160  # of an answer
_MARKS = {True: "✓", False: "✗", None: ABSENT}


def print_table(results: Results, console: Console | None = None) -> None:
    """Print the usual metrics of all rows, tables of further metrics, remarks, and the aims.

    Args:
        results: the results, with any metrics.
        console: where to print; standard output by default.
    """
    console = console or Console()
    for number, heads in enumerate(_tables(results)):
        lines = [_cells(row, heads) for row in results.rows]
        print_columns(["method", *heads.values()], lines, console, gap=number > 0, width=_LABEL_WIDTH)
    _print_differences(method_differences(results), console)
    print_remarks(results, console)
    for aim in results.aims:
        console.print(_aim_line(aim), highlight=False, markup=False)


def print_remarks(results: Results, console: Console) -> None:
    """Print what a reader of results should know."""
    for remark in remarks(results):
        console.print(remark, highlight=False, markup=False)


def _print_differences(differences: Sequence[MethodDifference], console: Console) -> None:
    """Print the paired differences between methods, unless there are too many."""
    if len(differences) > _SHOWN_DIFFERENCES:
        console.print(
            f"\nDifferences between pairs of methods: {len(differences)}, in the report.", highlight=False, markup=False
        )
        return
    names = list(dict.fromkeys(name for difference in differences for name in difference.metrics))
    for start in range(0, len(names), _FURTHER_COLUMNS):
        shown = names[start : start + _FURTHER_COLUMNS]
        lines = []
        for difference in differences:
            cells = [format_metric(name, difference.metrics.get(name)) for name in shown]
            lines.append([f"{difference.first} minus {difference.second}", *cells])
        titles = [metric_title(name) for name in shown]
        print_columns(["difference", *titles], lines, console, gap=True, width=_LABEL_WIDTH)


def _cells(row: Row, names: Iterable[str]) -> list[str]:
    """Return a row's label and metrics, with the intervals of all but losses."""
    cells = [row.label]
    for name in names:
        show = format_mean if name in _LOSSES else format_metric
        cells.append(show(name, row.metrics.get(name)))
    return cells


def _tables(results: Results) -> list[Mapping[str, str]]:
    """Return the column heads of each table, by the name of the metric."""
    present = present_metrics(results)
    usual = [{name: head for name, head in heads.items() if name in present} for heads in (_TEXT_HEADS, _COST_HEADS)]
    tables: list[Mapping[str, str]] = [heads for heads in usual if heads]
    further = [name for name in present if name not in USUAL_METRICS and not name.endswith("_bpb")]
    for start in range(0, len(further), _FURTHER_COLUMNS):
        names = further[start : start + _FURTHER_COLUMNS]
        tables.append({name: metric_title(name, present) for name in names})
    return tables


def _aim_line(aim: Aim) -> str:
    return f"{_MARKS[aim.met]} {aim.text}: {format_number(aim.measured)} (aim {format_number(aim.aim)})"


def print_side_by_side(results: Results, console: Console) -> None:
    """Print a table with a line for each metric and a column for each row.

    Args:
        results: the results, with any metrics.
        console: where to print.
    """
    names = metric_names(results)
    lines = []
    for name in names:
        cells = [format_metric(name, row.metrics.get(name)) for row in results.rows]
        lines.append([metric_title(name, names), *cells])
    labels = [row.label for row in results.rows]
    print_columns(["", *labels], lines, console)
    print_remarks(results, console)


def print_columns(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    console: Console,
    *,
    gap: bool = False,
    width: int | None = None,
) -> None:
    """Print a table; all columns but the first are aligned right.

    Args:
        head: heads of the columns.
        rows: the cells of each row.
        console: where to print.
        gap: print an empty line before the table.
        width: maximum width of the first column.
    """
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column(head[0], overflow="fold", max_width=width)
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if gap:
        console.print()
    console.print(table, highlight=False, markup=False)


def print_answers(pairs: Sequence[AnswerPair], console: Console) -> None:
    """Print questions with the answers before and after, shortened; nothing if there are none.

    Args:
        pairs: the compared answers.
        console: where to print.
    """
    if not pairs:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, show_lines=False)
    for head in ("question", "before", "after"):
        table.add_column(head, overflow="fold", ratio=1)
    for pair in pairs:
        texts = (pair.question, pair.before, pair.after)
        table.add_row(*(shorten(" ".join(text.split()), _SHOWN_CHARACTERS) for text in texts))
    console.print("\nAnswers that changed most", highlight=False)
    console.print(table, highlight=False, markup=False)

"""Results as tables: Markdown for the report, narrow columns for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from graftlm.evaluation.results import Interval, Metric, Results, value_of

ABSENT = "–"
_LEARNING = {"old", "new", "learned", "forgotten", "old_bpb", "new_bpb"}
_SPEEDS = {"train_tokens_per_s", "decode_old_tokens_per_s", "decode_new_tokens_per_s"}
_USUAL = _LEARNING | _SPEEDS | {"trainable_parameters", "total_parameters", "peak_memory_bytes"}
_TERMINAL = {  # metric: column head
    "old": "old",
    "forgotten": "forgotten",
    "new": "new",
    "learned": "learned",
    "trainable_parameters": "trainable",
    "train_tokens_per_s": "train tok/s",
    "decode_new_tokens_per_s": "decode tok/s",
}
_TERMINAL_COLUMNS = 4  # further metrics per table
_MARKS = {True: "✓", False: "✗", None: ABSENT}
_NOTE = (
    "Old and new: nats per token. Forgotten: the loss on the old domain minus the backbone's. Learned: the backbone's "
    "loss on the new domain minus the method's. Own KL, chat KL, new KL: divergence from the backbone on text and "
    "conversations that it sampled itself, and on the new domain. Brackets: 95% intervals."
)


def render_markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """The report as Markdown; `pictures` are names of files in the same folder."""
    machine = results.machine
    where = ", ".join(filter(None, [machine.cpu, f"{machine.cores} cores", machine.gpu, f"torch {machine.torch}"]))
    parts = [
        f"# {results.name}",
        f"`{results.command}`",
        f"Seeds {', '.join(map(str, results.seeds))}; {where}; commit {results.commit or 'unknown'}.",
        *_measured_sections(results),
        _tasks_section(results),
        _aims_section(results),
        _paper_section(results),
        *(f"![{Path(name).stem.replace('-', ' ')}]({name})" for name in pictures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_table(results: Results, console: Console | None = None) -> None:
    """Print the rows, the metrics of further sets and tasks, and the aims, in at most 100 columns."""
    console = console or Console()
    present = dict.fromkeys(name for row in results.rows for name in row.metrics)
    columns = {name: head for name, head in _TERMINAL.items() if name in present}
    # Results without the usual metrics, such as a benchmark's, show their first metrics.
    tables = [columns or {name: name for name in list(present)[:5]}]
    further = [name for name in present if name not in _USUAL and not name.endswith("_bpb")] if columns else []
    starts = range(0, len(further), _TERMINAL_COLUMNS)
    tables += [{name: metric_title(name) for name in further[i : i + _TERMINAL_COLUMNS]} for i in starts]
    for number, table in enumerate(tables):
        lines = [[row.label, *(_short(name, row.metrics.get(name)) for name in table)] for row in results.rows]
        print_columns(["method", *table.values()], lines, console, gap=number > 0, width=24)
    for aim in results.aims:
        line = f"{_MARKS[aim.met]} {aim.text}: {_number(aim.measured)} (aim {_number(aim.aim)})"
        console.print(line, highlight=False, markup=False)


def metric_names(results: Results) -> list[str]:
    """The metrics of all rows; those of the row with most of them come first."""
    rows = sorted(results.rows, key=lambda row: -len(row.metrics))
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def print_side_by_side(results: Results, console: Console) -> None:
    """Print one line per metric and one column per row."""
    names = metric_names(results)
    lines = [
        [metric_title(name, names), *(format_metric(name, row.metrics.get(name)) for row in results.rows)]
        for name in names
    ]
    print_columns(["", *(row.label for row in results.rows)], lines, console)


def print_columns(
    head: Sequence[str], rows: Iterable[Sequence[str]], console: Console, *, gap: bool = False, width: int | None = None
) -> None:
    """Print a table; the first column has at most `width`, the others are aligned right. `gap` adds a line before."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column(head[0], overflow="fold", max_width=width)
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if gap:
        console.print()
    console.print(table, highlight=False, markup=False)


def metric_title(name: str, names: Iterable[str] = ()) -> str:
    """A metric's title with its unit. A metric is in nats per token when `names` has its bits per byte as well."""
    if name.endswith("_bpb"):
        return f"{name.removesuffix('_bpb')}, bits per byte"
    if name.endswith("_kl"):
        return f"{name.removesuffix('_kl')} KL, nats per token"
    nats = name in ("learned", "forgotten") or f"{name.removesuffix('_lost')}_bpb" in names
    title = name.replace("_", " ") if name.endswith("_lost") or not nats else name
    return f"{title}, nats per token" if nats else title


def format_metric(name: str, metric: Metric | None) -> str:
    """A metric with the unit that its name implies, and with its interval if it has one."""
    if not isinstance(metric, Interval) or metric.low == metric.high:
        return _short(name, metric)
    return f"{_format(name, metric.mean)} [{_format(name, metric.low)}, {_format(name, metric.high)}]"


def _short(name: str, metric: Metric | None) -> str:
    return ABSENT if metric is None else _format(name, value_of(metric))


def _format(name: str, value: float) -> str:
    if name.endswith("parameters"):
        return _with_unit(value, {"B": 1e9, "M": 1e6, "k": 1e3})
    if name.endswith("_bytes"):
        return _with_unit(value, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10})
    if name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    if name.startswith(("learned", "forgotten", "lost_")) or name.endswith("_gain"):
        return f"{value:+.3f}"
    return f"{value:z.3f}"  # no -0.000


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    texts = (f"{value / size:.3g}{unit}" for unit, size in units.items() if abs(value) >= size)
    return next(texts, f"{value:.0f}")


def _measured_sections(results: Results) -> list[str]:
    """The learning-and-forgetting table and further metrics, or one table of all metrics without old and new text."""
    names = list(dict.fromkeys(name for row in results.rows for name in row.metrics))
    if not _LEARNING.intersection(names):
        return [_metrics_table("Measured", results, names)]
    nats = ("old", "forgotten", "new", "learned")
    shorts = {
        "bits per byte, old / new": ("old_bpb", "new_bpb"),
        "trainable parameters": ("trainable_parameters",),
        "train tok/s": ("train_tokens_per_s",),
        "decode tok/s, old / new": ("decode_old_tokens_per_s", "decode_new_tokens_per_s"),
        "peak memory": ("peak_memory_bytes",),
    }
    rows = []
    for row in results.rows:
        cells = [[_short(name, row.metrics.get(name)) for name in group] for group in shorts.values()]
        texts = [ABSENT if {*cell} == {ABSENT} else " / ".join(cell) for cell in cells]
        rows.append([row.label, *(format_metric(name, row.metrics.get(name)) for name in nats), *texts])
    heads = ["method", *nats, *shorts]
    further = [name for name in names if name not in _USUAL]
    table = _section("Learned and forgotten", heads, rows) + f"\n\n{_NOTE}"
    return [table, _metrics_table("Further measurements", results, further)]


def _metrics_table(title: str, results: Results, names: Sequence[str]) -> str:
    if not names:
        return ""
    rows = [[row.label, *(format_metric(name, row.metrics.get(name)) for name in names)] for row in results.rows]
    return _section(title, ["method", *map(metric_title, names)], rows)


def _tasks_section(results: Results) -> str:
    """Each task of grafts with heads: score, calibration, and what is confused most often."""
    rows, details = [], cast("dict[str, Any]", results.details.get("tasks") or {})
    for row in results.rows:
        for name, task in details.get(row.id, {}).get("test", {}).items():
            if score := isinstance(task, dict) and task.get("score"):  # else of a task of text that is called test
                cells = map(_number, (task["metrics"][score], task.get("expected_calibration_error")))
                errors = "; ".join(f"{a} as {b} ({n})" for a, b, n in task.get("most_confused", ())) or ABSENT
                rows.append([row.label, name, str(task["rows"]), score, *cells, errors])
    heads = ["method", "task", "rows", "metric", "score", "calibration error", "errors"]
    return _section("Tasks", heads, rows) if rows else ""


def _aims_section(results: Results) -> str:
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[aim.text, aim.metric, _number(aim.aim), _number(aim.measured), words[aim.met]] for aim in results.aims]
    return _section("Aims", ["aim", "metric", "aimed at", "measured", "met"], rows) if rows else ""


def _paper_section(results: Results) -> str:
    measured_rows = {row.id: row for row in results.rows}
    rows = []
    for published in results.paper:
        row = measured_rows.get(published.id)
        for name, value in published.metrics.items():
            measured = format_metric(name, row.metrics.get(name) if row else None)
            rows.append([row.label if row else published.id, name, _format(name, value), measured, published.where])
    return _section("Published results", ["method", "metric", "paper", "here", "where"], rows) if rows else ""


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4g}"


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {title}\n\n{table}"

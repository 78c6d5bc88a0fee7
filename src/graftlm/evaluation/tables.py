"""Results as tables: Markdown for the report, and a narrow one for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graftlm.evaluation.results import Aim, Interval, Metric, Results, Row, value_of

_NATS = ("old", "new", "learned", "forgotten")
_BITS = ("old_bpb", "new_bpb")
_COSTS = (
    "trainable_parameters",
    "total_parameters",
    "train_tokens_per_s",
    "decode_old_tokens_per_s",
    "decode_new_tokens_per_s",
    "peak_memory_bytes",
)
_ABSENT = "–"
_TERMINAL = [
    ("old", "old"),
    ("forgotten", "forgotten"),
    ("new", "new"),
    ("learned", "learned"),
    ("trainable", "trainable_parameters"),
    ("train tok/s", "train_tokens_per_s"),
    ("decode tok/s", "decode_new_tokens_per_s"),
]
_FURTHER = 4  # columns of a table of further metrics
_MARKS = {True: "✓", False: "✗", None: "–"}


def render_markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """The report as Markdown; `pictures` are file names beside it."""
    machine = results.machine
    where = ", ".join(filter(None, [machine.cpu, f"{machine.cores} cores", machine.gpu, f"torch {machine.torch}"]))
    parts = [
        f"# {results.name}",
        f"`{results.command}`",
        f"Seeds {', '.join(map(str, results.seeds))}; {where}; commit {results.commit or 'unknown'}.",
        _rows_section(results),
        _sets_section(results),
        _aims_section(results.aims),
        _paper_section(results),
        *(f"![{Path(name).stem.replace('-', ' ')}]({name})" for name in pictures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_table(results: Results, console: Console | None = None) -> None:
    """Show the rows, then what was measured on further sets and tasks, then the aims, in at most 100 columns."""
    console = console or Console()
    present = dict.fromkeys(name for row in results.rows for name in row.metrics)
    columns = [(head, key) for head, key in _TERMINAL if key in present]
    # Results without the usual metrics, such as a benchmark's, show the first ones that they have.
    _print_columns(results, columns or [(name, name) for name in list(present)[:5]], console)
    further = [name for name in present if name not in {*_NATS, *_BITS, *_COSTS} and not name.endswith("_bpb")]
    for start in range(0, len(further) if columns else 0, _FURTHER):
        console.print()
        _print_columns(results, [(_title(name), name) for name in further[start : start + _FURTHER]], console)
    for aim in results.aims:
        console.print(f"{_MARKS[aim.met]} {_aim_line(aim)}", highlight=False, markup=False)


def _print_columns(results: Results, columns: Sequence[tuple[str, str]], console: Console) -> None:
    """A table of a row for each method, its columns given by head and metric."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("method", overflow="fold", max_width=24)
    for head, _ in columns:
        table.add_column(head, justify="right", overflow="fold")
    for row in results.rows:
        table.add_row(row.label, *(_short(key, row.metrics.get(key)) for _, key in columns))
    console.print(table)


def format_metric(name: str, metric: Metric | None) -> str:
    """A metric as a reader wants it: the unit of its name, and its interval when it has one."""
    if metric is None:
        return _ABSENT
    if not isinstance(metric, Interval) or metric.low == metric.high:
        return _plain(name, value_of(metric))
    return f"{_plain(name, metric.mean)} [{_plain(name, metric.low)}, {_plain(name, metric.high)}]"


def _short(name: str, metric: Metric | None) -> str:
    return _ABSENT if metric is None else _plain(name, value_of(metric))


def _plain(name: str, value: float) -> str:
    if name.endswith("parameters"):
        return _with_unit(value, (("B", 1e9), ("M", 1e6), ("k", 1e3)))
    if name.endswith("_bytes"):
        return _with_unit(value, ((" GiB", 2**30), (" MiB", 2**20), (" KiB", 2**10)))
    if name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    if name in ("learned", "forgotten") or name.endswith("_gain"):
        return f"{value:+.3f}"
    return f"{value:.3f}"


def _with_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, size in units:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _rows_section(results: Results) -> str:
    if not _on_old_and_new(results):
        return _other_metrics(results)
    head = [
        "method", "old", "forgotten", "new", "learned", "bits per byte, old / new", "trainable parameters",
        "train tok/s", "decode tok/s, old / new", "peak memory",
    ]  # fmt: skip
    table = _markdown_table(head, [_row_cells(row) for row in results.rows])
    note = (
        "Old and new: nats per token. Forgotten: what the old domain lost against the backbone; learned: what the new "
        "one gained. Brackets: 95% intervals."
    )
    return f"## Learned and forgotten\n\n{table}\n\n{note}"


def _on_old_and_new(results: Results) -> bool:
    """Whether anything was measured on old or new text; a model trained from nothing knows no such sets."""
    return any(name in row.metrics for row in results.rows for name in (*_NATS, *_BITS))


def _row_cells(row: Row) -> list[str]:
    def both(first: str, second: str) -> str:
        cells = [_short(first, row.metrics.get(first)), _short(second, row.metrics.get(second))]
        return _ABSENT if cells == [_ABSENT, _ABSENT] else " / ".join(cells)

    def one(name: str) -> str:
        return format_metric(name, row.metrics.get(name))

    return [
        row.label, one("old"), one("forgotten"), one("new"), one("learned"), both("old_bpb", "new_bpb"),
        _short("trainable_parameters", row.metrics.get("trainable_parameters")),
        _short("train_tokens_per_s", row.metrics.get("train_tokens_per_s")),
        both("decode_old_tokens_per_s", "decode_new_tokens_per_s"),
        _short("peak_memory_bytes", row.metrics.get("peak_memory_bytes")),
    ]  # fmt: skip


def _sets_section(results: Results) -> str:
    """Further evaluation sets, and any other metric that has no column above."""
    known = {*_NATS, *_BITS, *_COSTS}
    if not _on_old_and_new(results):
        return ""
    return _other_metrics(results, known, "## Further measurements\n\n")


def _other_metrics(results: Results, known: set[str] | None = None, title: str = "## Measured\n\n") -> str:
    names = dict.fromkeys(name for row in results.rows for name in row.metrics if name not in (known or set()))
    if not names:
        return ""
    rows = [[row.label, *(format_metric(name, row.metrics.get(name)) for name in names)] for row in results.rows]
    return title + _markdown_table(["method", *(_title(name) for name in names)], rows)


def _title(name: str) -> str:
    return f"{name.removesuffix('_bpb')}, bits per byte" if name.endswith("_bpb") else name.replace("_", " ")


def _aims_section(aims: Sequence[Aim]) -> str:
    if not aims:
        return ""
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[aim.text, aim.metric, _number(aim.aim), _number(aim.measured), words[aim.met]] for aim in aims]
    return "## Aims\n\n" + _markdown_table(["aim", "metric", "aimed at", "measured", "met"], rows)


def _paper_section(results: Results) -> str:
    if not results.paper:
        return ""
    ours = {row.id: row for row in results.rows}
    rows = []
    for published in results.paper:
        row = ours.get(published.id)
        for name, value in published.metrics.items():
            measured = format_metric(name, row.metrics.get(name) if row else None)
            rows.append([row.label if row else published.id, name, _plain(name, value), measured, published.where])
    return "## Beside the paper\n\n" + _markdown_table(["method", "metric", "paper", "here", "where"], rows)


def _aim_line(aim: Aim) -> str:
    return f"{aim.text}: {_number(aim.measured)} (aim {_number(aim.aim)})"


def _number(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.4g}"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

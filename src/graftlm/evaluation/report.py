"""The learning-and-forgetting report: a folder with `results.json`, `report.md` and plots, and a table for the terminal.

    learned   = backbone's new - method's new      forgotten = method's old - backbone's old      (nats per token)

Figures come from `results.details`, so a report can be drawn again from its JSON alone:

    statistics   {row id: {"open_share": {domain: [per layer]}, "spectrum": {name: [values] or [[values] per layer]}}}
    paths        {row id: [[forgotten, learned], ...]}, other settings of a row, in order
    losses       {row id: [[step, loss], ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from graftlm.errors import DataError
from graftlm.evaluation.perplexity import Scores, paired_difference
from graftlm.evaluation.results import Aim, Interval, Metric, Results, Row, value_of, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def learning_and_forgetting(backbone: Mapping[str, Scores], method: Mapping[str, Scores]) -> dict[str, Interval]:
    """The metrics of one method beside its backbone's, from scores per evaluation set ("old", "new", and any other).

    Gives `<set>` and `<set>_bpb` for each set of `method`, `learned` where both have "new", and `forgotten` where both
    have "old": paired bootstrap intervals, over the same windows.

    Raises:
        EvaluationError: the two were scored on other windows.
    """
    metrics: dict[str, Interval] = {}
    for name, scores in method.items():
        metrics[name] = scores.interval("nats_per_token")
        metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
    if "new" in backbone and "new" in method:
        metrics["learned"] = paired_difference(backbone["new"], method["new"])
    if "old" in backbone and "old" in method:
        metrics["forgotten"] = paired_difference(method["old"], backbone["old"])
    return metrics


def write_report(results: Results, out: str | Path, *, plots: Mapping[str, Figure] | None = None) -> Path:
    """Write `results.json`, `report.md` and PNGs to the folder `out`; gives the path of `report.md`.

    Args:
        results: what was measured; its `details` give the figures.
        out: made when it does not exist.
        plots: further figures, by file name without ending; one of a known name takes that one's place.

    Raises:
        EvaluationError: the folder can't be written to.
    """
    out = Path(out)
    results.write(out)
    figures = draw_figures(results) | dict(plots or {})
    pictures = _save_figures(figures, out)
    return write_atomically(out / "report.md", render_markdown(results, pictures).encode())


def draw_figures(results: Results) -> dict[str, Figure]:
    """The figures that the results hold the values for, by file name without ending."""
    from graftlm.evaluation import plots  # matplotlib takes half a second that `graft --help` should not wait for

    labels = {row.id: row.label for row in results.rows}
    figures: dict[str, Figure] = {}
    if any({"learned", "forgotten"} <= row.metrics.keys() for row in _methods(results)):
        figures["learn-against-forget"] = plots.learn_against_forget(
            _methods(results), _mapping(results.details.get("paths"))
        )
    for row_id, statistics in _mapping(results.details.get("statistics")).items():
        label = labels.get(row_id, row_id)
        if share := _mapping(statistics).get("open_share"):
            figures[f"open-share-{row_id}"] = plots.open_share(share, title=f"{label}: open gates")
        if values := _mapping(statistics).get("spectrum"):
            figures[f"spectrum-{row_id}"] = plots.spectrum(values, title=f"{label}: spectrum of the gating matrices")
    if losses := _mapping(results.details.get("losses")):
        figures["training-loss"] = plots.loss_curves({labels.get(key, key): pairs for key, pairs in losses.items()})
    return figures


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
    """Show the rows, then the aims, in at most 100 columns."""
    console = console or Console()
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("method", overflow="fold", max_width=24)
    columns = [(head, key) for head, key in _TERMINAL if any(key in row.metrics for row in results.rows)]
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for row in results.rows:
        table.add_row(row.label, *(_short(key, row.metrics.get(key)) for _, key in columns))
    console.print(table)
    for aim in results.aims:
        console.print(f"{_MARKS[aim.met]} {_aim_line(aim)}", highlight=False, markup=False)


_TERMINAL = [
    ("old", "old"),
    ("forgotten", "forgotten"),
    ("new", "new"),
    ("learned", "learned"),
    ("trainable", "trainable_parameters"),
    ("train tok/s", "train_tokens_per_s"),
    ("decode tok/s", "decode_new_tokens_per_s"),
]
_MARKS = {True: "✓", False: "✗", None: "–"}


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
    if name.endswith("_parameters"):
        return _with_unit(value, (("B", 1e9), ("M", 1e6), ("k", 1e3)))
    if name.endswith("_bytes"):
        return _with_unit(value, ((" GiB", 2**30), (" MiB", 2**20), (" KiB", 2**10)))
    if name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    if name in ("learned", "forgotten"):
        return f"{value:+.3f}"
    return f"{value:.3f}"


def _with_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, size in units:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _rows_section(results: Results) -> str:
    if not any(name in row.metrics for row in results.rows for name in (*_NATS, *_BITS, *_COSTS)):
        return _other_metrics(results)
    head = [
        "method", "old", "forgotten", "new", "learned", "bits per byte, old / new", "trainable parameters",
        "train tok/s", "decode tok/s, old / new", "peak memory",
    ]  # fmt: skip
    table = _markdown_table(head, [_row_cells(row) for row in results.rows])
    note = (
        "Old and new: nats per token. Forgotten: what the old domain lost against the backbone; learned: what the new one "
        "gained. Brackets: 95% intervals."
    )
    return f"## Learned and forgotten\n\n{table}\n\n{note}"


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
    if all(name not in known for row in results.rows for name in row.metrics):
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


def _save_figures(figures: Mapping[str, Figure], out: Path) -> list[str]:
    from graftlm.evaluation import plots

    return [plots.save(figure, out / f"{name}.png").name for name, figure in figures.items()]


def _methods(results: Results) -> list[Row]:
    """Rows that learned or forgot; the backbone itself did neither."""
    return [row for row in results.rows if row.id != "backbone"]


def _mapping(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError("The details of the results do not hold a mapping of row ids where one is expected.")
    return value

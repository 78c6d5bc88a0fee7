"""Results as Markdown, for the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from graftlm.data.mixture import SourceRead, passes_text
from graftlm.evaluation.differences import method_differences
from graftlm.evaluation.kept_answers import reported_answers
from graftlm.evaluation.measurement import TrainingDetails
from graftlm.evaluation.metric_text import (
    ABSENT,
    LEARNING_METRICS,
    USUAL_METRICS,
    format_mean,
    format_metric,
    format_number,
    format_value,
    metric_title,
    present_metrics,
)
from graftlm.evaluation.origin import Machine
from graftlm.evaluation.remarks import remarks, scored_text, text_sets
from graftlm.evaluation.results import Metric, Results
from graftlm.evaluation.scores import difference_name
from graftlm.evaluation.taught_answers import reported_wrong_answers

_NATS = ("old", "forgotten", "new", "learned")
_SHORT_COLUMNS = {  # column head: metrics
    "bits per byte, old / new": ("old_bpb", "new_bpb"),
    "parameters, trainable / all": ("trainable_parameters", "total_parameters"),
    "tokens read": ("train_tokens",),
    "train s": ("train_seconds",),
    "train tok/s": ("train_tokens_per_s",),
    "decode tok/s, old / new": ("decode_old_tokens_per_s", "decode_new_tokens_per_s"),
    "peak memory": ("peak_memory_bytes",),
}
_MET = {True: "yes", False: "no", None: "not measured"}
_MEANS_NOTE = "Nats per token. Old, forgotten, new and learned above are means over the sets, with equal shares."
_NOTE = (
    "Old and new: nats per token. Forgotten: the loss on the old domain minus the backbone's. Learned: the backbone's "
    "loss on the new domain minus the method's. Own KL, chat KL, new KL: divergence from the backbone on text and "
    "conversations that it sampled itself, and on the new domain. Brackets: 95% intervals."
)


def render_markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """Return the report as Markdown.

    Args:
        results: the results; empty sections are left out.
        pictures: file names of pictures in the report's folder, which are shown at the end.
    """
    seeds = ", ".join(str(seed) for seed in results.seeds)
    parts = [
        f"# {results.name}",
        f"`{results.command}`",
        f"Seeds {seeds}; {_describe(results.machine)}; commit {results.commit or 'unknown'}.",
        *_measured_sections(results),
        _sets_section(results),
        "\n".join(f"- {remark}" for remark in remarks(results)),
        _differences_section(results),
        _training_section(results),
        _scored_section(results),
        _tasks_section(results),
        _answers_section(results),
        _taught_section(results),
        _aims_section(results),
        _paper_section(results),
    ]
    for name in pictures:
        title = Path(name).stem.replace("-", " ")
        parts.append(f"![{title}]({name})")
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe(machine: Machine) -> str:
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    parts = [machine.cpu, cores, machine.gpu, f"torch {machine.torch}"]
    return ", ".join(part for part in parts if part)


def _measured_sections(results: Results) -> list[str]:
    """Return the tables of learning and forgetting and of further metrics, or one table without old and new text."""
    present = present_metrics(results)
    if not LEARNING_METRICS.intersection(present):
        return [_metrics_table("Measured", results, present)]
    rows = []
    for row in results.rows:
        cells = [row.label]
        cells += [format_metric(name, row.metrics.get(name)) for name in _NATS]
        cells += [_short_cell(row.metrics, names) for names in _SHORT_COLUMNS.values()]
        rows.append(cells)
    table = _section("Learned and forgotten", ["method", *_NATS, *_SHORT_COLUMNS], rows)
    in_sets = _metrics_of_sets(results)
    further = [name for name in present if name not in USUAL_METRICS and name not in in_sets]
    return [f"{table}\n\n{_NOTE}", _metrics_table("Further measurements", results, further)]


def _metrics_of_sets(results: Results) -> dict[str, list[str]]:
    """Return {metric: cells before its value} of each named set: its loss, and what was learned or forgotten of it."""
    sets = text_sets(results)
    metrics: dict[str, list[str]] = {}
    for name in (*sets.new, *sets.old):
        change = difference_name(name, sets)
        metrics[change] = [name, "forgotten" if sets.is_old(name) else "learned"]
        metrics[name] = [name, "loss"]
        metrics[f"{name}_bpb"] = [name, "bits per byte"]
        metrics[f"{name}_kl"] = [name, "KL"]
    present = present_metrics(results)
    return {metric: cells for metric, cells in metrics.items() if metric in present}


def _sets_section(results: Results) -> str:
    """Return what was learned and forgotten of each named set."""
    rows = []
    for metric, cells in _metrics_of_sets(results).items():
        rows.append([*cells, *(format_metric(metric, row.metrics.get(metric)) for row in results.rows)])
    labels = [row.label for row in results.rows]
    table = _section("Learned and forgotten by set", ["set", "measured", *labels], rows)
    return f"{table}\n\n{_MEANS_NOTE}" if table else ""


def _short_cell(metrics: Mapping[str, Metric], names: Sequence[str]) -> str:
    """Return the means of metrics in one cell."""
    if not any(name in metrics for name in names):
        return ABSENT
    return " / ".join(format_mean(name, metrics.get(name)) for name in names)


def _metrics_table(title: str, results: Results, names: Sequence[str]) -> str:
    if not names:
        return ""
    rows = []
    for row in results.rows:
        cells = [format_metric(name, row.metrics.get(name)) for name in names]
        rows.append([row.label, *cells])
    titles = [metric_title(name, names) for name in names]
    return _section(title, ["method", *titles], rows)


def _differences_section(results: Results) -> str:
    """Return the paired differences between methods."""
    differences = method_differences(results)
    names = list(dict.fromkeys(name for difference in differences for name in difference.metrics))
    rows = []
    for difference in differences:
        cells = [format_metric(name, difference.metrics.get(name)) for name in names]
        rows.append([f"{difference.first} minus {difference.second}", *cells])
    titles = [metric_title(name) for name in names]
    return _section("Differences between methods, on the same text", ["methods", *titles], rows)


def _training_section(results: Results) -> str:
    """Return the learning rate and the steps of each training, and how much of each source it read."""
    trainings = cast("Mapping[str, TrainingDetails]", results.details.get("trained") or {})
    rows = []
    for row in results.rows:
        training = trainings.get(row.id)
        if not training:
            continue
        numbers = [f"{training['learning_rate']:g}", f"{training['steps']:,}", f"{training['rows_per_step']:,}"]
        read = training["read"]
        domains = [source["domain"] for source in read]
        texts = [_read_text(source, is_alone=domains.count(source["domain"]) == 1) for source in read]
        rows.append([row.label, *numbers, "; ".join(texts) or ABSENT])
    return _section("Training", ["method", "learning rate", "steps", "rows per step", "text read"], rows)


def _read_text(source: SourceRead, *, is_alone: bool) -> str:
    """Return how much of a source was read, as in `new: 1,000 tokens of da.txt, 2.5 times, 50.0% of the new text`."""
    text = f"{source['domain']}: {source['tokens']:,} tokens"
    if source["source"]:
        text += f" of {source['source']}"
    if "passes" in source:
        text += f", {passes_text(source['passes'])}"
    if "share" in source and not is_alone:
        text += f", {source['share']:.1%} of the {source['domain']} text"
    return text


def _scored_section(results: Results) -> str:
    """Return what was scored of each source of each test set."""
    rows = []
    for name, parts in scored_text(results).items():
        for part in parts:
            documents = f"{part['documents']:,} of {part['of_documents']:,}"
            rows.append([f"{name}: {part['source'] or 'text'}", f"{part['tokens']:,}", documents])
    return _section("Scored text", ["test", "tokens", "documents"], rows)


def _tasks_section(results: Results) -> str:
    """Return each task of grafts with heads: its score, calibration, and what is confused most often."""
    details = cast("dict[str, dict[str, dict[str, object]]]", results.details.get("tasks") or {})
    rows = []
    for row in results.rows:
        tasks = details.get(row.id, {}).get("test", {})
        for name, task in tasks.items():
            # A task of text may be called test; its details have no score.
            if isinstance(task, dict) and task.get("score"):
                rows.append([row.label, name, *_task_cells(task)])
    heads = ["method", "task", "rows", "metric", "score", "calibration error", "errors"]
    return _section("Tasks", heads, rows)


def _answers_section(results: Results) -> str:
    """Return the answers that changed most, next to those of the backbone."""
    rows = []
    for row in results.rows:
        for pair in reported_answers(results, row.id):
            texts = (pair.question, pair.before, pair.after)
            rows.append([row.label, *(" ".join(text.split()) for text in texts)])
    return _section("Answers that changed most", ["method", "question", "before", "after"], rows)


def _taught_section(results: Results) -> str:
    """Return wrong answers to taught questions, next to the taught ones, and where it differs, whether grafts act."""
    head = ["method", "question", "taught", "given"]
    wrong = [(row.label, answer) for row in results.rows for answer in reported_wrong_answers(results, row.id)]
    says_acts = not all(answer.acts for _, answer in wrong)
    if says_acts:
        head.append("the graft acts")
    rows = []
    for label, answer in wrong:
        texts = (answer.question, answer.taught, answer.given)
        cells = [label, *(" ".join(text.split()) for text in texts)]
        if says_acts:
            cells.append("yes" if answer.acts else "no")
        rows.append(cells)
    return _section("Taught questions that are answered otherwise", head, rows)


def _task_cells(task: Mapping[str, Any]) -> list[str]:
    metric = task["score"]
    errors = [f"{true} as {label} ({count})" for true, label, count in task.get("most_confused", ())]
    return [
        str(task["rows"]),
        metric,
        format_number(task["metrics"][metric]),
        format_number(task.get("expected_calibration_error")),
        "; ".join(errors) or ABSENT,
    ]


def _aims_section(results: Results) -> str:
    rows = [
        [aim.text, aim.metric, format_number(aim.aim), format_number(aim.measured), _MET[aim.met]]
        for aim in results.aims
    ]
    return _section("Aims", ["aim", "metric", "aimed at", "measured", "met"], rows)


def _paper_section(results: Results) -> str:
    """Return a table of published metrics next to the measured ones; an empty text without published ones."""
    measured = {row.id: row for row in results.rows}
    rows = []
    for published in results.paper:
        row = measured.get(published.id)
        label = row.label if row else published.id
        for name, value in published.metrics.items():
            here = format_metric(name, row.metrics.get(name) if row else None)
            rows.append([label, name, format_value(name, value), here, published.where])
    return _section("Published results", ["method", "metric", "paper", "here", "where"], rows)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a heading with a table; an empty text without rows."""
    if not rows:
        return ""
    alignments = ["---", *["---:"] * (len(head) - 1)]
    lines = []
    for cells in (head, alignments, *rows):
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    table = "\n".join(lines)
    return f"## {title}\n\n{table}"

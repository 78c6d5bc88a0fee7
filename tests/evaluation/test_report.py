"""The report renders what was measured, and nothing breaks where something was not."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation import (
    Aim,
    Interval,
    PaperRow,
    Results,
    Row,
    Scores,
    learning_and_forgetting,
    plots,
    print_table,
    write_report,
)
from graftlm.evaluation.metric_text import format_metric
from graftlm.evaluation.report_tables import render_markdown

PNG = b"\x89PNG"


def interval(mean: float, half: float = 0.01) -> Interval:
    return Interval(mean=mean, low=mean - half, high=mean + half)


def method(row_id: str, label: str, learned: float, forgotten: float) -> Row:
    metrics = {"old": interval(3 + forgotten), "new": interval(5 - learned), "learned": interval(learned)}
    costs = {"trainable_parameters": 840_000, "train_tokens_per_s": 5123.4, "peak_memory_bytes": 3 * 2**30}
    return Row(id=row_id, label=label, metrics={**metrics, "forgotten": interval(forgotten), **costs})


ROWS = [
    Row(id="backbone", label="backbone", metrics={"old": 3.0, "new": 5.0, "shakespeare": 4.0}),
    method("first", "the first method", 1.9, 0.12),
    method("second", "the second | method", 1.8, 0.01),
    Row(id="empty", label="nothing yet", metrics={}),
]
AIMS = [
    Aim(text="forgets little", metric="forgotten", aim=0.2, measured=0.083, met=True),
    Aim(text="is fast", metric="train_tokens_per_s", aim=1.0),
]
DETAILS = {
    "statistics": {
        "second": {
            "open_share": {"old": [0.4, 0.3], "new": [0.9, 0.8]},
            "spectrum": {"graft": [[3.0, 2.0, 1.0], [4.0, 1.0, 0.5]], "backbone": [5.0, 4.0, 3.0, 2.0]},
        },
        "first": {},
    },
    "losses": {"first": [[step, 5.0 - step / 100] for step in range(100)], "second": []},
}


@pytest.fixture(scope="module")
def results() -> Results:
    paper = [PaperRow(id="first", metrics={"forgotten": 0.067}, where="Table 2")]
    return Results.here("a-name", ROWS, aims=AIMS, paper=paper, details=DETAILS)


def test_the_folder_is_whole(results: Results, tmp_path: Path) -> None:
    report = write_report(results, tmp_path / "out", plots={"extra": plots.open_share({"old": [0.5]})})
    names = {"learn-against-forget", "open-share-second", "spectrum-second", "training-loss", "extra"}
    assert {path.name for path in report.parent.iterdir()} == {
        "results.json", "report.md", *(f"{name}.png" for name in names)
    }  # fmt: skip
    text = report.read_text(encoding="utf-8")
    for name in names:
        assert f"({name}.png)" in text
        assert (report.parent / f"{name}.png").read_bytes().startswith(PNG)
    assert Results.read(report.parent) == results


def test_the_markdown_says_what_was_measured(results: Results) -> None:
    text = render_markdown(results)
    assert "| the first method | 3.120 [3.110, 3.130] | +0.120 [+0.110, +0.130] |" in text
    assert "the second \\| method" in text
    assert "| nothing yet | – | – | – | – | – | – | – | – | – |" in text
    assert "840k" in text
    assert "5,123" in text
    assert "3 GiB" in text
    assert "| backbone | 4.000 |" in text
    assert "| forgets little | forgotten | 0.2 | 0.083 | yes |" in text
    assert "| is fast | train_tokens_per_s | 1 | – | not measured |" in text
    assert "| the first method | forgotten | +0.067 | +0.120 [+0.110, +0.130] | Table 2 |" in text


def test_a_benchmark_without_the_usual_metrics(tmp_path: Path) -> None:
    rows = [Row(id="train", label="training", metrics={"ratio": interval(1.1)})]
    text = write_report(Results.here("bench-x", rows), tmp_path).read_text(encoding="utf-8")
    assert "| training | 1.100 [1.090, 1.110] |" in text
    assert not list(tmp_path.glob("*.png"))


def test_the_terminal_table_fits(results: Results) -> None:
    out = io.StringIO()
    print_table(results, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("the first method" in line and "+0.120 [+0.110, +0.130]" in line for line in lines)
    assert any("the first method" in line and "840k" in line for line in lines)
    assert "✓ forgets little" in out.getvalue()


def test_the_terminal_table_of_other_metrics() -> None:
    out = io.StringIO()
    rows = [Row(id="train", label="training", metrics={"ratio": interval(1.1)})]
    print_table(Results.here("bench-x", rows), Console(file=out, width=100))
    assert "1.100 [1.090, 1.110]" in out.getvalue()


def test_no_metric_is_left_out_of_the_terminal() -> None:
    out = io.StringIO()
    rows = [Row(id="train", label="training", metrics={f"ratio_{number}": 1.0 + number for number in range(7)})]
    print_table(Results.here("bench-x", rows), Console(file=out, width=100))
    for number in range(7):
        assert f"{1.0 + number:.3f}" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "metric", "text"),
    [
        ("old", None, "–"),
        ("old", 3.14159, "3.142"),
        ("forgotten", -0.001, "-0.001"),
        ("trainable_parameters", 1_234_567, "1.23M"),
        ("total_parameters", 999, "999"),
        ("peak_memory_bytes", 10 * 2**20, "10 MiB"),
        ("train_tokens_per_s", 3.21, "3.2"),
    ],
)
def test_units(name: str, metric: float | None, text: str) -> None:
    assert format_metric(name, metric) == text


def scores(nats: list[float]) -> Scores:
    size = len(nats)
    return Scores(np.array(nats), np.full(size, 10), np.full(size, 40), np.arange(size))


def test_learned_and_forgotten_are_differences_to_the_backbone() -> None:
    backbone = {"old": scores([30.0, 32.0]), "new": scores([50.0, 52.0])}
    metrics = learning_and_forgetting(
        backbone, {"old": scores([31.0, 33.0]), "new": scores([40.0, 42.0]), "third": scores([9.0])}
    )
    assert set(metrics) == {"old", "old_bpb", "new", "new_bpb", "third", "third_bpb", "learned", "forgotten"}
    assert metrics["forgotten"].mean == pytest.approx(0.1)
    assert metrics["learned"].mean == pytest.approx(1.0)
    assert metrics["forgotten"].low == pytest.approx(0.1)


def test_scores_of_other_text_are_refused() -> None:
    with pytest.raises(EvaluationError):
        learning_and_forgetting({"old": scores([1.0, 2.0])}, {"old": scores([1.0])})


def test_details_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_report(Results.here("x", [], details={"losses": [1, 2]}), tmp_path)


def test_the_legend_names_every_method() -> None:
    figure = plots.learn_against_forget([method(str(i), f"method number {i}", 1.5 + i / 500, 0.1) for i in range(4)])
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [f"method number {i}" for i in range(4)]


def test_figures_with_no_values_still_draw(tmp_path: Path) -> None:
    for number, figure in enumerate(
        (plots.learn_against_forget([]), plots.spectrum({"graft": []}), plots.loss_curves({}))
    ):
        assert plots.save(figure, tmp_path / f"empty-{number}.png").read_bytes().startswith(PNG)

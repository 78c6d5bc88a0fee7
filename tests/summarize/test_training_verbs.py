"""`graft summarize train-selector` and `train-writer`: reports, folders for use, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.tools import invoke
from graftlm.errors import DataError, RecipeError, TrainingError
from graftlm.pipelines.summarize import WriterTrainingConfig, run_writer_training
from graftlm.pipelines.summarize.prompt_layout import read_layout
from summarize.tools import write_rows

pytest.importorskip("sentencex")
pytest.importorskip("rouge_score")
SMALL_SELECTOR = ("kind=classifier", "steps=2", "evaluate_every=1", "model={embedding_size: 4, hidden_size: 4}")
SMALL_WRITER = ("training={steps: 2, batch_size: 2}", "layout.window=200", "decoding.max_new_tokens=12")
SCRATCH = ("model={model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 256}", "tokenizer.vocab_size=300")
COPIED = {"copied_1", "copied_2", "copied_3", "copied_4"}


@pytest.fixture(autouse=True)
def without_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading MiniLM takes longer than all of these tests."""
    monkeypatch.setattr("graftlm.pipelines.summarize.summary.default_encoder", lambda: None)


@pytest.fixture
def table(tmp_path: Path) -> str:
    rows = []
    for number in range(6):
        text = f"Tea number {number} is drunk by many. It has {number} cups of water. Nobody knows who drank it first."
        rows.append({"text": text, "summary": f"Tea number {number} is drunk by many."})
    return str(write_rows(tmp_path / "tea.jsonl", *rows))


def metrics_of(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    results = json.loads((folder / "results.json").read_text())
    return {row["id"]: row["metrics"] for row in results["rows"]}


def test_a_selector_is_trained_scored_and_used(table: str, tmp_path: Path) -> None:
    out = tmp_path / "selector"
    done = invoke("summarize", "train-selector", table, *SMALL_SELECTOR, "--out", str(out), "--device", "cpu")
    assert done.code == 0, done.err
    metrics = metrics_of(out)
    assert list(metrics) == ["selector", "default", "lead", "oracle", "human"]
    for name in ("rouge1", "rouge2", "rougeL", "oracle_sentences", "copied_4"):
        assert 0 <= metrics["selector"][name]["mean"] <= 100
    assert metrics["oracle"]["rouge1"]["mean"] >= metrics["lead"]["rouge1"]["mean"]
    assert metrics["selector"]["copied_1"]["mean"] == pytest.approx(100), "an extract is copied"
    assert "rouge1" not in metrics["human"]
    assert "this selector" in (out / "report.md").read_text()
    (line,) = (line for line in done.err.splitlines() if line.startswith("Use it: "))
    words = line.removeprefix("Use it: graft ").split()
    assert words[2:4] == ["--selector", str(out / "selector")]
    paper = tmp_path / "paper.txt"
    paper.write_text("Tea number 7 is drunk by many. It has 7 cups of water.")
    used = invoke("summarize", str(paper), *words[2:], "--json", "--device", "cpu")
    assert json.loads(used.out)[0]["extract"]["selector"] == str(out / "selector")


@pytest.mark.parametrize("kind", ["scratch", "pretrained", "graft"])
def test_a_writer_is_trained_scored_and_used(kind: str, table: str, tmp_path: Path, tiny_backbone) -> None:
    out = tmp_path / "writer"
    keys = SCRATCH if kind == "scratch" else (f"model={tiny_backbone('llama')}",)
    if kind == "graft":
        keys = (*keys, "graft={kind: lora, rank: 2}")
    command = ("summarize", "train-writer", table, *keys, *SMALL_WRITER, "--device", "cpu", "--test", table)
    done = invoke(*command, "--out", str(out), "--json", "--quiet")
    assert done.code == 0, done.err
    assert done.err == ""
    metrics = metrics_of(out)
    assert json.loads(done.out)["results"]["rows"][0]["id"] == "writer"
    assert list(metrics) == ["writer", "selector", "oracle", "human"]
    assert metrics["human"].keys() >= COPIED
    assert metrics["oracle"].keys() >= COPIED | {"rouge1", "rouge2", "rougeL"}
    assert {"rouge1", "copied_1", "copied_1_extract"} <= metrics["writer"].keys()
    rows = [json.loads(line) for line in (out / "summaries.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert all(row["written"] and row["extract"] and row["summary"] for row in rows)
    folder = out / ("graft" if kind == "graft" else "model")
    layout = read_layout(folder)
    assert layout is not None
    assert layout.window == 200
    paper = tmp_path / "paper.txt"
    paper.write_text("Tea number 7 is drunk by many. It has 7 cups of water.")
    used = invoke("summarize", str(paper), "--writer", str(folder), "--length", "5", "--device", "cpu", "--json")
    assert used.code == 0, used.err
    (summary,) = json.loads(used.out)
    assert summary["writer"] == str(folder)
    assert not any("layout" in note for note in summary["notes"])


def test_the_report_names_the_variant_and_its_extracts(table: str, tmp_path: Path) -> None:
    for variant in ("gm", "gg"):
        out = tmp_path / variant
        done = invoke(
            *("summarize", "train-writer", table, *SCRATCH, *SMALL_WRITER, f"variant={variant}", "budget=1s"),
            *("--test", table, "--out", str(out), "--device", "cpu"),
        )
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in (out / "summaries.jsonl").read_text().splitlines()]
        sentences = {row["extract"].count(".") for row in rows}
        assert sentences == ({1} if variant == "gm" else {2})
        assert variant in (out / "report.md").read_text()
        assert ("upper bound" in done.err) == (variant == "gg")


def test_a_run_of_other_data_is_not_continued(table: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "a"), "--device", "cpu", "--quiet")
    command = ("summarize", "train-writer", table, *SCRATCH, *SMALL_WRITER, *out)
    assert invoke(*command).code == 0
    refused = invoke(*command, "variant=mm", "budget=1s")
    assert refused.code == 2
    assert str(tmp_path / "a") in refused.err
    rows = [json.loads(line) for line in Path(table).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["text"] += " The end."
    other = write_rows(tmp_path / "other.jsonl", *rows)
    longer = ("training={steps: 4, batch_size: 2}", *SMALL_WRITER[1:])
    refused = invoke("summarize", "train-writer", str(other), *SCRATCH, *longer, *out)
    assert (refused.code, str(tmp_path / "a") in refused.err) == (2, True), "the same extracts and summaries"


@pytest.mark.parametrize("verb", ["train-selector", "train-writer"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{"text": "Tea is good."}], "summary"),
        ([{"text": "Tea is good.", "summary": "Tea."}], ": 1"),
        ([{"text": "", "summary": "Tea."}], "line 1"),
        ([{"text": "Tea.", "summary": "Tea is good for all."}], "line 1"),
    ],
)
def test_a_table_that_cannot_be_learned_from(verb: str, rows: list[object], message: str, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "a.jsonl", *rows)
    keys = SCRATCH if verb == "train-writer" else ()
    done = invoke("summarize", verb, str(table), *keys, "--out", str(tmp_path / "out"), "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "model"),
        ({"model": 7}, "model"),
        ({"model": {"n_layer": 1}, "tokenizer": {"vocab_size": 300}}, "model_type"),
        ({"model": {"model_type": "gpt2"}}, "tokenizer"),
        ({"model": {"model_type": "gpt2"}, "tokenizer": {"vocab_size": 300}, "graft": {"kind": "lora"}}, "graft"),
        ({"model": "a", "tokenizer": {"vocab_size": 300}}, "tokenizer"),
        ({"model": "a", "variant": "mg"}, "variant"),
        ({"model": "a", "graft": {"kind": "lora"}, "rest_fraction": 0.5}, "rest_fraction"),
        ({"model": "a", "layout": {"context": "hierarchical"}}, "context"),
        ({"model": "a", "rest_fraction": 2}, "rest_fraction"),
        ({"model": "a", "bugdet": "8s"}, "bugdet"),
    ],
)
def test_a_config_that_is_refused_names_its_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        WriterTrainingConfig.parse(values)
    assert key in str(error.value)


def test_rest_of_the_documents_is_for_models_that_read_the_introduction() -> None:
    def rest(**values: object) -> float:
        return WriterTrainingConfig.parse({"model": "a", **values}).rest

    assert rest() == 0.5
    assert rest(graft={"kind": "lora"}) == 0
    assert rest(layout={"context": "document"}) == 0
    assert rest(rest_fraction=0.25) == 0.25


def test_a_run_without_documents_or_of_another_graft(table: str, tmp_path: Path, tiny_backbone) -> None:
    from graftlm.pipelines.summarize import read_summarized

    documents = read_summarized(table)
    backbone = str(tiny_backbone("llama"))
    config = WriterTrainingConfig.parse({"model": backbone, "graft": {"kind": "conditional-tasks"}})
    for learned, test in (([], documents), (documents, [])):
        with pytest.raises(DataError) as error:
            run_writer_training(learned, test, tmp_path, config)
        assert "0" in str(error.value)
    with pytest.raises(RecipeError) as refused:
        run_writer_training(documents, documents, tmp_path, config, device="cpu")
    assert "graft" in str(refused.value)
    epochs = WriterTrainingConfig.parse({"model": backbone, "training": {"epochs": 1}, "rest_fraction": 0})
    with pytest.raises(TrainingError) as unread:
        run_writer_training(documents, documents, tmp_path, epochs, device="cpu", progress=False)
    assert "steps" in str(unread.value)


def test_the_old_form_takes_any_file(tmp_path: Path) -> None:
    paper = tmp_path / "train-writer.txt"
    paper.write_text("Tea is good for many people. Water is wet.")
    assert invoke("summarize", str(paper), "--budget", "1").code == 0
    assert "TABLE" in invoke("summarize", "train-writer", "--help").out
    assert "FILE" in invoke("summarize", "--help").out


def test_documents_that_are_learned_and_held_out_are_told(table: str, tmp_path: Path) -> None:
    command = ("summarize", "train-selector", table, "--test", table, *SMALL_SELECTOR, "--device", "cpu")
    done = invoke(*command, "--out", str(tmp_path / "a"))
    assert done.code == 0
    assert any("6 of 6" in line for line in done.err.splitlines())
    refused = invoke(*command, "--held-out", "0.5", "--out", str(tmp_path / "b"))
    assert (refused.code, "--held-out" in refused.err) == (2, True)

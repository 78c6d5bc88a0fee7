"""The output of each verb, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import benchmark_files as files
import graftlm
import graftlm.demo
from cli.tools import Graft
from graftlm.evaluation import Results, Row
from graftlm.grafts import kinds
from graftlm.store.manifest import read_manifest

VERBS = (
    "train",
    "compare",
    "grow",
    "eval",
    "generate",
    "predict",
    "inspect",
    "export",
    "demo",
    "methods",
    "schema",
)
TEXTS = ("--text", "old=old/test.txt", "--text", "new=new/test.txt", "--limit-tokens", "200", "--length", "32")


def test_the_version_is_that_of_the_package(graft: Graft) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert graft("--version") == (0, f"graftlm {project['version']}\n", "")


def test_public_names_are_there() -> None:
    for name in graftlm.__all__:
        assert getattr(graftlm, name) is not None
    assert set(graftlm.__all__) <= set(dir(graftlm))
    with pytest.raises(AttributeError) as error:
        _ = graftlm.nothing
    assert "'nothing'" in str(error.value)


def test_train_prints_one_document(graft: Graft, home: Path) -> None:
    outcome = graft("train", "recipe.yaml", "--out", "runs/json", "--json")
    document = json.loads(outcome.out)
    assert document["results"] == json.loads((home / "runs/json/results.json").read_text())
    assert document["files"]["graft"] == ["runs/json/graft"]
    for paths in document["files"].values():
        assert all((home / path).exists() for path in paths)
    assert "llama" in outcome.err.splitlines()[0]


@pytest.mark.usefixtures("undrawn_figures")
def test_a_preset_is_an_override_and_the_graft_has_its_values(graft: Graft, home: Path) -> None:
    command = ("train", "recipe.yaml", "graft={kind: neutral-residues, width: 2, alpha: 3}", "graft.preset=paper")
    outcome = graft(*command, "training.steps=1", "out=runs/preset", "--quiet")
    assert outcome.code == 0, outcome.err
    config = read_manifest(home / "runs/preset/graft").config
    assert (config["gate_init"], config["width"], config["alpha"]) == ("random", 2, 3)
    assert "preset" not in config
    refused = graft("train", "recipe.yaml", "graft.preset=calm", "out=runs/unknown", "--quiet")
    assert refused.code == 2
    assert "preset" in refused.err
    assert "paper" in refused.err


@pytest.mark.usefixtures("undrawn_figures")
def test_a_finished_run_is_read_back_and_quiet_prints_nothing(graft: Graft, trained: str, home: Path) -> None:
    tensors = home / trained / "graft.safetensors"
    before = tensors.stat().st_mtime_ns
    outcome = graft("train", "recipe.yaml", "out=runs/trained", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    assert tensors.stat().st_mtime_ns == before


@pytest.mark.usefixtures("undrawn_figures")
def test_compare_trains_the_methods_of_the_recipe(graft: Graft, home: Path) -> None:
    methods = {name: {"graft": {"kind": name}} for name in ("lora", "adapter")}
    command = ("compare", "recipe.yaml", f"methods={json.dumps(methods)}", "out=runs/compared")
    outcome = graft(*command)
    assert outcome.code == 0, outcome.err
    for expected in ("backbone", "lora", "adapter", "runs/compared/lora/graft", "runs/compared/adapter/graft"):
        assert expected in outcome.out
    again = json.loads(graft(*command, "--json").out)
    assert [row["id"] for row in again["results"]["rows"]] == ["backbone", "lora", "adapter"]
    assert (home / "runs/compared/lora/graft/graft.json").exists()


def test_eval_shows_metrics_down_and_models_across(graft: Graft, trained: str, home: Path) -> None:
    outcome = graft("eval", trained, *TEXTS, "--out", "runs/evaluated")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["backbone", "neutral", "residues"]
    for head in ("old, nats per token", "new, bits per byte", "learned, nats per token", "forgotten, nats per token"):
        assert any(line.startswith(head) for line in lines)
    assert (home / "runs/evaluated/report.md").exists()


def test_eval_runs_tasks_on_both(graft: Graft, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], int | None]] = []

    def run_tasks(
        model: PreTrainedModel,
        tokenizer: object,
        names: list[str],
        *,
        limit: int | None,
        confirm_unsafe_code: bool,
    ) -> dict[str, dict[str, float]]:
        assert not confirm_unsafe_code
        calls.append((type(model).__name__, names, limit))
        return {"arc_easy": {"acc": 0.25 * len(calls)}}

    monkeypatch.setattr("graftlm.evaluation.harness.run_lm_eval", run_tasks)
    document = json.loads(graft("eval", trained, "--tasks", "arc_easy", "--limit", "3", "--json").out)
    assert calls == [("LlamaForCausalLM", ["arc_easy"], 3), ("GraftedModel", ["arc_easy"], 3)]
    assert [row["metrics"]["arc_easy_acc"] for row in document["rows"]] == [0.25, 0.5]


def test_compare_and_audit_run_the_preset_on_local_data(graft: Graft, home: Path) -> None:
    data = files.write_retention(home / "runs" / "eval data")
    shorter = [{"task": "nq_open", "name": "short", "data": str(data), "max_tokens": 4, "limit": 3}]
    methods = {"lora": {"graft": {"kind": "lora", "rank": 2}}}
    command = ("compare", "recipe.yaml", f"methods={json.dumps(methods)}", f"evaluation.harness={json.dumps(shorter)}")
    size = ("training.steps=1", "evaluation.own_tokens=0", "out=runs/preset", "--quiet", "--json")
    outcome = graft(*command, *size, "--preset", "retention", "--eval-data", str(data))
    assert outcome.code == 0, outcome.err
    bare, tuned = json.loads(outcome.out)["results"]["rows"]
    for name in ("ifeval", "bbh", "nq_open", "short"):
        assert name in bare["metrics"]
        assert f"{name}_change" in tuned["metrics"]
    names = ("audit", "llama", "runs/preset/lora/graft", "--tokens", "0", "--json", "--quiet")
    task = f"nq_open,name=short,limit=3,max_tokens=4,data={data}"
    outcome = graft(*names, "--harness", task, "--preset", "retention", "--eval-data", str(data))
    assert outcome.code == 0, outcome.err
    metrics = json.loads(outcome.out)["rows"][1]["metrics"]
    assert {"ifeval_lost", "bbh_lost", "nq_open_lost", "short_lost"} <= metrics.keys()
    outcome = graft(*names, "--harness", "nq_open,shotss=3")
    assert outcome.code == 2
    assert "shotss" in outcome.err


def test_eval_measures_examples_on_the_backbone_too(graft: Graft, trained: str, home: Path) -> None:
    rows = [{"ask": f"le {i} ", "say": "renard brun"} for i in range(3)]
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs/qa.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    columns = ("--prompt-column", "ask", "--answer-column", "say")
    common = ("eval", trained, "--examples", "runs/qa.jsonl", "--examples", "again=runs/qa.jsonl", *columns)
    outcome = graft(*common, "--metric", "chrf", "--limit", "2", "--max-new-tokens", "3", "--stop", "x", "--json")
    document = json.loads(outcome.out)
    bare, grafted = (row["metrics"] for row in document["rows"])
    assert {"qa_chrf", "again_chrf"} <= bare.keys() & grafted.keys()
    assert {"qa_chrf_gain", "again_chrf_gain"} <= grafted.keys()
    assert document["details"]["tasks"]["backbone"]["qa"]["examples"] == 2
    table = graft(*common, "--metric", "log-perplexity", "--shots", "1").out
    assert "qa_log-perplexity, nats per token" in table
    assert "qa_log-perplexity, bits per byte" in table
    assert "qa log-perplexity gain" in table


def test_generate_is_greedy_by_default(graft: Graft, trained: str) -> None:
    command = ("generate", trained, "le renard", "--max-new-tokens", "12")

    def generate(*options: str) -> dict[str, Any]:
        return json.loads(graft(*command, "--json", *options).out)

    once = generate()
    assert once["text"] == generate()["text"]
    assert once["prompt"] == "le renard"
    assert 0 < once["tokens"] <= 12
    assert graft(*command).out == f"le renard{once['text']}\n"
    first = generate("--sample", "--seed", "1")["text"]
    again = generate("--sample", "--seed", "1")["text"]
    other = generate("--sample", "--seed", "2")["text"]
    assert first == again
    assert first != other
    beams = graft("generate", trained, "le renard", "--num-beams", "2", "--max-new-tokens", "4")
    assert beams.out.startswith("le renard")


def test_generate_bare_is_the_backbone(graft: Graft, trained: str, home: Path) -> None:
    from graftlm import load_backbone
    from graftlm.generation.generate import Decoding, generate_text

    backbone = load_backbone(home / "llama")
    decoding = Decoding(max_new_tokens=6)
    expected = generate_text(backbone.model, backbone.need_tokenizer(), "a dog", decoding)
    bare = graft("generate", trained, "a dog", "--bare", "--max-new-tokens", "6", "--backbone", "llama", "--json")
    assert json.loads(bare.out)["text"] == expected.text


def test_generate_takes_a_model_alone(graft: Graft) -> None:
    alone = graft("generate", "llama", "le renard", "--max-new-tokens", "4", "--json")
    assert (alone.code, alone.err) == (0, "")
    assert json.loads(alone.out)["tokens"] == 4


def test_generate_traces_gates(graft: Graft, trained: str, home: Path) -> None:
    command = ("generate", trained, "le renard", "--max-new-tokens", "5")
    document = json.loads(graft(*command, "--trace-html", "runs/trace.html", "--json").out)
    assert len(document["trace"]) == document["tokens"]
    for token in document["trace"]:
        assert token["values"].keys() == {"open"}
        assert 0 <= token["values"]["open"] <= 1
    assert "".join(token["text"] for token in document["trace"]) == document["text"]
    assert "le renard</title>" in (home / "runs/trace.html").read_text(encoding="utf-8")
    assert "open  " in graft(*command, "--trace").out


def test_a_trace_is_that_of_the_positions_that_predict(home: Path, trained: str) -> None:
    from graftlm import GraftedModel, load_backbone, load_graft
    from graftlm.generation.generate import Decoding, generate_text

    backbone = load_backbone(home / "llama")
    tokenizer = backbone.need_tokenizer()
    with GraftedModel(backbone, {"graft": load_graft(home / trained, backbone)}) as model:
        generation = generate_text(model, tokenizer, "le renard", Decoding(max_new_tokens=4), trace=True)
        ids = tokenizer("le renard", return_tensors="pt")["input_ids"]
        _, traces = model.forward_traces(input_ids=ids, use_cache=False)
    first = float(traces["graft"].values[0, -1, 0])
    assert generation.trace is not None
    assert generation.trace[0].values["open"] == pytest.approx(first, abs=1e-6)


def test_inspect_describes_the_files(graft: Graft, trained: str, home: Path) -> None:
    document = json.loads(graft("inspect", trained, "--json").out)
    manifest = read_manifest(home / trained)
    assert document["parameters"] == manifest.parameters
    assert document["parameters"] == sum(group["parameters"] for group in document["tensors"])
    assert document["kind"] == "neutral-residues"
    assert document["training"]["steps"] == 3
    assert document["measured"]["forgotten"]["low"] <= document["measured"]["forgotten"]["mean"]
    assert document["layers"]["open_share"].keys() == {"old", "new"}  # of the run's test texts
    ranks = next(group["effective_rank"] for group in document["tensors"] if "w_i" in group["name"])
    assert len(ranks) == 2
    assert all(1 < rank < 48 for rank in ranks)


INSPECT_IMPORTS = """
import sys
import graftlm.generation.inspect, graftlm.grafts.neutral_residues

print(sorted({"torch._dynamo", "transformers.modeling_utils", "peft", "accelerate"} & {*sys.modules}))
"""


@pytest.mark.slow
def test_inspect_starts_without_slow_imports() -> None:
    child = subprocess.run([sys.executable, "-c", INSPECT_IMPORTS], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"


def test_inspect_watches_the_graft_on_texts(graft: Graft, trained: str) -> None:
    texts = ("--text", "old=old/test.txt", "--text", "new/train.txt")
    layers = json.loads(graft("inspect", trained, *texts, "--json").out)["layers"]
    assert layers["open_share"].keys() == {"old", "new", "train"}
    for shares in layers["open_share"].values():
        assert all(0 <= share <= 1 for share in shares)
    assert len(layers["effective_rank"]["graft"]) == 2
    assert len(layers["effective_rank"]["backbone"]) == 2
    shown = graft("inspect", trained, "--backbone", "llama").out
    assert "effective rank" in shown
    assert "open share, new" in shown


def test_inspect_shows_a_report_again(graft: Graft, trained: str, home: Path) -> None:
    assert "forgotten" in graft("inspect", "runs/trained").out
    document = json.loads(graft("inspect", "runs/trained", "--json").out)
    assert document == json.loads((home / "runs/trained/results.json").read_text())


def test_methods_lists_every_kind_with_its_keys(graft: Graft) -> None:
    listed = {method["kind"]: method for method in json.loads(graft("methods", "--json").out)}
    assert list(listed) == kinds()
    assert listed["neutral-residues"]["config"]["capacity"] == 0.2
    assert listed["neutral-residues"]["presets"] == ["paper"]
    assert all(method["summary"] and method["label"] for method in listed.values())
    shown = graft("methods").out
    assert all(kind in shown for kind in kinds())
    assert "width" in shown  # a key without a default


def test_schema_is_written_or_printed(graft: Graft, home: Path) -> None:
    from graftlm.runs.recipe import recipe_schema

    schema = recipe_schema()
    assert json.loads(graft("schema").out) == schema
    assert json.loads(graft("schema", "--json").out) == schema
    assert graft("schema", "--out", "runs/recipe.schema.json").out == "runs/recipe.schema.json\n"
    assert json.loads((home / "runs/recipe.schema.json").read_text()) == schema


def test_demo_runs_the_demo(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_demo(out: Path, *, quick: bool, seed: int, log: Any, progress: bool) -> Results:
        log(f"{out} {quick} {seed} {progress}")
        rows = [Row(id="before", label="before", metrics={"facts_right": 0.0})]
        return Results.here("stand-in", rows, details={"questions": [["Who?", "A.", "B.", "C."]]})

    monkeypatch.setattr(graftlm.demo, "run_demo", run_demo)
    outcome = graft("demo", "--quick", "--seed", "5")
    assert outcome.err == "runs/demo True 5 True\n"
    assert "runs/demo/report.md" in outcome.out
    assert "Who?" in outcome.out


def test_paths_come_in_the_order_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graftlm.cli.common import print_report

    ids = ["second", "first"]
    for row_id in ids:
        (tmp_path / row_id / "graft").mkdir(parents=True)
    results = Results.here("compare", [Row(id=row_id, label=row_id, metrics={}) for row_id in ids])
    print_report(results, tmp_path, as_json=True)
    paths = json.loads(capsys.readouterr().out)["files"]["graft"]
    assert [Path(path).parent.name for path in paths] == ids


def test_of_several_processes_only_the_first_one_prints(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert graft("methods") == (0, "", "")
    assert graft("methods", "--json") == (0, "", "")
    assert graft("inspect", "nowhere") == (2, "", "")


def test_graft_has_help(graft: Graft) -> None:
    outcome = graft("--help")
    assert outcome.code == 0
    assert "Usage: " in outcome.out


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("serve", "--port", "abc", "--backbone", "x"), "--port"),
        (("serve", "--port"), "--port"),
        (("serve",), "--backbone"),
        (("eval", "x", "--batch-size", "0"), "--batch-size"),
        (("summarize", "train-selector"), "TABLE"),
        (("serves",), "serves"),
    ],
)
def test_wrong_arguments_are_one_sentence(graft: Graft, arguments: tuple[str, ...], key: str) -> None:
    outcome = graft(*arguments)
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert key in line
    assert "--help" in line


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(graft: Graft, verb: str) -> None:
    outcome = graft(verb, "--help")
    assert outcome.code == 0
    assert "Usage: " in outcome.out
    assert "--json" in outcome.out

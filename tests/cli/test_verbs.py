"""What each verb prints, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import graftlm
from cli.tools import Graft
from graftlm.evaluation import Results, Row
from graftlm.grafts import kinds
from graftlm.store.manifest import read_manifest

VERBS = ("train", "compare", "grow", "eval", "generate", "predict", "inspect", "export", "demo", "methods", "schema")
TEXTS = ("--text", "old=old/test.txt", "--text", "new=new/test.txt", "--limit-tokens", "200", "--length", "32")


def test_the_version_is_that_of_the_package(graft: Graft) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert graft("--version") == (0, f"graftlm {project['version']}\n", "")


def test_public_names_are_there() -> None:
    for name in graftlm.__all__:
        assert getattr(graftlm, name) is not None
    assert set(graftlm.__all__) <= set(dir(graftlm))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = graftlm.nothing


def test_train_prints_one_document(graft: Graft, home: Path) -> None:
    outcome = graft("train", "recipe.yaml", "--out", "runs/json", "--json")
    document = json.loads(outcome.out)
    assert document["results"] == json.loads((home / "runs/json/results.json").read_text())
    assert document["files"]["graft"] == ["runs/json/graft"]
    assert all((home / path).exists() for paths in document["files"].values() for path in paths)
    assert outcome.err.startswith("Backbone llama")


def test_a_finished_run_is_read_back_and_quiet_says_nothing(graft: Graft, trained: str, home: Path) -> None:
    before = (home / trained / "graft.safetensors").stat().st_mtime_ns
    outcome = graft("train", "recipe.yaml", "out=runs/trained", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    assert (home / trained / "graft.safetensors").stat().st_mtime_ns == before


def test_compare_trains_the_recipe_s_methods(graft: Graft, home: Path) -> None:
    methods = {name: {"graft": {"kind": name}} for name in ("lora", "adapter")}
    outcome = graft("compare", "recipe.yaml", f"methods={json.dumps(methods)}", "out=runs/compared")
    assert outcome.code == 0, outcome.err
    for expected in ("backbone", "lora", "adapter", "runs/compared/lora/graft", "runs/compared/adapter/graft"):
        assert expected in outcome.out
    assert outcome.err.count("training ") >= 2
    again = json.loads(
        graft("compare", "recipe.yaml", f"methods={json.dumps(methods)}", "out=runs/compared", "--json").out
    )
    assert [row["id"] for row in again["results"]["rows"]] == ["backbone", "lora", "adapter"]
    assert (home / "runs/compared/lora/graft/graft.json").exists()


def test_eval_shows_metrics_down_and_models_across(graft: Graft, trained: str, home: Path) -> None:
    outcome = graft("eval", trained, *TEXTS, "--out", "runs/evaluated")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["backbone", "neutral", "residues"]
    heads = ("old, nats per token", "new, bits per byte", "learned, nats per token", "forgotten, nats per token")
    assert all(any(line.startswith(head) for line in lines) for head in heads)
    assert (home / "runs/evaluated/report.md").exists()


def test_eval_runs_tasks_on_both(graft: Graft, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def tasks(model: Any, tokenizer: Any, names: list[str], *, limit: int | None) -> dict[str, dict[str, float]]:
        calls.append((type(model).__name__, names, limit))
        return {"arc_easy": {"acc": 0.25 * len(calls)}}

    monkeypatch.setattr("graftlm.evaluation.harness.run_lm_eval", tasks)
    document = json.loads(graft("eval", trained, "--tasks", "arc_easy", "--limit", "3", "--json").out)
    assert calls == [("LlamaForCausalLM", ["arc_easy"], 3), ("GraftedModel", ["arc_easy"], 3)]
    assert [row["metrics"]["arc_easy_acc"] for row in document["rows"]] == [0.25, 0.5]


def test_eval_measures_examples_beside_the_backbone(graft: Graft, trained: str, home: Path) -> None:
    rows = [{"ask": f"le {i} ", "say": "renard brun"} for i in range(3)]
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs/qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = ("--prompt-column", "ask", "--answer-column", "say")
    common = ("eval", trained, "--examples", "runs/qa.jsonl", "--examples", "again=runs/qa.jsonl", *columns)
    written = graft(*common, "--metric", "chrf", "--limit", "2", "--max-new-tokens", "3", "--stop", "x", "--json")
    document = json.loads(written.out)
    bare, row = (row["metrics"] for row in document["rows"])
    assert {"qa_chrf", "again_chrf"} <= bare.keys() & row.keys()
    assert {"qa_chrf_gain", "again_chrf_gain"} <= row.keys()
    assert document["details"]["tasks"]["backbone"]["qa"]["examples"] == 2
    shown = graft(*common, "--metric", "log-perplexity", "--shots", "1").out
    assert "qa_log-perplexity, nats per token" in shown
    assert "qa_log-perplexity, bits per byte" in shown
    assert "qa log-perplexity gain" in shown


def test_generate_is_greedy_by_default(graft: Graft, trained: str) -> None:
    def text(*more: str) -> dict[str, Any]:
        return json.loads(graft("generate", trained, "le renard", "--max-new-tokens", "12", "--json", *more).out)

    once = text()
    assert once["text"] == text()["text"]
    assert once["prompt"] == "le renard"
    assert 0 < once["tokens"] <= 12
    shown = graft("generate", trained, "le renard", "--max-new-tokens", "12").out
    assert shown == f"le renard{once['text']}\n"
    drawn = [text("--sample", "--seed", str(seed))["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    beams = graft("generate", trained, "le renard", "--num-beams", "2", "--max-new-tokens", "4")
    assert beams.out.startswith("le renard")


def test_generate_bare_is_the_backbone(graft: Graft, trained: str, home: Path) -> None:
    from graftlm import load_backbone
    from graftlm.generation.generate import Decoding, generate_text

    backbone = load_backbone(home / "llama")
    expected = generate_text(backbone.model, backbone.need_tokenizer(), "a dog", Decoding(max_new_tokens=6))
    plain = graft("generate", trained, "a dog", "--bare", "--max-new-tokens", "6", "--backbone", "llama", "--json")
    assert json.loads(plain.out)["text"] == expected.text


def test_generate_traces_gates(graft: Graft, trained: str, home: Path) -> None:
    page = ("--trace-html", "runs/trace.html", "--json")
    document = json.loads(graft("generate", trained, "le renard", "--max-new-tokens", "5", *page).out)
    assert [token["values"].keys() for token in document["trace"]] == [{"open"}] * document["tokens"]
    assert "".join(token["text"] for token in document["trace"]) == document["text"]
    assert all(0 <= token["values"]["open"] <= 1 for token in document["trace"])
    assert "<title>Trace: le renard</title>" in (home / "runs/trace.html").read_text(encoding="utf-8")
    assert "open  " in graft("generate", trained, "le renard", "--max-new-tokens", "5", "--trace").out


def test_a_trace_is_that_of_the_positions_that_predict(home: Path, trained: str) -> None:
    from graftlm import GraftedModel, load_backbone, load_graft
    from graftlm.generation.generate import Decoding, generate_text

    backbone = load_backbone(home / "llama")
    with GraftedModel(backbone, {"graft": load_graft(home / trained, backbone)}) as model:
        tokenizer = backbone.need_tokenizer()
        generation = generate_text(model, tokenizer, "le renard", Decoding(max_new_tokens=4), trace=True)
        ids = tokenizer("le renard", return_tensors="pt")["input_ids"]
        first = model.forward_traces(input_ids=ids, use_cache=False)[1]["graft"].values[0, -1, 0]
    assert generation.trace is not None
    assert generation.trace[0].values["open"] == pytest.approx(float(first), abs=1e-6)


def test_inspect_says_what_the_files_say(graft: Graft, trained: str, home: Path) -> None:
    document = json.loads(graft("inspect", trained, "--json").out)
    manifest = read_manifest(home / trained)
    assert document["parameters"] == manifest.parameters == sum(group["parameters"] for group in document["tensors"])
    assert document["kind"] == "neutral-residues"
    assert document["training"]["steps"] == 3
    assert document["measured"]["forgotten"]["low"] <= document["measured"]["forgotten"]["mean"]
    assert document["layers"]["open_share"].keys() == {"old", "new"}, "as the run's tests showed it"
    ranks = next(group["effective_rank"] for group in document["tensors"] if "w_i" in group["name"])
    assert len(ranks) == 2
    assert all(1 < rank < 48 for rank in ranks)


def test_inspect_starts_without_what_takes_seconds_to_import() -> None:
    code = (
        "import sys, graftlm.generation.inspect, graftlm.grafts.neutral_residues\n"
        "print(sorted({'torch._dynamo', 'transformers.modeling_utils', 'peft', 'accelerate'} & {*sys.modules}))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"


def test_inspect_watches_the_graft_on_texts(graft: Graft, trained: str) -> None:
    texts = ("--text", "old=old/test.txt", "--text", "new/train.txt")
    layers = json.loads(graft("inspect", trained, *texts, "--json").out)["layers"]
    assert layers["open_share"].keys() == {"old", "new", "train"}
    assert all(0 <= share <= 1 for shares in layers["open_share"].values() for share in shares)
    assert len(layers["effective_rank"]["graft"]) == len(layers["effective_rank"]["backbone"]) == 2
    shown = graft("inspect", trained, "--backbone", "llama").out
    assert "effective rank" in shown
    assert "open share, new" in shown


def test_inspect_shows_a_report_again(graft: Graft, trained: str, home: Path) -> None:
    assert "forgotten" in graft("inspect", "runs/trained").out
    assert json.loads(graft("inspect", "runs/trained", "--json").out) == json.loads(
        (home / "runs/trained/results.json").read_text()
    )


def test_methods_lists_every_kind_with_its_keys(graft: Graft) -> None:
    listed = {method["kind"]: method for method in json.loads(graft("methods", "--json").out)}
    assert list(listed) == kinds()
    assert listed["neutral-residues"]["config"]["capacity"] == 0.2
    assert all(method["summary"] and method["label"] for method in listed.values())
    shown = graft("methods").out
    assert all(kind in shown for kind in kinds())
    assert "width" in shown, "keys without a default are named as well"


def test_schema_is_written_or_printed(graft: Graft, home: Path) -> None:
    from graftlm.runs.recipe import recipe_schema

    assert json.loads(graft("schema").out) == json.loads(graft("schema", "--json").out) == recipe_schema()
    assert graft("schema", "--out", "runs/recipe.schema.json").out == "runs/recipe.schema.json\n"
    assert json.loads((home / "runs/recipe.schema.json").read_text()) == recipe_schema()


def results(out: Path) -> Results:
    made = Results.here("stand-in", [Row(id="backbone", label="backbone", metrics={"old": 1.5})])
    made.write(out)
    return made


def test_demo_runs_the_demo(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    import graftlm.demo

    def run_demo(out: Path, *, quick: bool, seed: int, log: Any, progress: bool) -> Results:
        log(f"{out} {quick} {seed} {progress}")
        return results(out)

    monkeypatch.setattr(graftlm.demo, "run_demo", run_demo)
    monkeypatch.setattr(graftlm.demo, "run_chat_demo", None)
    outcome = graft("demo", "--tiny", "--quick", "--seed", "5")
    assert outcome.err == "runs/demo True 5 True\n"
    assert "runs/demo/results.json" in outcome.out


def test_of_several_processes_only_the_first_one_speaks(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert graft("methods") == graft("methods", "--json") == (0, "", "")
    assert graft("inspect", "nowhere") == (2, "", "")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_has_help_and_json(graft: Graft, verb: str) -> None:
    outcome = graft(*filter(None, [verb]), "--help")
    assert outcome.code == 0
    assert "Usage: " in outcome.out
    assert not verb or "--json" in outcome.out


def test_generate_takes_a_model_alone(home: Path, graft: Graft) -> None:
    alone = graft("generate", "llama", "le renard", "--max-new-tokens", "4", "--json")
    assert (alone.code, alone.err) == (0, "")
    assert json.loads(alone.out)["tokens"] == 4

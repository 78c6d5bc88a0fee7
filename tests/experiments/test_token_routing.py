"""Token routing on generated text: its data, its metrics, a quick run, and error messages."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options
from experiments.parents import ENGLISH
from experiments.study import MINI_LM, MINI_LM_PACKAGE
from experiments.token_routing import runs, texts
from experiments.token_routing.run import INTERVALS, LABELS
from experiments.token_routing.runs import load_arrow, load_xlora
from graftlm.backbone import load_backbone
from graftlm.errors import DataError, MissingExtraError, RecipeError
from graftlm.evaluation import Results, value_of
from graftlm.grafts import GraftedModel, build_graft, graft_config

run = import_module("experiments.token_routing.run")

WORDS = ["the", "river", "house", "walked", "under", "morning", "old", "said", "garden", "letter", "stone", "fish"]
NLLS = {"nll_math", "nll_science", "nll_code", "nll_reading", "nll_average"}


def words(count: int, seed: object) -> str:
    source = random.Random(str(seed))
    return " ".join(source.choice(WORDS) for _ in range(count))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    write(path, "".join(json.dumps(line) + "\n" for line in lines))


def function(name: str) -> str:
    head = f'def {name}(x):\n    """Return {words(8, name)}."""\n'
    return f"{head}    total = x + {len(name)}\n    return total * total - x\n"


def arc(seed: object) -> dict[str, str]:
    choices = " ".join(f"Answer{n}: {words(2, (seed, n))}" for n in range(1, 5))
    question = f"Please choose the correct answer to the question: {words(6, seed)}?"
    return {"instruction": f"{question}\n\n{choices}\n\nAnswer format: answer1/answer2", "answer": "answer3"}


def article(number: int) -> dict[str, object]:
    context = words(14, ("article", number))
    question = {"question": f"{words(3, number)}?", "answers": [{"text": context.split()[2]}]}
    return {"title": f"Title_{number}", "paragraphs": [{"context": context, "qas": [question, question]}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_lines(data / ENGLISH, [{"text": words(600, f"novel {n}")} for n in range(3)])
    for name in texts.WIKIPEDIA:
        write(data / name, "".join(f"\n = Title {n} = \n \n {words(60, (name, n))} , <unk> .\n" for n in range(4)))
    for name in texts.GSM8K:
        sums = [{"question": f"{words(6, (name, n))} {n}?", "answer": f"{n} <<1+1=2>>2\n#### {n}"} for n in range(20)]
        write_lines(data / name, sums)
    for part, files in texts.ARC.items():
        for name in files:
            write(data / name, json.dumps([arc((part, name, n)) for n in range(20)]))
    numbers = [*range(11, 21), *range(511, 521), *range(601, 611)]
    tasks = [{"task_id": n, "text": f"Write {words(6, n)}.", "code": function(f"f{n}")} for n in numbers]
    write_lines(data / texts.MBPP, tasks)
    write_lines(data / texts.ALGORITHMS, [{"path": f"m{n}.py", "text": function(f"g{n}") * 3} for n in range(9)])
    write(data / texts.XQUAD, json.dumps({"data": [article(n) for n in range(33)]}))
    answer = [{"start": 0, "end": 4, "string": "x"}]
    question: dict[str, Any] = {"title_text": "Title 40", "question_text": "who", "paragraph_text": words(9, "qed")}
    write_lines(
        data / texts.QED, [question | {"original_nq_answers": [answer]}, question | {"original_nq_answers": []}]
    )
    return data


def test_parts_share_no_question(folder: Path) -> None:
    for domain, parts in texts.read_domains(folder).items():
        prompts = {part: {question.prompt for question in parts[part]} for part in texts.PARTS}
        assert all(prompts.values()), domain
        assert not prompts["train"] & (prompts["validation"] | prompts["test"])
        assert not prompts["validation"] & prompts["test"]
        assert all(q.prompt.endswith("\nAnswer:") and q.answer[0] in " \n" for q in parts["test"])
    science = texts.read_domains(folder)["science"]["test"][0]
    assert len(science.choices) == 4
    assert science.answer == science.choices[2]


def test_evaluation_leaves_out_training_text(folder: Path, tmp_path: Path, tiny_backbone) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_backbone("llama"))
    amounts = texts.QUICK_TEXT_SIZES.model_copy(update={"tested": 50, "chosen": 50})
    known = texts.read_domains(folder)["reading"]["test"][0]
    assert len(known.text.split()) > texts.SHINGLE
    write_lines(tmp_path / "corpus.jsonl", [{"text": f"{words(5, 0)} {known.text.upper()}"}])
    left_out = texts.write_texts(folder, [tmp_path / "corpus.jsonl"], tmp_path, amounts, tokenizer, 2_000)
    assert known not in texts.read_questions(tmp_path, "reading", "test")
    assert left_out["reading"] >= 1
    trained = texts.shingles(
        question.text for domain in texts.DOMAINS for question in texts.read_questions(tmp_path, domain, "train")
    )
    for domain in texts.DOMAINS:
        questions = texts.read_questions(tmp_path, domain, "test")
        assert not trained & texts.shingles(question.text for question in questions)
    assert texts.read_changing(tmp_path, "test")


def test_tokens_until_a_route_switches() -> None:
    code, prose = [0.9, 0.1, 0.0], [0.2, 0.8, 0.0]
    names = ["code", "reading"]
    steady = {"first": 3, "weights": [code] * 3 + [code] * 4 + [prose] * 10, "nats": [1.0] * 2 + [2.0] * 14}
    wavering = {**steady, "weights": [code] * 3 + [prose] * 4 + [code] + [prose] * 9}
    never = {**steady, "weights": [code] * 17}
    assert [runs.switched_after(document, names) for document in (steady, wavering, never)] == [4, 5, 14]
    metrics = runs.document_metrics([steady, wavering, never], names)
    assert metrics["nll_code_half"] == 1
    assert metrics["nll_prose_half"] == 2
    assert metrics["switch_tokens"] == 5
    other = {**steady, "nats": [5.0] * 16}
    assert runs.half_nats([steady], [other])["nll_prose_half"] == 5


def test_peft_methods_mix_the_same_experts(tmp_path: Path, tiny_backbone) -> None:
    folder = str(tiny_backbone("llama"))
    backbone = load_backbone(folder)
    new = {name: {"rank": 2, "targets": ["attention", "ffn"], "texts": [words(9, name)]} for name in texts.DOMAINS}
    graft: Any = build_graft(graft_config({"kind": "token-routing", "experts": new, "temperature": 1e6}), backbone)
    for parameter in graft.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    paths = [graft.write_adapter(name, tmp_path / name) for name in texts.DOMAINS]
    ids = torch.randint(4, 300, (2, 9))
    with torch.inference_mode(), GraftedModel(backbone, {"graft": graft}) as model:
        uniform, bare = model(input_ids=ids).logits, load_backbone(folder).model(input_ids=ids).logits

    xlora = load_xlora(load_backbone(folder), paths)
    trained = [name for name, parameter in xlora.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("internal_xlora_classifier" in name for name in trained)
    for parameter in xlora.base_model.internal_xlora_classifier.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.inference_mode():
        torch.testing.assert_close(xlora(input_ids=ids).logits, uniform, atol=1e-4, rtol=1e-4)
        arrow = load_arrow(load_backbone(folder), paths, seed=0)(input_ids=ids).logits
    assert (arrow - bare).abs().max() > 1e-2


@pytest.mark.exhaustive
def test_quick_run_gives_every_row_and_is_read_back(folder: Path, tmp_path: Path) -> None:
    options = Options(data=folder, out=tmp_path / "out", quick=True, jobs=1)
    results = run.run(options)
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(LABELS)
    for name, metrics in rows.items():
        if name.startswith("cache"):
            assert {"nats_keep", "nats_recompute", "nats_apart", "largest_logit", "changed_tokens"} == metrics.keys()
        elif not name.startswith("switch"):
            assert metrics.keys() >= NLLS | {"arc_accuracy"}
            assert 0 <= value_of(metrics["arc_accuracy"]) <= 1
            routed = name.startswith(("routed", "paper", "prompt", "linear"))
            assert ("routing_accuracy" in metrics) == routed
        else:
            assert {"nll_code_half", "nll_prose_half", "nll_document"} <= metrics.keys()
    for domain in texts.DOMAINS:
        assert rows["oracle"][f"nll_{domain}"] == rows[f"expert_{domain}"][f"nll_{domain}"]
    assert value_of(rows["linear_k2"]["update_error"]) > 0.1
    assert len(results.aims) == 9
    assert {row.id for row in results.paper} == {"base", "oracle", *(f"paper_k{k}" for k in INTERVALS)}
    assert {"log-perplexity.png", "switch.png"} <= {path.name for path in (tmp_path / "out").iterdir()}

    kept = [*(tmp_path / "out" / "runs" / "measurements").glob("*.json")]
    assert kept
    before = {path: path.stat().st_mtime_ns for path in kept}
    again = run.run(options.model_copy(update={"tables": ("1",)}))
    assert {path: path.stat().st_mtime_ns for path in kept} == before, "finished runs are read back"
    assert again.row("routed_k2").metrics == results.row("routed_k2").metrics


@pytest.mark.exhaustive
def test_choices_are_made_on_validation_text(folder: Path, tmp_path: Path) -> None:
    results = run.run(Options(data=folder, out=tmp_path, quick=True, jobs=1, tables=("choices",)))
    rates = run.TRIED_RATES
    assert len(results.rows) == len(run.TRIED_TARGETS) * len(rates["expert"]) + len(rates["xlora"])
    assert all(row.metrics.keys() >= NLLS and "arc_accuracy" not in row.metrics for row in results.rows)


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks lm_text/eltec_eng.jsonl: pass --data"):
        run.run(Options(data=tmp_path, out=tmp_path / "out"))
    with pytest.raises(RecipeError, match="There is no table '2'"):
        run.run(Options(data=folder, out=tmp_path / "out", tables=("2",)))


def test_embedder_comes_from_the_data_folder_or_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out")
    assert Path(run.embedder_folder(options), "config.json").exists(), "the package's"
    (tmp_path / MINI_LM).mkdir(parents=True)
    assert run.embedder_folder(options) == str(tmp_path / MINI_LM)
    (tmp_path / MINI_LM).rmdir()
    missing = {MINI_LM_PACKAGE}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())
    with pytest.raises(DataError, match="The paper's embedder is not in .*: put all-MiniLM-L6-v2 there"):
        run.embedder_folder(options)
    missing.add("sentence_transformers")
    with pytest.raises(MissingExtraError, match="The paper's embedder needs the package sentence-transformers"):
        run.embedder_folder(options)


def test_cache_distance() -> None:
    texts = [([5, 0, 1], 1), ([5, 1], 1)]
    sure, unsure = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 0.0])
    kept, again = [torch.stack([sure, sure]), sure[None]], [torch.stack([sure, unsure]), sure.flip(0)[None]]
    distance = runs.cache_distance(kept, again, texts)
    right, wrong = (-torch.log_softmax(sure, 0)).tolist()
    even = float(torch.tensor(2.0).log())
    assert distance["nats_keep"] == pytest.approx((right + 2 * wrong) / 3)
    assert distance["nats_recompute"] == pytest.approx((right + even + right) / 3)
    assert distance["nats_apart"] == pytest.approx((wrong - even + wrong - right) / 3)
    assert distance["largest_logit"] == 4
    assert distance["changed_tokens"] == pytest.approx(1 / 3)


def test_committed_results_have_the_rows() -> None:
    file = Path(str(run.__file__)).parent
    if not (file / "results.json").exists():
        pytest.skip("no results are committed yet")
    results = Results.read(file)
    assert {row for row in LABELS if not row.startswith("switch")} <= {row.id for row in results.rows}
    assert results.seeds[0] == 0

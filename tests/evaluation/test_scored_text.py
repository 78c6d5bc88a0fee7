"""Every source of a test set is measured, and the report says what was taken of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.backbone import Backbone
from graftlm.data import SourceConfig
from graftlm.evaluation import Results, Row, score
from graftlm.evaluation.cost import prompts_of
from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig, load_tests
from graftlm.evaluation.remarks import remarks
from graftlm.evaluation.report_tables import render_markdown
from graftlm.evaluation.scored_text import first_documents, scored_parts
from graftlm.evaluation.windows import even_shares
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceConfig]:
    danish = tmp_path / "danish"
    danish.mkdir()
    for number in range(3):
        (danish / f"{number}.txt").write_text("Der var engang en konge. " * 20, encoding="utf-8")
    (tmp_path / "slovak.txt").write_text("Kde bolo, tam bolo. " * 60, encoding="utf-8")
    (tmp_path / "short.txt").write_text("Było.", encoding="utf-8")
    return [SourceConfig(path=str(tmp_path / name)) for name in ("danish", "slovak.txt", "short.txt")]


def test_a_limit_takes_as_many_tokens_of_every_source(model: Any, tokenizer: Any, sources: list[SourceConfig]) -> None:
    documents = load_tests({"new": sources})["new"]
    scores = score(model, tokenizer, documents, length=16, limit_tokens=201)
    danish, slovak, short = scored_parts(scores, documents)
    assert danish["tokens"] + slovak["tokens"] + short["tokens"] == 201
    assert abs(danish["tokens"] - slovak["tokens"]) <= 1
    assert short["tokens"] == score(model, tokenizer, ["Było."]).tokens.sum(), "a short source is scored as a whole"
    assert (danish["documents"], danish["of_documents"]) == (1, 3)
    assert scores.document.tolist() == sorted(scores.document.tolist())
    whole = score(model, tokenizer, documents, length=16)
    assert [part["documents"] for part in scored_parts(whole, documents)] == [3, 1, 1]


@given(available=st.lists(st.integers(0, 40), min_size=1, max_size=5), total=st.integers(0, 120))
def test_shares_are_even_up_to_what_there_is(available: list[int], total: int) -> None:
    shares = even_shares(available, total)
    assert sum(shares) == min(total, sum(available))
    assert all(share <= most for share, most in zip(shares, available, strict=True))
    unfilled = [share for share, most in zip(shares, available, strict=True) if share < most]
    if unfilled:
        assert max(shares) <= min(unfilled) + 1


def test_two_parts_of_one_dataset_are_two_sources(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(4)), encoding="utf-8")
    sources = [SourceConfig(path=str(file), documents="0:2"), SourceConfig(path=str(file), documents="2:4")]
    chosen = first_documents(load_tests({"new": sources})["new"], 2)
    assert [[document.text for document in of_source] for of_source in chosen] == [["row 0"], ["row 2"]]


def test_statistics_and_prompts_read_every_source(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    for name, text in (("first.txt", "one " * 30_000), ("second.txt", "two " * 30_000)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    sources = [SourceConfig(path=str(tmp_path / name)) for name in ("first.txt", "second.txt")]
    tests = load_tests({"old": sources})
    prompts = prompts_of(tests["old"], 2)
    assert prompts[0].split()[:1] + prompts[1].split()[-1:] == ["one", "two"]
    backbone = Backbone.wrap(model, tokenizer, "tiny")
    evaluator = BackboneEvaluator(backbone, tests, EvaluationConfig(), 64)
    graft = build_graft(graft_config({"kind": "neutral-residues"}), backbone)
    seen: list[int] = []
    with GraftedModel(backbone, {"graft": graft}) as grafted:
        handle = backbone.model.get_input_embeddings().register_forward_hook(
            lambda _module, inputs, _output: seen.extend(inputs[0].flatten().tolist())
        )
        evaluator.observe(grafted, "old")
        handle.remove()
    text = tokenizer.decode(seen)
    assert min(text.count("one"), text.count("two")) > 400, "of 4,096 tokens, half are of each source"


def test_the_report_says_what_was_scored_of_each_source(
    model: Any, tokenizer: Any, sources: list[SourceConfig]
) -> None:
    backbone = Backbone.wrap(model, tokenizer, "tiny")
    config = EvaluationConfig(limit_tokens=200, decode_prompts=0)
    measured = BackboneEvaluator(backbone, load_tests({"new": sources}), config, 16).measure_backbone()
    results = Results.here(
        "train", [measured.row], details={"scored_text": {"backbone": measured.details["scored_text"]}}
    )
    (remark,) = remarks(results)
    markdown = render_markdown(results)
    assert remark in markdown
    for source in sources:
        assert source.title in remark
        assert f"| new: {source.title} |" in markdown
    whole = [{"source": "a.txt", "tokens": 9, "documents": 2, "of_documents": 2}]
    row = Row(id="backbone", label="backbone", metrics={})
    assert not remarks(Results.here("train", [row], details={"scored_text": {"backbone": {"new": whole}}}))

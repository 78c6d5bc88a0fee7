"""Routing on a chat model, at its smallest: texts, X-LoRA's mixture with a cache, likelihoods of choices, every row."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from experiments import Options
from experiments.routing_smollm2 import texts
from experiments.routing_smollm2.classifiers import CLASSIFIERS, classifier_rows, form
from experiments.routing_smollm2.fields import read_fields
from experiments.routing_smollm2.programs import ALLOW, passes
from experiments.routing_smollm2.run import MORE, ROWS, TWENTY
from experiments.routing_smollm2.runs import ROUTER, AnswerRun, read_choices
from experiments.token_routing.runs import RoutingSizes, load_xlora
from experiments.token_routing.texts import DOMAINS, PARTS, RoutingQuestion, read_questions
from graftlm.backbone import load_backbone
from graftlm.errors import EvaluationError
from graftlm.evaluation import Interval, value_of
from graftlm.evaluation.examples import Example, score_answers
from graftlm.runs.run import RunContext
from routing_data import write_data, write_lines
from token_routing.tools import write_adapters

run = import_module("experiments.routing_smollm2.run")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_parts_share_no_question_and_choices_differ(data: Path) -> None:
    for domain, parts in texts.read_skills(data).items():
        assert set(parts) == set(PARTS)
        for part in PARTS:
            for each in texts.with_choices(domain, parts[part]):
                assert each.choices[0] == each.answer
                assert 2 <= len(set(each.choices)) == len(each.choices) <= 1 + texts.WRONG


class Words:
    """A tokenizer of words."""

    def __call__(self, items: list[str], **_: Any) -> dict[str, list[list[str]]]:
        return {"input_ids": [text.split() for text in items]}


def test_seeds_have_fresh_questions_that_training_lacks(data: Path, tmp_path: Path) -> None:
    counts = {"train": 9, "validation": 3, "test": 4}
    longest = {"prompt": 60, "answer": 40, "program": 40}
    texts.write_skills(texts.read_skills(data), tmp_path, Words(), counts, (0, 1), longest)
    for domain in DOMAINS:
        questions = {
            part: {texts.normalised(each.prompt) for each in read_questions(tmp_path, domain, part)}
            for part in ("train", "validation", "test0", "test1")
        }
        assert len(questions["test0"]) == len(questions["test1"]) == 4
        names = list(questions)
        assert not any(questions[a] & questions[b] for n, a in enumerate(names) for b in names[:n])


def test_a_test_question_that_validation_has_is_left_out(data: Path, tmp_path: Path) -> None:
    parts = texts.read_skills(data)["math"]
    skills = {"math": parts | {"validation": parts["test"][:9]}}
    counts = {"train": 9, "validation": 9, "test": 40}
    texts.write_skills(skills, tmp_path, Words(), counts, (0,), {"prompt": 60, "answer": 40, "program": 40})
    chosen, tested = (
        {texts.normalised(each.prompt) for each in read_questions(tmp_path, "math", part)}
        for part in ("validation", "test0")
    )
    assert chosen
    assert tested
    assert not chosen & tested


@pytest.mark.slow
def test_real_parts_share_no_question_and_reading_no_passage(data_dir: Path, tmp_path: Path) -> None:
    longest = {"prompt": 90, "answer": 12, "program": 60}
    counts = {"train": 50, "validation": 16, "test": 12}
    skills = texts.read_skills(data_dir)
    texts.write_skills(skills | read_fields(data_dir), tmp_path, Words(), counts, (0, 1), longest)
    for file in tmp_path.glob("*-train.jsonl"):
        domain = file.name.removesuffix("-train.jsonl")
        parts = {part: read_questions(tmp_path, domain, part) for part in ("train", "validation", "test0", "test1")}
        asked = [{texts.normalised(each.prompt) for each in of_part} for of_part in parts.values()]
        assert sum(map(len, asked)) == len(set.union(*asked)) == sum(map(len, parts.values()))
        passages = {part: {e.prompt.partition("\n")[0] for e in of_part} for part, of_part in parts.items()}
        assert not passages["train"] & (passages["validation"] | passages["test0"] | passages["test1"])
        assert not passages["validation"] & (passages["test0"] | passages["test1"])


def test_labels_of_twenty_are_fields_and_parts_share_no_first_line(data: Path) -> None:
    fields = read_fields(data)
    assert len(fields) == 20
    assert all("Answer:" in each.prompt for each in fields["math_division"]["test"])
    for parts in fields.values():
        lines = {part: {texts.normalised(e.prompt.partition("\n")[0]) for e in parts[part]} for part in PARTS}
        assert not lines["train"] & (lines["validation"] | lines["test"])
        assert not lines["validation"] & lines["test"]


def test_the_form_of_a_prompt_has_none_of_its_content() -> None:
    assert form("The red fox saw 12 hens.\nAnswer:") == form("The big cat ate 7 fish.\nAnswer:")
    assert form("The red fox saw 12 hens.") != form("The red fox: 12 hens.")


def test_classifiers_find_domains_by_words_and_not_by_form_where_all_have_one(tmp_path: Path) -> None:
    for domain, word in {"a": "red", "b": "blue"}.items():
        for part in ("train", "test0"):
            lines = [{"prompt": f"{word} stone {n}", "answer": "x", "choices": [], "tests": ""} for n in range(9)]
            write_lines(tmp_path / f"{domain}-{part}.jsonl", lines)
    rows = classifier_rows(tmp_path, ("a", "b"), (0,))
    shares = {row.id: value_of(row.metrics["routing_accuracy"]) for row in rows}
    assert shares == pytest.approx({"bag_of_words": 100, "form_classifier": 50})


def test_likelihoods_of_choices_are_those_of_whole_texts(tiny_backbone) -> None:
    host = load_backbone(str(tiny_backbone("llama")))
    questions = [
        RoutingQuestion("The quick brown fox\nAnswer:", " jumps\n", (" jumps\n", " over the lazy dog\n", " fox\n")),
        RoutingQuestion("Fox\nAnswer:", " the dog\n", (" the dog\n", " over\n")),
    ]
    actual = read_choices(host.model, None, host, questions)
    for number, each in enumerate(questions):
        examples = [Example(each.prompt, choice) for choice in each.choices]
        scores = score_answers(host.model, host.tokenizer, examples)
        assert actual["nll"][number] == pytest.approx(scores.nats[0] / scores.tokens[0], abs=1e-3)
        assert actual["chosen"][number] == int((scores.nats / scores.bytes).argmin() == 0)


def test_x_lora_with_a_cache_is_pefts(tiny_backbone, tmp_path: Path) -> None:
    chosen = {"a": {"r": 2, "target_modules": ["q_proj"]}, "b": {"r": 3, "target_modules": ["q_proj", "down_proj"]}}
    folders = write_adapters("llama", tmp_path / "adapters", chosen)
    name = str(tiny_backbone("llama"))
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    peft = load_xlora(load_backbone(name), list(folders.values())).eval()
    router = peft.base_model.internal_xlora_classifier.layers[-1]
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    (tmp_path / "router").mkdir()
    save_file({key: value.detach() for key, value in router.named_parameters()}, tmp_path / "router" / ROUTER)
    answers = AnswerRun(
        id="x", backbone=name, texts="", sizes=RoutingSizes(), domains=tuple(folders), mixture_kind="xlora"
    )
    dependencies = {key: Path(value) for key, value in folders.items()} | {"router": tmp_path / "router"}
    with torch.no_grad(), answers.open_model(RunContext(tmp_path, "", dependencies)) as (model, _, _):
        first = model(ids[:, :4], use_cache=True)
        later = model(ids[:, 4:], past_key_values=first.past_key_values, use_cache=True).logits
        torch.testing.assert_close(torch.cat([first.logits, later], 1), peft(ids).logits, rtol=1e-3, atol=1e-3)


TESTS = "assert double(4) == 8"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def double(x):\n    return 2 * x", True),
        ("def double(x):\n    return x", False),
        ("import sys\nsys.exit(0)", False),
        ("memory = bytearray(2**30)\ndef double(x):\n    return 2 * x", False),
        ("while True:\n    pass", False),
    ],
)
def test_a_program_passes_only_if_its_tests_do(program: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW, "1")
    monkeypatch.setattr("experiments.routing_smollm2.programs.TIMEOUT_S", 1 if "while" in program else 3)
    assert passes(program, TESTS) is expected


def test_programs_need_consent_before_anything_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    with pytest.raises(EvaluationError, match=ALLOW):
        passes("", "")
    with pytest.raises(EvaluationError, match=ALLOW):
        run.run(Options(data=data, out=tmp_path / "out", quick=True, jobs=1, backbone="no-such-model"))


@pytest.mark.slow
def test_a_quick_run_has_every_row(data: Path, tmp_path: Path, tiny_backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW, "1")
    options = Options(data=data, out=tmp_path / "out", quick=True, jobs=1, backbone=str(tiny_backbone("llama")))
    results = run.run(options)
    of_twenty = [f"twenty_{row}" for row in (*TWENTY, *CLASSIFIERS)]
    assert [row.id for row in results.rows] == [*ROWS, *MORE, *CLASSIFIERS, *of_twenty]
    assert {"nll_average", "routing_accuracy"} <= results.row("twenty_routed_k2").metrics.keys()
    assert isinstance(results.row("routed_k2").metrics["routing_accuracy"], Interval)
    assert {"accuracy", "likelihood_accuracy", "nll_average"} <= results.row("xlora").metrics.keys()
    assert {len(tried) for tried in results.details["search"].values()} == {2}, "equal searches"
    assert results.details["by_seed"].keys() == {*ROWS, *MORE}
    assert len(results.aims) == 12

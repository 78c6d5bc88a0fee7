"""The harness runs a task of the user's own on a live model, offline."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import EvaluationError, MissingExtraError
from graftlm.evaluation import harness, run_lm_eval
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.store.artifact import save_graft
from graftlm.testing import randomise
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from tokenizers_by_kind import KINDS

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["cat", "dog"]
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"question {i}:", "answer": i % 2} for i in range(6)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "tiny_choice.yaml").write_text(TASK.format(data=data))
    return folder


def test_a_local_task_gives_its_metrics(tasks: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    metrics = run_lm_eval(model, tokenizer, ["tiny_choice"], include_path=tasks, limit=4, batch_size=2)
    assert 0 <= metrics["tiny_choice"]["acc"] <= 1
    assert "acc_stderr" in metrics["tiny_choice"]
    assert metrics == run_lm_eval(model, tokenizer, ["tiny_choice"], include_path=tasks, limit=4, batch_size=3)


def test_a_grafted_model_answers_with_its_graft(tasks: Path) -> None:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    graft = build_graft(graft_config({"kind": "neutral-residues", "width": 16}), backbone)
    with torch.no_grad():
        for tensor in graft.parameters():
            tensor.normal_(0, 0.5)
    bare = [chosen(backbone.model, i) for i in range(6)]
    with GraftedModel(backbone, {"graft": graft}) as model:
        metrics = run_lm_eval(model, tiny_tokenizer(), ["tiny_choice"], include_path=tasks)
        mine = [chosen(model, i) for i in range(6)]
    assert mine != bare, "the graft must change an answer for this test to mean anything"
    assert metrics["tiny_choice"]["acc"] == pytest.approx(sum(mine[i] == i % 2 for i in range(6)) / 6)


@pytest.mark.parametrize("kind", ["byte-level", "prefix blank", "word pieces"])
@pytest.mark.parametrize("grafted", [False, True])
def test_a_token_over_the_end_of_a_context_loses_no_text(kind: str, grafted: bool) -> None:
    tokenizer = KINDS[kind]()
    model = tiny_model("llama", vocab_size=512)
    host = GraftedModel(Backbone.wrap(model, tokenizer)) if grafted else model
    adapter: Any = harness.harness_model(host, tokenizer, 2)
    pairs = [
        ("the sailors sail un", "happily"),
        ("keeper:", " Oda"),
        ("4, 6, ", "8"),
        ("the", " boats "),
        ("def f", "or"),
    ]
    for context, continuation in pairs:
        before, after = adapter._encode_pair(context, continuation)
        whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        assert after, "a continuation without tokens would end the run"
        assert tokenizer.decode(before + after) == tokenizer.decode(whole)
        if whole[: len(before)] == before:
            assert before + after == whole


@pytest.mark.slow
def test_the_harness_knows_a_graft_by_its_folder(tasks: Path, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import_module("graftlm.evaluation.lm_eval_model")  # registers the name

    tiny_model("llama").save_pretrained(tmp_path / "backbone")
    tiny_tokenizer().save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(tmp_path / "backbone")
    graft = build_graft(graft_config({"kind": "neutral-residues", "width": 16}), backbone)
    with torch.no_grad():
        for tensor in graft.parameters():
            tensor.normal_(0, 0.5)
    save_graft(graft, backbone, tmp_path / "graft")
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = run_lm_eval(model, tiny_tokenizer(), ["tiny_choice"], include_path=tasks)
        mine = [chosen(model, i) for i in range(6)]
    output: Any = lm_eval.simple_evaluate(
        model="graftlm",
        model_args={"graft": str(tmp_path / "graft"), "device": "cpu"},
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert output["results"]["tiny_choice"]["acc,none"] == expected["tiny_choice"]["acc"]
    assert expected["tiny_choice"]["acc"] == pytest.approx(sum(mine[i] == i % 2 for i in range(6)) / 6)


def test_an_answer_is_scored_by_the_routes_that_write_it() -> None:
    from graftlm.evaluation.lm_eval_model import GraftedHFLM

    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    experts = {
        "english": {"rank": 4, "targets": ["attention", "ffn"], "texts": ["The quick brown fox"]},
        "code": {"rank": 4, "targets": ["ffn"], "texts": ["def forward(self): return self.down(x)"]},
    }
    graft = build_graft(graft_config({"kind": "token-routing", "experts": experts, "every": 2}), backbone)
    with GraftedModel(backbone, {"graft": graft}).eval() as model:
        randomise(model, 0.3)
        harness_model = GraftedHFLM(model, batch_size=3, max_length=24)
        requests, expected = [], []
        for length in (7, 12, 5, 12):
            ids = tiny_ids(1, length, seed=length + len(requests))
            output = model.generate(
                ids,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            answer = output.sequences[0, length:].tolist()
            log_p = torch.stack(output.logits, 1)[0].log_softmax(-1)
            expected.append(log_p[torch.arange(6), answer].sum().item())
            requests.append((("", str(len(requests))), ids[0].tolist(), answer))
        scores = [score for score, _ in harness_model._loglikelihood_tokens(requests, disable_tqdm=True)]
        # A context of which only the end is read has the scores of that end.
        context, answer = requests[1][1:]
        long, short = [
            harness_model._loglikelihood_tokens([(("", key), tokens, answer)], disable_tqdm=True)[0][0]
            for key, tokens in (("long", [7] * 30 + context + [9] * 8), ("short", ([7] * 30 + context + [9] * 8)[-19:]))
        ]
        causal = model(torch.tensor([requests[0][1] + requests[0][2]])).logits[0, 6:12].log_softmax(-1)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert long == pytest.approx(short, abs=1e-4)
    assert abs(causal[torch.arange(6), requests[0][2]].sum().item() - expected[0]) > 1e-2, (
        "the prompt makes no difference"
    )


def chosen(model: Any, question: int) -> int:
    """The likelier of both choices, by the full pass over each."""
    tokenizer = tiny_tokenizer()
    context = tokenizer(f"question {question}:", add_special_tokens=False)["input_ids"]
    scores = []
    for choice in (" cat", " dog"):
        ids = tokenizer(f"question {question}:{choice}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        scores.append(sum(log_p[t - 1, ids[t]].item() for t in range(len(context), len(ids))))
    return scores.index(max(scores))


def test_an_unknown_task_is_named() -> None:
    known = ["arc_challenge", "hellaswag"]  # reading the harness's own index takes seconds
    with pytest.raises(EvaluationError) as caught:
        harness.check_task_names(["arc_challenge", "helaswag"], known)
    assert "hellaswag" in str(caught.value)
    with pytest.raises(EvaluationError) as caught:
        harness.check_task_names(["xyz"], known)
    assert "xyz" in str(caught.value)
    with pytest.raises(EvaluationError):
        harness.check_task_names([], known)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *_: Any) -> Any:
        raise ModuleNotFoundError(name=name.split(".")[0])

    monkeypatch.setattr("graftlm.files.extras.import_module", absent)
    with pytest.raises(MissingExtraError) as caught:
        run_lm_eval(tiny_model("llama"), tiny_tokenizer(), ["hellaswag"])
    assert "graftlm[harness]" in str(caught.value)

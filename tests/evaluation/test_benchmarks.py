"""Tasks of lm-evaluation-harness from local files are scored as the harness scores them, and compared item by item."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import benchmark_files as files
from graftlm.backbone import Backbone
from graftlm.errors import DataError, EvaluationError, GraftError, RecipeError
from graftlm.evaluation import harness
from graftlm.evaluation.benchmarks import (
    Benchmark,
    BenchmarkResult,
    HarnessTaskConfig,
    load_benchmarks,
    measure_benchmarks,
    preset_tasks,
)
from graftlm.evaluation.benchmarks.ifeval import offline_checker
from graftlm.evaluation.benchmarks.loading import choose_items
from graftlm.evaluation.benchmarks.local_files import read_local_tasks
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_model, tiny_tokenizer

ANSWERS = 200
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)

_YAML = """
include: {include}
task: {task}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{measured: "{data}"}}, cache_dir: "{cache}"}}
training_split: null
validation_split: null
test_split: measured
fewshot_split: null
"""


@contextmanager
def mistake(kind: Any, named: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a type that names something."""
    with pytest.raises(kind) as caught:
        yield caught
    assert named in str(caught.value)


def config(task: str, data: Path, **keys: Any) -> HarnessTaskConfig:
    return HarnessTaskConfig(task=task, data=str(data), **keys)


def load(task: str, data: Path, **keys: Any) -> Benchmark:
    """A benchmark whose answers are short, since tiny models have few positions."""
    (benchmark,) = load_benchmarks([config(task, data, **{"max_tokens": 8, **keys})])
    return benchmark


def prompts_of(benchmark: Benchmark, model: Any = None, tokenizer: Any = None) -> list[str]:
    """The prompts that a model gets, in the order of the items."""
    result = measure_benchmarks(model or tiny_model("llama"), tokenizer or tiny_tokenizer(), [benchmark])
    assert result
    return [instance.args[0] for chosen in benchmark.tasks for instance in chosen.task.instances]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], None]:
    """Let every model give these answers, in the order of the items."""

    def give(answers: Sequence[str]) -> None:
        def continue_rows(_model: Any, _tokenizer: Any, rows: Sequence[Any], *_: Any, **__: Any) -> list[str]:
            assert len(rows) == len(answers)
            return list(answers)

        monkeypatch.setattr("graftlm.evaluation.benchmarks.measuring.continue_rows", continue_rows)

    return give


def stock_scores(task: str, rows: Sequence[dict[str, Any]], answers: Sequence[str], metric: str, folder: Path) -> list:
    """The values that lm-evaluation-harness itself gives to answers, with its own task, loader and evaluation."""
    import lm_eval.tasks
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    class Answering(LM):
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return list(answers)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

    data = files.write_lines(folder / "rows.jsonl", rows)
    include = Path(lm_eval.tasks.__file__).parent / task / f"{task}.yaml"
    (folder / "tasks").mkdir()
    text = _YAML.format(include=include, task=f"own_{task}", data=data, cache=folder / "cache")
    (folder / "tasks" / "own.yaml").write_text(text)
    with offline_checker(), harness.quiet_harness():
        manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
        output: Any = simple_evaluate(Answering(), tasks=[f"own_{task}"], task_manager=manager, bootstrap_iters=0)
    samples = sorted(output["samples"][f"own_{task}"], key=lambda sample: sample["doc_id"])
    return [float(sample[metric]) for sample in samples]


def test_ifeval_gives_each_of_200_answers_the_score_of_the_harness(tmp_path: Path, answering: Any) -> None:
    rows = [files.ifeval_row(number) for number in range(ANSWERS)]
    answers = [files.ifeval_answer(number) for number in range(ANSWERS)]
    answering(answers)
    data = files.write_lines(tmp_path / "input_data.jsonl", rows)
    result = measure_benchmarks(tiny_model("llama"), tiny_tokenizer(), [load("ifeval", data)])["ifeval"]
    expected = stock_scores("ifeval", rows, answers, "prompt_level_strict_acc", tmp_path)
    assert result.values == expected
    assert 20 < sum(expected) < 180, "both right and wrong answers"


def test_nq_open_gives_each_of_200_answers_the_score_of_the_harness(tmp_path: Path, answering: Any) -> None:
    rows = [files.nq_row(number) for number in range(ANSWERS)]
    answers = [files.nq_answer(number) for number in range(ANSWERS)]
    answering(answers)
    data = files.write_lines(tmp_path / "dev.jsonl", rows)
    result = measure_benchmarks(tiny_model("llama"), tiny_tokenizer(), [load("nq_open", data)])["nq_open"]
    expected = stock_scores("nq_open", rows, answers, "exact_match", tmp_path)
    assert result.values == expected
    assert 20 < sum(expected) < 180, "both right and wrong answers"


@pytest.fixture(scope="module")
def real_data() -> Path:
    import os

    root = os.environ.get("GRAFTLM_DATA")
    if root is None or not (Path(root) / "eval/ifeval").is_dir():
        pytest.skip("GRAFTLM_DATA has no benchmarks")
    return Path(root)


def test_real_prompts_of_ifeval_are_scored_as_by_the_harness(real_data: Path, tmp_path: Path, answering: Any) -> None:
    benchmark = load("ifeval", real_data / "eval", limit=ANSWERS, seed=3)
    assert benchmark.left_out > 100
    rows = [dict(row) for row in benchmark.tasks[0].task.eval_docs]
    answers = [_compliant(row, number) for number, row in enumerate(rows)]
    answering(answers)
    result = measure_benchmarks(tiny_model("llama"), tiny_tokenizer(), [benchmark])["ifeval"]
    expected = stock_scores("ifeval", rows, answers, "prompt_level_strict_acc", tmp_path)
    assert result.values == expected
    assert 20 < sum(expected) < 180, "both right and wrong answers"


def _compliant(row: dict[str, Any], number: int) -> str:
    """An answer that follows the simpler instructions of a real prompt, or none of them."""
    if number % 5 == 0:
        return "No, thank you"
    words = []
    for keys in row["kwargs"]:
        for name, value in keys.items():
            if name in ("keywords", "keyword", "end_phrase", "postscript_marker") and value:
                words += value if isinstance(value, list) else [value]
    text = " ".join(["<<Title>>", "*one*", "*two*", "*three*", "[x]", "[y]", "[z]", "word " * 60, *words])
    return text.replace(",", "") if number % 2 else text


def test_answers_to_real_questions_of_nq_open_score_as_by_the_harness(
    real_data: Path, tmp_path: Path, answering: Any
) -> None:
    benchmark = load("nq_open", real_data / "eval", limit=ANSWERS, seed=3)
    rows = [dict(row) for row in benchmark.tasks[0].task.eval_docs]
    spellings: list[Callable[[str], str]] = [
        lambda text: text,
        lambda text: f" The {text}!",
        str.upper,
        lambda text: f"a {text}",
        lambda text: text[1:],
        lambda text: text.replace(" ", "  "),
    ]
    answers = [spellings[number % 6](row["answer"][-1]) for number, row in enumerate(rows)]
    answering(answers)
    result = measure_benchmarks(tiny_model("llama"), tiny_tokenizer(), [benchmark])["nq_open"]
    expected = stock_scores("nq_open", rows, answers, "exact_match", tmp_path)
    assert result.values == expected
    assert 20 < sum(expected) < 180, "both right and wrong answers"


def test_every_real_file_is_read(real_data: Path) -> None:
    tasks = ("bbh_zeroshot", "bbh_fewshot", "bbh", "mgsm_direct", "mgsm_native_cot_de", "xcopa", "nq_open", "ifeval")
    configs = [config(task, real_data / "eval", limit=54) for task in tasks]
    science = real_data / "routing/science"
    configs += [config(task, science, limit=5) for task in ("arc_easy", "arc_challenge", "openbookqa")]
    configs += [config("gsm8k", real_data / "routing/math", limit=5)]
    loaded = load_benchmarks(configs)
    counts = {benchmark.label: sum(len(chosen.items) for chosen in benchmark.tasks) for benchmark in loaded}
    assert counts == {
        **dict.fromkeys(tasks, 54),
        "arc_easy": 5,
        "arc_challenge": 5,
        "openbookqa": 5,
        "gsm8k": 5,
    }
    assert len(loaded[0].tasks) == 27


def test_prompts_with_a_language_detector_are_left_out_and_counted(tmp_path: Path) -> None:
    benchmark = load("ifeval", files.write_ifeval(tmp_path, 5).parent)
    assert benchmark.left_out == 1
    prompts = prompts_of(benchmark)
    assert len(prompts) == 5
    assert not any("lower case" in prompt for prompt in prompts)


def test_ifeval_is_asked_in_the_chat_template_and_other_tasks_are_not(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    files.write_retention(tmp_path)
    asked = prompts_of(load("ifeval", tmp_path), tokenizer=tokenizer)
    assert all(prompt.startswith("[user]") and prompt.endswith("[a]") for prompt in asked)
    assert not any("[user]" in prompt for prompt in prompts_of(load("nq_open", tmp_path), tokenizer=tokenizer))
    asked = prompts_of(load("nq_open", tmp_path, chat=True), tokenizer=tokenizer)
    assert all("[user]" in prompt for prompt in asked)
    assert not any(
        "[user]" in prompt for prompt in prompts_of(load("ifeval", tmp_path, chat=False), tokenizer=tokenizer)
    )
    with mistake(DataError, "chat"):
        prompts_of(load("nq_open", tmp_path, chat=True))


def test_solved_examples_are_not_measured_and_are_the_same_for_every_model(tmp_path: Path) -> None:
    files.write_nq_open(tmp_path, 12)
    benchmark = load("nq_open", tmp_path, shots=3, limit=4, seed=1)
    first = prompts_of(benchmark)
    assert first == prompts_of(benchmark, tiny_model("gpt2"))
    measured = {row["question"] for row in benchmark.tasks[0].task.eval_docs}
    assert len(measured) == 4
    for prompt in first:
        *shown, asked = prompt.removeprefix("Answer these questions:\n\n").split("\nQ: ")
        shown = [each.split("?\n")[0].removeprefix("Q: ") for each in shown]
        assert asked.split("?\n")[0] in measured
        assert len(set(shown)) == 3
        assert measured.isdisjoint(shown)


def test_items_are_equal_shares_of_tasks_and_a_seed_draws_them() -> None:
    assert choose_items([5, 3], None, None) == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert choose_items([5, 3, 9], 7, None) == [[0, 1, 2], [0, 1], [0, 1]]
    assert choose_items([2, 9], 8, None) == [[0, 1], [0, 1, 2, 3]]
    drawn = choose_items([100], 10, 7)
    assert drawn == choose_items([100], 10, 7)
    assert drawn != choose_items([100], 10, 8)
    assert len(set(drawn[0])) == 10


def test_the_data_of_a_group_is_one_file_for_each_task(tmp_path: Path) -> None:
    files.write_bbh(tmp_path)
    benchmark = load("bbh_zeroshot", tmp_path, limit=4)
    assert [chosen.task.config.task for chosen in benchmark.tasks] == ["bbh_zeroshot_navigate", "bbh_zeroshot_snarks"]
    assert [len(chosen.items) for chosen in benchmark.tasks] == [2, 2]
    assert len(load("bbh_zeroshot_snarks", tmp_path).tasks[0].items) == 6


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [("(B)", True), ("I think it is (B).", True), (" a broken cat", True), ("(A)", False), ("neither", False)],
)
def test_bbh_is_scored_by_the_extracted_choice(tmp_path: Path, answering: Any, answer: str, is_right: bool) -> None:
    answering([answer])
    files.write_bbh(tmp_path)
    benchmark = load("bbh_zeroshot_snarks", tmp_path, limit=1)
    (result,) = measure_benchmarks(tiny_model("llama"), tiny_tokenizer(), [benchmark]).values()
    assert result.values == [float(is_right)]
    assert result.metric == "exact_match, flexible-extract"


def test_other_forms_are_read(tmp_path: Path) -> None:
    mgsm = tmp_path / "mgsm_de.tsv"
    mgsm.write_text('Wie viele "Eier"?\t1,234\nUnd jetzt?\t-5\n', encoding="utf-8")
    (local,) = read_local_tasks("mgsm_direct_de", str(mgsm))
    assert [(row["question"], row["answer_number"]) for row in local.rows] == [
        ('Wie viele "Eier"?', 1234),
        ("Und jetzt?", -5),
    ]
    xcopa = {"premise": "A.", "choice1": "B.", "choice2": "C.", "question": "cause", "label": 1}
    files.write_lines(tmp_path / "test.et.jsonl", [xcopa, xcopa | {"label": 0}])
    files.write_lines(tmp_path / "val.et.jsonl", [xcopa | {"premise": "V."}])
    (local,) = read_local_tasks("xcopa", str(tmp_path))
    assert (len(local.rows), local.shots[0]["premise"]) == (2, "V.")
    files.write_lines(tmp_path / "gsm8k" / "test.jsonl", [{"question": "1+1?", "answer": "#### 2"}] * 2)
    files.write_arc(tmp_path, 3)
    loaded = load_benchmarks(
        [
            config("mgsm_direct_de", mgsm),
            config("xcopa_et", tmp_path, shots=1),
            config("gsm8k", tmp_path, shots=1, limit=1, max_tokens=8),
            config("arc_easy", tmp_path, shots=3),
        ]
    )
    results = measure_benchmarks(tiny_model("llama", max_position_embeddings=512), tiny_tokenizer(), loaded)
    assert {label: len(result.values) for label, result in results.items()} == {
        "mgsm_direct_de": 2,
        "xcopa_et": 2,
        "gsm8k": 1,
        "arc_easy": 3,
    }
    question = read_local_tasks("arc_easy", str(tmp_path))[0].rows[1]
    assert question["question"] == "What floats: 1?"
    assert question["choices"]["text"] == ["river", "a very long lamp", "stone", "none"]
    assert question["answerKey"] == "B"


def test_cloze_scores_the_texts_of_answers_by_their_length(tmp_path: Path) -> None:
    files.write_arc(tmp_path, 6, "arc_challenge")
    stock = load("arc_challenge_chat", tmp_path)
    assert stock.tasks[0].task.OUTPUT_TYPE == "generate_until", "the harness asks for a letter"
    model = tiny_model("llama", max_position_embeddings=256)
    benchmark = load("arc_challenge_chat", tmp_path, cloze=True)
    result = measure_benchmarks(model, tiny_tokenizer(), [benchmark])["arc_challenge_chat_cloze"]
    assert result.metric == "acc_norm"
    expected = []
    for row in benchmark.tasks[0].task.eval_docs:
        texts = row["choices"]["text"]
        scores = [_log_p(model, f"Question: {row['question']}\nAnswer:", f" {text}") / len(text) for text in texts]
        expected.append(float(np.argmax(scores) == "ABCD".index(row["answerKey"])))
    assert result.values == expected
    assert 0 < sum(expected) < 6, "some answers are right"


def _log_p(model: Any, context: str, continuation: str) -> float:
    tokenizer = tiny_tokenizer()
    before = tokenizer(context, add_special_tokens=False)["input_ids"]
    ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(log_p[t - 1, ids[t]].item() for t in range(len(before), len(ids)))


def test_the_package_generates_what_the_harness_generates(tmp_path: Path) -> None:
    files.write_nq_open(tmp_path, 7)
    benchmark = load("nq_open", tmp_path, max_tokens=12)
    model = tiny_model("llama", max_position_embeddings=256)
    measure_benchmarks(model, tiny_tokenizer(), [benchmark], batch_size=3)
    task = benchmark.tasks[0].task
    mine = [instance.resps[0] for instance in task.instances]
    with harness.quiet_harness():
        theirs = harness.harness_model(model, tiny_tokenizer(), 2).generate_until(task.instances, disable_tqdm=True)
    assert mine == theirs
    assert len(set(mine)) > 1


def test_an_evaluator_measures_before_and_after(tmp_path: Path) -> None:
    from graftlm.evaluation.evaluator import BackboneEvaluator

    files.write_arc(tmp_path, 8)
    backbone = Backbone.wrap(tiny_model("llama", max_position_embeddings=256), tiny_tokenizer())
    settings = EvaluationConfig(decode_prompts=0, own_tokens=0, harness=[config("arc_easy", tmp_path)])
    evaluator = BackboneEvaluator(backbone, {}, settings, 16)
    bare = evaluator.measure_backbone()
    graft = build_graft(graft_config({"kind": "neutral-residues", "width": 16}), backbone)
    with torch.no_grad():
        for tensor in graft.parameters():
            tensor.normal_(0, 0.5)
    with GraftedModel(backbone, {"graft": graft}) as model:
        grafted = evaluator.measure(model, "graft", "graft")
    before = np.array(bare.details["harness"]["arc_easy"]["values"])
    after = np.array(grafted.details["harness"]["arc_easy"]["values"])
    assert (before != after).any(), "the graft must change an answer for this test to mean anything"
    assert grafted.row.metrics["arc_easy"].mean == pytest.approx(after.mean())  # type: ignore[union-attr]
    assert grafted.row.metrics["arc_easy_change"].mean == pytest.approx((after - before).mean())  # type: ignore[union-attr]


def test_the_preset_reads_the_folder_or_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFTLM_EVAL_DATA", raising=False)
    assert preset_tasks(None, None) == []
    assert {task.label: task.data for task in preset_tasks("retention", None)} == dict.fromkeys(
        ("ifeval", "bbh", "nq_open")
    )
    files.write_retention(tmp_path)
    named = preset_tasks("retention", str(tmp_path))
    assert [task.data for task in named] == [str(tmp_path / name) for name in ("ifeval", "bbh", "nq_open")]
    monkeypatch.setenv("GRAFTLM_EVAL_DATA", str(tmp_path))
    assert preset_tasks("retention", None) == named
    sizes = {benchmark.label: sum(len(task.items) for task in benchmark.tasks) for benchmark in load_benchmarks(named)}
    assert sizes == {"ifeval": 12, "bbh": 12, "nq_open": 15}, "nq_open keeps rows for its five shots"
    with mistake(DataError, "nowhere"):
        preset_tasks("retention", str(tmp_path / "nowhere"))


def test_a_task_twice_a_limit_of_0_and_taken_names_are_mistakes(tmp_path: Path) -> None:
    twice: list[Any] = [{"task": "nq_open"}, {"task": "nq_open", "shots": 5}]
    with mistake(RecipeError, "nq_open"):
        EvaluationConfig.parse({"harness": twice})
    twice[1]["name"] = "nq_five"
    assert [task.label for task in EvaluationConfig.parse({"harness": twice}).benchmarks()] == ["nq_open", "nq_five"]
    for wrong in ({"limit": 0}, {"shots": -1}, {"name": "learned"}, {"name": "a b"}, {"shotss": 3}):
        key = next(iter(wrong))
        with mistake(RecipeError, key):
            HarnessTaskConfig.parse({"task": "nq_open"} | wrong)
    files.write_retention(tmp_path)
    both = EvaluationConfig.parse({"harness": [{"task": "ifeval"}], "preset": "retention", "eval_data": str(tmp_path)})
    with mistake(EvaluationError, "ifeval"):
        both.benchmarks()


def test_more_shots_than_examples_are_a_mistake(tmp_path: Path) -> None:
    files.write_nq_open(tmp_path, 6)
    assert len(load("nq_open", tmp_path, shots=5).tasks[0].items) == 1
    with mistake(EvaluationError, "6 shots"):
        load("nq_open", tmp_path, shots=6, limit=4)
    files.write_arc(tmp_path)
    with mistake(EvaluationError, "4 shots"):
        load("arc_easy", tmp_path, shots=4)


def _broken(folder: Path) -> Iterator[tuple[str, Path, str]]:
    yield "nq_open", folder / "absent", "absent"
    yield "nq_open", files.write_lines(folder / "a.jsonl", [{"question": "x"}]), "answer"
    empty = folder / "empty.jsonl"
    empty.write_text("")
    yield "nq_open", empty, "no rows"
    text = folder / "text.jsonl"
    text.write_text("{broken\n")
    yield "ifeval", text, "Line 1"
    yield "ifeval", files.write_lines(folder / "i.jsonl", [files.ifeval_row(0) | {"kwargs": "none"}]), "kwargs"
    binary = folder / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    yield "gsm8k", binary, "UTF-8"
    yield "bbh_zeroshot_snarks", files.write_json(folder / "b.json", {"rows": []}), "examples"
    yield "bbh_zeroshot", files.write_json(folder / "c.json", {"examples": []}), "group"
    (folder / "nothing").mkdir()
    yield "bbh_zeroshot", folder / "nothing", "json"
    yield "arc_easy", files.write_json(folder / "d.json", [files.choice_row(0) | {"answer": "answer9"}]), "question 1"
    tsv = folder / "mgsm_de.tsv"
    tsv.write_text("Wie viele?\tviele\n", encoding="utf-8")
    yield "mgsm_direct_de", tsv, "Line 1"
    yield "hellaswag", folder, "hellaswag"


@pytest.mark.parametrize("case", range(12))
def test_data_that_does_not_fit_is_named(tmp_path: Path, case: int) -> None:
    task, data, named = (
        list(_broken(tmp_path / "data"))[case] if (tmp_path / "data").mkdir() is None else ("", tmp_path, "")
    )
    if task == "bbh_zeroshot" and data.is_dir():
        for file in data.glob("*.json"):
            file.unlink()
    with mistake((DataError, EvaluationError), named) as caught:
        load(task, data)
    assert str(caught.value).count(". ") == 0, "one sentence"


def test_a_model_without_room_for_a_prompt_is_named(tmp_path: Path) -> None:
    files.write_nq_open(tmp_path, 3)
    benchmark = load("nq_open", tmp_path, max_tokens=500)
    with mistake(EvaluationError, "max_tokens"):
        measure_benchmarks(tiny_model("llama", max_position_embeddings=256), tiny_tokenizer(), [benchmark])


def test_cloze_needs_choices(tmp_path: Path) -> None:
    files.write_nq_open(tmp_path, 3)
    with mistake(EvaluationError, "cloze"):
        load("nq_open", tmp_path, cloze=True)


@pytest.fixture(scope="module")
def index() -> None:
    """Import the harness, and list its files."""
    import_module("graftlm.evaluation.harness_tasks").task_manager(["nq_open"])
    import_module("datasets")


@pytest.mark.usefixtures("index")
def test_data_of_the_hub_is_measured_like_local_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the loader of datasets has the rows and splits of the hub."""
    import datasets

    choices = {"text": ["cat", "a very long river", "lamp", "none"], "label": ["A", "B", "C", "D"]}
    rows = {
        "google-research-datasets/nq_open": {
            "train": [files.nq_row(number) for number in range(100, 110)],
            "validation": [files.nq_row(number) for number in range(9)],
        },
        "google/IFEval": {"train": [files.ifeval_row(number) for number in range(9)]},
        "allenai/ai2_arc": {
            split: [{"question": f"What is {split}?", "choices": choices, "answerKey": "B"}] * 4
            for split in ("train", "validation", "test")
        },
    }

    def load_dataset(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        found = datasets.DatasetDict()
        for split, values in rows[path].items():
            found[split] = datasets.Dataset.from_list(values)
        return found

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    loaded = load_benchmarks(
        [
            HarnessTaskConfig(task="nq_open", shots=2, limit=4, seed=5, max_tokens=8),
            HarnessTaskConfig(task="ifeval", limit=5, max_tokens=8),
            HarnessTaskConfig(task="arc_easy", cloze=True, shots=2, limit=3),
        ]
    )
    model = tiny_model("llama")
    results = measure_benchmarks(model, tiny_tokenizer(), loaded)
    assert {label: len(result.values) for label, result in results.items()} == {
        "nq_open": 4,
        "ifeval": 5,
        "arc_easy_cloze": 3,
    }
    prompts = [instance.args[0] for instance in loaded[0].tasks[0].task.instances]
    assert all(prompt.count("number 10") == 2 for prompt in prompts), "solved examples are of the training split"
    asked = [int(prompt.rsplit("number ", 1)[1].split("?")[0]) for prompt in prompts]
    assert asked == choose_items([9], 4, 5)[0]
    with mistake(EvaluationError, "11 shots"):
        load_benchmarks([HarnessTaskConfig(task="nq_open", shots=11)])


@pytest.mark.usefixtures("index")
def test_the_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables too, where nothing answers. The limit is a second; a busy machine gets three."""
    started = time.perf_counter()
    with mistake(EvaluationError, "HF_HUB_OFFLINE"):
        load_benchmarks([HarnessTaskConfig(task="nq_open")])
    assert time.perf_counter() - started < 3
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    started = time.perf_counter()
    with pytest.raises(EvaluationError) as error:
        load_benchmarks([HarnessTaskConfig(task="nq_open")])
    assert time.perf_counter() - started < 3
    assert "nq_open" in str(error.value)
    assert "HF_HUB_OFFLINE" not in str(error.value), "the user has not set it"
    assert import_module("datasets.config").HF_HUB_OFFLINE is False, "restored"


@pytest.mark.usefixtures("index")
def test_a_limit_leaves_no_task_of_a_group_out(tmp_path: Path) -> None:
    files.write_bbh(tmp_path)
    with pytest.raises(EvaluationError) as error:
        load_benchmarks([config("bbh_zeroshot", tmp_path, limit=1)])
    assert "limit" in str(error.value)
    (benchmark,) = load_benchmarks([config("bbh_zeroshot", tmp_path, limit=2)])
    assert [len(task.items) for task in benchmark.tasks] == [1, 1]


def test_unknown_tasks_and_tasks_that_run_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: Any = import_module("graftlm.evaluation.harness_tasks")
    few = tasks.task_manager(["nq_open"])
    monkeypatch.setattr(tasks, "_full_index", lambda: few)  # reading the index of all tasks takes seconds
    with mistake(EvaluationError, "nq_open"):
        load_benchmarks([HarnessTaskConfig(task="nq_opem")])
    for task in ("humaneval", "mbpp"):
        with mistake(EvaluationError, "confirm_unsafe_code"):
            load_benchmarks([HarnessTaskConfig(task=task)])
        with mistake(EvaluationError, "confirm_unsafe_code"):
            harness.run_lm_eval(tiny_model("llama"), tiny_tokenizer(), [task])
    with pytest.raises(GraftError) as caught:
        load_benchmarks([HarnessTaskConfig(task="mbpp")], confirm_unsafe_code=True)
    assert "confirm_unsafe_code" not in str(caught.value), "confirmed, but its data is on the hub"


def test_results_are_plain_json(tmp_path: Path) -> None:
    files.write_arc(tmp_path, 4)
    model = tiny_model("llama", max_position_embeddings=256)
    (result,) = measure_benchmarks(model, tiny_tokenizer(), [load("arc_easy", tmp_path)]).values()
    assert BenchmarkResult.from_json(json.loads(json.dumps(result.to_json()))) == result

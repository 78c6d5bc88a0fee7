"""The experiment of conditional tasks at its smallest size: files, rows, adapters, samplers, errors."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import thinned
from experiments import Options, reproduce
from experiments.conditional_tasks.adapters import BlindConfig, TaskAdapters, TaskAdaptersConfig
from experiments.conditional_tasks.corpora import (
    FILES,
    MIN_CLASS_ROWS,
    TASKS,
    SplitSizes,
    draw_splits,
    question_of,
    text_of,
    write_splits,
)
from experiments.conditional_tasks.probe import TextEmbedder
from experiments.conditional_tasks.rows import (
    ALL,
    CELLS,
    CONTROLS,
    FEW,
    LABELS,
    LORA,
    MODULES,
    OFF,
    RIVALS,
    TABLES,
    TRAINED,
)
from experiments.conditional_tasks.run import aims, effect_rows
from experiments.conditional_tasks.runs import count_changed, covariance_factor, similarity_of
from experiments.conditional_tasks.study import FULL, ConditionalTasksStudy
from experiments.conditional_tasks.trained import DECLARED, RIDGE, without_tagging
from experiments.conditional_tasks.trained import ROWS as TRAINED_ROWS
from graftlm.backbone import Backbone
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Interval, Row, value_of
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft
from graftlm.grafts.conditional_tasks import ConditionalTasksConfig
from graftlm.grafts.heads import TaskSpec, pooled, task_key
from graftlm.runs.task_run import with_tasks
from tiny import tiny_ids, tiny_model, tiny_tokenizer

METRICS = {
    *TASKS,
    *("average", "task_sigma", "average_validation", "data_share", "seconds", "learning_rate"),
    *("rows_trained", "rows_scored", "trained_parameters_ratio", "total_parameters_ratio"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data sets in the formats of the real ones; some texts are in two splits."""
    folder = tmp_path_factory.mktemp("data")
    for file in FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
    cls = folder / "cls"
    intents = [[f"sentence {n} of intent {n % 3}", f"intent_{n % 3}"] for n in range(90)]
    parts = {"train": intents[:50], "val": intents[50:70], "test": intents[70:], "oos_train": []}
    write_json(cls / "clinc150/data_full.json", parts)
    for name, start in (("train", 0), ("test", 60)):
        rows = [(f'query, number {n} "{start}"', f"category_{n % 4}") for n in range(start, start + 60)]
        with (cls / "banking77" / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "category"), *rows])
    for intent in ("AddToPlaylist", *"abcdef"):
        for name, count in (("train_{}_full", 20), ("validate_{}", 4)):
            rows = [
                {"data": [{"text": f"{intent} "}, {"text": f"é {name} {n}\n", "entity": "x"}]} for n in range(count)
            ]
            text = json.dumps({intent: rows}, ensure_ascii=False)
            (cls / "snips" / f"{name.format(intent)}.json").write_bytes(text.encode("latin-1"))
    pairs = [f"{n}\tWhat is number {n}?\tSentence {n // 2}.\t{('not_', '')[n % 2]}entailment" for n in range(80)]
    (cls / "qnli/dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *pairs]) + "\n")
    for name in ("train", "dev", "test"):
        lines = [f"What is {name} {n} ?\t{n % 6 / 5}\n" for n in range(40)]
        (cls / f"query_wellformedness/{name}.tsv").write_text("".join(lines))
    for name, count in (("sst2/train", 60), ("sst2/dev", 30), ("sst2/test", 30), ("trec/train", 60), ("trec/test", 20)):
        lines = [f"{n % 2} {name} , number {n} .\n" for n in range(count)] + ["1 Everywhere the  same .\n"]
        (cls / f"{name}.txt").write_text("".join(lines))
    (cls / "subj/all.txt").write_bytes("".join(f"{n % 2} caf\xe9 {n}\n" for n in range(80)).encode("latin-1"))
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    for name in ("SICK_train", "SICK_trial", "SICK_test_annotated"):
        pairs = [f"{n}\tA {name} {n}\tB {n}\t{1 + n % 5}\t{('NEUTRAL', 'ENTAILMENT')[n % 2]}\n" for n in range(40)]
        pairs.append(f"99\tSame {'ab'[name > 'SICK_th']}\tSame {'ba'[name > 'SICK_th']}\t2.5\tNEUTRAL\n")
        (cls / f"sick/{name}.txt").write_text(header + "".join(pairs))
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        sentences = [f"{name}\tO\nis{n}\tB-place\nin\tI-place\nhere\tO\n" for n in range(40)]
        (folder / "ner/wnut17" / name).write_text("\t\n".join(sentences))
    return folder


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


def options(data: Path, out: Path, **changes: object) -> Options:
    return Options.parse({"data": data, "out": out, "quick": True, "jobs": 1, "seeds": (0,)} | changes)


def draw(rows: Any, sizes: SplitSizes, seed: int) -> dict[str, list[str]]:
    """The texts of the rows of a task by split."""
    splits = draw_splits(rows, sizes, seed)
    return {split: [text_of(row) for row in rows] for split, rows in splits.items()}


def check_disjoint(texts: dict[str, list[str]]) -> None:
    train, validation, test = (set(texts[split]) for split in ("train", "validation", "test"))
    assert not train & (validation | test)
    assert not validation & test


@pytest.mark.parametrize("task", TASKS)
def test_no_text_is_in_two_splits(data: Path, task: str) -> None:
    texts = draw(TASKS[task].read(data), SplitSizes(14, 6, 8), 0)
    assert {split: len(rows) for split, rows in texts.items()} == {"train": 14, "validation": 6, "test": 8}
    check_disjoint(texts)
    other = draw(TASKS[task].read(data), SplitSizes(14, 6, 8), 1)
    assert other["train"] != texts["train"], "the seed draws training rows"
    assert other["test"] == texts["test"], "the seed does not draw test rows"


@pytest.mark.parametrize("task", ["sst2", "trec", "sick", "sick_relatedness"])
def test_what_is_in_two_files_is_in_one_split(data: Path, task: str) -> None:
    """A text in all files, in other case or spacing, and a pair in either order, are held out once."""
    texts = draw(TASKS[task].read(data), SplitSizes("100%", 100, 100), 0)
    assert "everywhere the same ." in texts["test"] or "same a same b" in texts["test"]
    check_disjoint(texts)


@pytest.mark.parametrize("task", thinned(TASKS, {"banking77", "sick_relatedness", "sst2", "wnut17"}))
def test_the_real_sets(data_dir: Path, task: str) -> None:
    size = FULL
    rows = TASKS[task].read(data_dir)
    for seed in (0, 1):
        texts = draw(rows, SplitSizes(size.train, size.validation, size.test, size.least), seed)
        assert len(texts["train"]) >= 1000
        assert {split: len(texts[split]) for split in ("validation", "test")} == {"validation": 250, "test": 500}
        check_disjoint(texts)


def test_a_set_is_written_as_a_recipe_reads_it(data: Path, tmp_path: Path) -> None:
    for task in TASKS:
        splits = draw_splits(TASKS[task].read(data), SplitSizes(14, 6, 8), 0)
        for split, file in write_splits(splits, tmp_path, task).items():
            text = file.read_text(encoding="utf-8")
            rows = text.strip().split("\n\n") if file.suffix == ".conll" else text.splitlines()
            assert len(rows) == len(splits[split])


def test_every_class_is_drawn_even_a_rare_class() -> None:
    rows = [{"text": f"{n}", "label": "rare" if n in (50, 70) else "common"} for n in range(100)]
    splits = {"train": rows, "test": [{"text": "t", "label": "rare"}]}
    train = draw_splits(splits, SplitSizes(10, 5, 1), 0)["train"]
    assert Counter(row["label"] for row in train)["rare"] == MIN_CLASS_ROWS
    assert len(train) == 10
    share = draw_splits(splits, SplitSizes("20%", 5, 1), 0)["train"]
    assert len(share) == 19, "20% of the 95 rows that are not held out"
    assert [row for row in share if row in train] == train, "a smaller set is part of a larger one"


def test_rows_differ_only_in_what_they_compare(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]
) -> None:
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    runs = {row: study.row_runs(row, 0, 1e-3) for row in LABELS}
    assert [list(run.tasks) for run in runs["single_task"]] == [[task] for task in TASKS]
    assert sum(run.training.steps for run in runs["single_task"]) == runs["ca_mtl"][0].training.steps
    together = [row_runs[0] for row, row_runs in runs.items() if row != "single_task"]
    assert len({str((run.tasks, run.training, run.length)) for run in together}) == 1
    for row, (modules, policy) in CELLS.items():
        (run,) = runs[row]
        assert run.sampler.policy == policy
        assert run.graft == study.graft(MODULES[modules])
    single = {row: {key for key in ALL if value[key] != OFF[key]} for row, value in MODULES.items()}
    assert [len(changed) for changed in single.values()] == [0, 1, 1, 1, 1, 4, 1, 1, 1], "in the frozen layers too"
    assert len(set.union(*(single[row] for row in MODULES if row not in ("none", "all")))) == 5
    for policy in ("size", "temperature", "entropy"):
        (run,) = runs[f"multi_task_{policy}"]
        assert (run.sampler.policy, run.sampler.alpha, run.graft) == (policy, 0.5, study.graft(OFF))
    assert runs["heads"][0].graft == study.graft(OFF | {"frozen": 1})
    assert runs["all_layers"][0].graft == study.graft(OFF | {"frozen": 0})
    for row, (modules, by) in CONTROLS.items():
        (run,) = runs[row]
        assert run.graft.model_dump(exclude={"by"}) | {"kind": "conditional-tasks"} == (
            study.graft(MODULES[modules]).model_dump()
        )
        assert run.graft.by == by


@pytest.mark.parametrize("table", TABLES)
def test_effects_are_of_the_rows_that_were_chosen(
    table: str, data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert")), tables=(table,)))
    monkeypatch.setattr(study, "average", lambda row, _: float(len(row)))
    effects = {row.id: value_of(row.metrics["effect"]) for row in effect_rows(study)}
    assert effects["effect_lora_per_task"] == len("lora_per_task") - len("multi_task")
    assert ("effect_cln_all_layers_faster" in effects) == (table == "rivals")


def test_blind_modules_have_the_rows_task_from_its_tokens_or_none() -> None:
    """The same weights, told what a blind graft reads for itself."""
    torch.manual_seed(0)
    tasks = {name: TaskSpec(type="regression") for name in ("x", "y", "z")}
    backbone = Backbone.wrap(tiny_model("bert"), tiny_tokenizer())
    grafts = {
        name: build_graft(config(tasks=tasks, task_width=4, norm=True, lora_rank=2, **fields), backbone)
        for name, config, fields in (
            ("told", ConditionalTasksConfig, {}),
            ("first", BlindConfig, {"by": "first"}),
            ("row", BlindConfig, {"by": "row"}),
        )
    }
    with torch.no_grad():
        for parameter in grafts["told"].parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    ids = torch.tensor([[1, 5, 6, 2], [1, 5, 7, 2], [1, 8, 5, 2]])
    number = torch.tensor([14 % 3, 15 % 3, 16 % 3])

    def encode(name: str, task_B: Tensor) -> Tensor:
        grafts[name].load_state_dict(grafts["told"].state_dict())
        with GraftedModel(backbone, {"graft": grafts[name]}).eval() as model, torch.no_grad():
            return model.encode(ids, extras={"task": task_B})

    for task_B in (number, number.flip(0)):
        assert torch.allclose(encode("row", task_B), encode("told", number), atol=1e-5)
        assert torch.allclose(encode("first", task_B), encode("told", 0 * number), atol=1e-5)
    assert not torch.allclose(encode("told", number.flip(0)), encode("told", number), atol=1e-3)


def test_rivals_have_as_many_parameters_as_our_modules(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]
) -> None:
    """To half a unit of their inner width; heads are the same."""
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    backbone = study.backbone.load(kind="encoder")
    specs = {task: TaskSpec(type="regression") for task in TASKS}

    def own(config: Any) -> int:
        graft = build_graft(with_tasks(config, specs), backbone)
        return sum(p.numel() for name, p in graft.named_parameters() if not name.startswith("heads"))

    wanted = own(study.graft(ALL))
    for row in RIVALS:
        config: Any = study.rival(row)
        unit = own(config.model_copy(update={"inner": config.inner + 1})) - own(config)
        fits = config.inner == 1 or row == "lora_rank3"
        assert fits or abs(own(config) - wanted) <= 0.6 * unit + len(TASKS) * config.task_width, row


FORMS: dict[str, dict[str, Any]] = {
    "bottleneck": {"form": "bottleneck"},
    "bottleneck for all": {"form": "bottleneck", "shared": True},
    "lora": {"form": "lora"},
    "lora for all": {"form": "lora", "shared": True},
    "hyper": {"form": "hyper"},
}


def rival_model(**values: Any) -> GraftedModel:
    torch.manual_seed(0)
    tasks = {name: TaskSpec(type="classification", labels=["a", "b"]) for name in ("x", "y", "z")}
    config = TaskAdaptersConfig(tasks=tasks, frozen=1, pooling="mean", inner=3, task_width=4, **values)
    backbone = Backbone.wrap(tiny_model("bert").double(), tiny_tokenizer())
    model = GraftedModel(backbone, {"graft": build_graft(config, backbone).double()}).eval()
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.grafts["graft"].parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=chance, dtype=torch.double))
    return model


def slow_row(model: GraftedModel, ids_T: Tensor, task: int) -> Tensor:
    """One row's logits, with the formulas of the adapters written out layer by layer."""
    graft: Any = model.grafts["graft"]
    base: Any = model.model.base_model
    form, shared = graft.config.form, graft.config.shared
    gelu = torch.nn.functional.gelu

    def matrices(key: str, layer: int) -> tuple[Tensor, Tensor]:
        if form != "hyper":
            pair = next(pair for name, pair in graft.pairs.items() if name.endswith(key))
            return pair.down[0 if shared else task], pair.up[0 if shared else task]
        net, v = graft.hyper, graft.embeddings[task_key("xyz"[task])]
        linear, norm = net.mix
        mixed = torch.cat([v / v.norm(), net.layers[layer]]) @ linear.weight.T + linear.bias
        mixed = (mixed - mixed.mean()) / torch.sqrt((mixed - mixed.mean()).square().mean() + norm.eps)
        mixed = mixed * norm.weight + norm.bias
        return (mixed @ net.down).reshape(-1, 3), (mixed @ net.up).reshape(3, -1)

    def linear(x: Tensor, module: Any, layer: int, name: str) -> Tensor:
        out = x @ module.weight.T + module.bias
        if form == "lora":
            down, up = matrices(f"layer/{layer}/{name.replace('.', '/')}", layer)
            out = out + x @ down @ up
        return out

    h = base.embeddings(ids_T[None])[0]
    for n, layer in enumerate(base.encoder.layer):
        own = layer.attention.self
        q, k, v = (
            linear(h, getattr(own, name), n, f"attention.self.{name}").unflatten(-1, (own.num_attention_heads, -1))
            for name in ("query", "key", "value")
        )
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / own.attention_head_size**0.5, -1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        attended = linear(mixed, layer.attention.output.dense, n, "attention.output.dense")
        h = layer.attention.output.LayerNorm(attended + h)
        written = linear(
            gelu(linear(h, layer.intermediate.dense, n, "intermediate.dense")), layer.output.dense, n, "output.dense"
        )
        if form != "lora":
            down, up = matrices(str(n), n)
            written = written + gelu(h @ down) @ up
        h = layer.output.LayerNorm(written + h)
    head = graft.heads.linear("xyz"[task])
    vector = pooled(h[None], torch.ones(1, len(h)), "mean")[0]
    return vector @ head.weight.T + head.bias


@pytest.mark.parametrize("form", FORMS)
def test_rivals_compute_what_their_formulas_say(form: str) -> None:
    """A mixed batch equals each row with its task's matrices; untrained, nothing is added."""
    with rival_model(**FORMS[form]) as model:
        ids, task = tiny_ids(4, 6), torch.tensor([2, 0, 2, 1])
        actual = model.predict(ids, extras={"task": task})
        for row in range(4):
            expected = slow_row(model, ids[row], int(task[row]))
            torch.testing.assert_close(actual[row], expected, rtol=1e-6, atol=1e-8)
    assert isinstance(model.grafts["graft"], TaskAdapters)


def test_changed_predictions_are_counted() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert count_changed({"a": [first, first]}, {"a": [first, second]}) == 1
    assert count_changed({"a": [first]}, {"a": [first.clone()]}) == 0


def test_similarity_has_a_range() -> None:
    """Of vectors with one direction 1, of orthogonal ones 0, of isotropic ones nearly 1 and far from nothing."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.eye(4)[:1] * 3, torch.eye(4)[1:2]
    assert similarity_of(covariance_factor(a), covariance_factor(2 * a)) == pytest.approx(1)
    assert similarity_of(covariance_factor(a), covariance_factor(b)) == pytest.approx(0)
    first, second = (covariance_factor(torch.randn(4000, 4, generator=generator)) for _ in range(2))
    assert similarity_of(first, second) == pytest.approx(1 / 2, abs=0.02), "1 / sqrt(d): F has d columns"


@pytest.mark.slow
@pytest.mark.slow
def test_every_table_in_the_one_form(data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]) -> None:
    quick = options(data, tmp_path / "out", backbone=str(tiny_backbone("bert")))
    results = reproduce("conditional-tasks", quick)
    assert [row.id for row in results.rows[: len(LABELS) + 1]] == [*LABELS, "default"]
    for row in LABELS:
        metrics = results.row(row).metrics
        assert set(metrics) == METRICS | ({"over_multi_task"} if row != "multi_task" else set()), row
        assert 0 < value_of(metrics["data_share"]) <= 1
        scored = CELLS.get(row, ("", ""))[1] == "uncertainty"
        assert (value_of(metrics["rows_scored"]) > 0) == (scored or row == "multi_task_entropy"), row
        assert results.row(row).label == LABELS[row]
    assert value_of(results.row("single_task").metrics["total_parameters_ratio"]) > len(TASKS)
    default = results.row("default").metrics
    assert default["average"] == results.row(str(results.details["default"])).metrics["average"]
    assert {f"over_{row}" for row in RIVALS} < set(default)
    assert results.row("few_added").metrics["old_changed"] == 0
    few = [row for row in FEW if row != "few_whole" or results.details["default"] != LORA]  # whose tasks share nothing
    assert {row.id for row in results.rows} >= {*few, "fewer_rows", "effect_cln", "effect_uncertainty"}
    assert all(value_of(row.metrics["old_changed"]) > 0 for row in results.rows if row.id == "few_whole")
    (probe,) = results.details["probe"]["by_seed"].values()
    assert probe.keys() == {*TASKS, "sick_relatedness_cosine"} - {"wnut17"}
    assert {file.stem for file in (tmp_path / "out").glob("*.png")} >= {"scores", "few", "similarity"}
    assert reproduce("conditional-tasks", quick).rows == results.rows, "finished runs are read back"


def test_ridge_regression_reads_each_text_once_in_any_order(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    texts = ["a much longer text of several words", "short", "a text"]
    expected = np.concatenate([TextEmbedder(study)([text]) for text in texts])
    embed = TextEmbedder(study)
    read: list[str] = []
    original = embed._read

    def recorded(batch: list[str]) -> np.ndarray:
        read.extend(batch)
        return original(batch)

    monkeypatch.setattr(embed, "_read", recorded)
    found = embed([*texts, texts[0]])
    again = embed(texts[::-1])
    assert sorted(read) == sorted(texts)
    np.testing.assert_allclose(found, expected[[0, 1, 2, 0]], atol=1e-5)
    np.testing.assert_allclose(again, expected[::-1], atol=1e-5)
    assert abs(expected[0] - expected[1]).max() > 1e-3, "the vectors differ"


@pytest.mark.slow
def test_the_trained_rows_are_judged_by_ridge_regression(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]
) -> None:
    quick = options(data, tmp_path / "out", backbone=str(tiny_backbone("bert")), tables=(TRAINED,))
    results = reproduce("conditional-tasks", quick)
    assert [row.id for row in results.rows] == [RIDGE, *TRAINED_ROWS]
    assert results.seeds == list(quick.seeds)
    assert "wnut17" not in results.row(RIDGE).metrics
    conditions: Any = results.details["conditions"]
    assert [condition["met"] for condition in conditions][1:] == [False, False, False]
    comparisons: Any = results.details["comparisons"]
    assert [each["name"] for each in comparisons] == [comparison.name for comparison in DECLARED]
    assert not any(each["decided"] for each in comparisons)
    assert (tmp_path / "out" / TRAINED / "results.json").exists()


def test_tagging_does_not_count_against_ridge_regression() -> None:
    scores = dict.fromkeys(TASKS, 0.5)
    assert without_tagging({**scores, "wnut17": 0.0}) == pytest.approx(0.5)
    assert without_tagging({**scores, "sst2": 0.0}) < 0.5


def test_questions_can_be_kept_apart_instead_of_texts() -> None:
    rows = [{"question": f"Who is {n // 2}?", "sentence": f"Sentence {n}.", "label": "yes"} for n in range(60)]
    apart = draw_splits({"train": rows}, SplitSizes("100%", 12, 12), 0, question_of)
    questions = {split: {row["question"] for row in of_split} for split, of_split in apart.items()}
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["validation"]
    assert not questions["validation"] & questions["test"]
    by_text = draw_splits({"train": rows}, SplitSizes("100%", 12, 12), 0)
    shared = {row["question"] for row in by_text["train"]} & {row["question"] for row in by_text["test"]}
    assert shared, "the rows of this test share questions"


def test_mistakes(data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]) -> None:
    encoder = str(tiny_backbone("bert"))
    with pytest.raises(RecipeError, match=r"There is no table 'fewer' in this experiment \(did you mean few"):
        reproduce("conditional-tasks", options(data, tmp_path, tables=("fewer",), backbone=encoder))
    with pytest.raises(DataError, match=r"lacks .*data_full.json"):
        reproduce("conditional-tasks", options(tmp_path, tmp_path, backbone=encoder))


def test_without_an_encoder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError):
        ConditionalTasksStudy(options(data, tmp_path))


def test_aims_take_the_interval_of_paired_differences() -> None:
    def default(low: float, reached: float | None) -> list[Row]:
        gain = Interval(mean=1.2, low=low, high=2)
        metrics = {
            "over_multi_task": gain,
            "over_adapters_half": -0.1,
            "over_lora": 0.0,
            "worst_task_over_multi_task": -2.5,
        }
        fewer = {} if reached is None else {"rows_to_reach": reached}
        return [
            Row(id="default", label="", metrics={**metrics, "total_parameters_ratio": 1.1}),
            Row(id="fewer_rows", label="", metrics=fewer),
        ]

    assert [aim.met for aim in aims(default(0.1, 0.7))] == [True, True, False, True, False, True, True]
    assert [aim.met for aim in aims(default(-0.1, None))] == [True, False, False, True, False, True, False]

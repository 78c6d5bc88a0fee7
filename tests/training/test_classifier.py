"""Classifiers from a recipe: their loss, what is measured and written, what goes on after a kill, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from cli.tools import invoke
from graftlm.backbone import load_backbone
from graftlm.cli import app
from graftlm.data.sequence_batches import SequenceBatches, collate_sequences
from graftlm.data.sequence_config import BytesConfig
from graftlm.data.sequences import Sequences, SequenceTask
from graftlm.errors import ArtifactError, BackboneError, EvaluationError, GraftError, RecipeError
from graftlm.evaluation import Interval, Results, value_of
from graftlm.evaluation.classification import accuracy_metrics, commonest_class, predict_classes
from graftlm.generation.classify import evaluate_classifier
from graftlm.runs.classifier_run import ClassifierRecipe
from graftlm.runs.recipe import compare_recipe, load_recipe, run_recipe
from graftlm.training.classifier import SequenceClassifier, new_classifier, read_classifier

BLOCK_STATE = {
    "model_type": "block-state",
    "bidirectional": True,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "window": 8,
    "mixer_layers": [0],
    "state_space_layers": [1],
    "initializer_range": 0.25,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BYTES = {"task": "bytes", "length": 24}


def write_rows(folder: Path) -> None:
    """Texts whose class is the first of their letters, which a model of bytes learns in a few steps."""
    for name, count, seed in (("train", 48, 0), ("test", 20, 1)):
        generator = np.random.default_rng(seed)
        lines = []
        for _ in range(count):
            label = "ab"[generator.integers(2)]
            text = label * int(generator.integers(10, 30))
            lines.append(json.dumps({"text": text, "label": f"class {label}"}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    write_rows(folder)
    files = {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}
    return {
        "kind": "classifier",
        "model": BLOCK_STATE,
        "data": BYTES | files,
        "training": {"steps": 16, "batch_size": 8, "learning_rate": 0.02},
        "device": "cpu",
        "out": str(folder / "run"),
    } | changes


def run(folder: Path, out: str = "run", said: list[str] | None = None, **changes: Any) -> Results:
    recipe = ClassifierRecipe.parse(values(folder, **changes))
    return run_recipe(recipe, folder / out, progress=False, log=(said if said is not None else []).append)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def toy_task(count: int = 6) -> SequenceTask:
    generator = np.random.default_rng(0)
    ids = [generator.integers(1, 10, size=size).astype(np.int32) for size in range(9, 9 + count)]
    rows = Sequences(ids, np.arange(count) % 3)
    return SequenceTask(classes=("x", "y", "z"), vocab_size=10, train=rows, test=rows)


def toy_classifier(**changes: Any) -> SequenceClassifier:
    return SequenceClassifier(new_classifier(BLOCK_STATE | changes, toy_task(), seed=0))


def check_answers(tmp_path: Path) -> None:
    """Compare the answers of the trained classifier, as docs/recipes.md shows them, with the test rows."""
    loaded, record = read_classifier(tmp_path / "run/model")
    assert isinstance(record.data, BytesConfig)
    for line in (tmp_path / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([[byte + 1 for byte in row["text"].encode()][: record.data.length]])
        assert record.classes[int(loaded(input_ids=ids).logits.argmax())] == row["label"]


def check_refusals(tmp_path: Path) -> None:
    """Let other commands name `graft eval` for the trained classifier."""
    for place in ("run/model", "run"):
        for arguments in (["generate", "hello"], ["export", "--to", "out"], ["inspect"], ["predict", "--task", "x"]):
            verb, *rest = arguments
            if (verb, place) == ("inspect", "run"):  # prints the report
                continue
            refused = invoke(verb, str(tmp_path / place), *rest)
            assert refused.code == 2, refused.out
            assert "graft eval" in refused.err
            assert str(tmp_path / "run/model") in refused.err
            assert refused.err.count("\n") == 1
    with pytest.raises(BackboneError):
        load_backbone(tmp_path / "run/model")


@pytest.mark.usefixtures("undrawn_figures")
def test_a_run_is_measured_beside_the_commonest_class_and_again_by_the_command(tmp_path: Path) -> None:
    said: list[str] = []
    results = run(tmp_path, said=said)
    metrics = results.row("block-state").metrics
    accuracy, majority = metrics["accuracy"], metrics["majority_accuracy"]
    assert isinstance(accuracy, Interval)
    assert accuracy.low < accuracy.mean == 100
    assert isinstance(majority, Interval)
    rows: Any = results.details["rows_by_class"]["block-state"]  # type: ignore[index, call-overload]
    commonest = max(rows["train"], key=lambda name: rows["train"][name])
    assert majority.mean == pytest.approx(100 * rows["test"][commonest] / 20)
    assert any("were cut" in line for line in said)
    recipe = load_recipe(tmp_path / "run/recipe.yaml")
    assert recipe == ClassifierRecipe.parse(values(tmp_path))

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert model.config.id2label == {0: "class a", 1: "class b"}
    out = CliRunner().invoke(app, ["eval", str(tmp_path / "run/model"), "--device", "cpu", "--json"])
    assert out.exit_code == 0, out.output
    found = json.loads(out.stdout)["rows"][0]["metrics"]
    assert found["accuracy"] == accuracy.model_dump()
    assert found["majority_accuracy"] == majority.model_dump()

    check_answers(tmp_path)
    check_refusals(tmp_path)

    wrong = (tmp_path / "test.jsonl").read_text().replace("class a", "class c").replace("class b", "class a")
    (tmp_path / "swapped.jsonl").write_text(wrong.replace("class c", "class b"))
    files = {"swapped": str(tmp_path / "swapped.jsonl")}
    swapped = evaluate_classifier(tmp_path / "run/model", files, device="cpu").rows[0].metrics
    assert value_of(swapped["accuracy_swapped"]) == 0
    assert value_of(swapped["majority_accuracy_swapped"]) == pytest.approx(100 - majority.mean)
    for options in (["--text", "new=x.txt"], ["--backbone", "x"]):
        assert CliRunner().invoke(app, ["eval", str(tmp_path / "run/model"), *options]).exit_code == 2


@pytest.mark.usefixtures("undrawn_figures")
def test_resume_is_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"steps": 4, "batch_size": 4, "learning_rate": 0.02, "checkpoint_every": 1}
    run(tmp_path, "whole", training=training)
    draw = SequenceBatches.batch

    def cut(self: SequenceBatches, step: int) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return draw(self, step)

    monkeypatch.setattr(SequenceBatches, "batch", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "cut", training=training)
    assert (tmp_path / "cut/checkpoints").is_dir()
    monkeypatch.setattr(SequenceBatches, "batch", draw)
    run(tmp_path, "cut", training=training)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize(
    ("model", "data"),
    [
        (LLAMA, {"task": "pixels"}),
        (BLOCK_STATE, {"task": "listops", "shortest": 10, "length": 30, "rows": 40, "test_rows": 10}),
    ],
)
def test_other_models_and_sequences(tmp_path: Path, model: dict[str, Any], data: dict[str, Any]) -> None:
    training = {"steps": 1, "batch_size": 4}
    results = run(tmp_path, model=model, data=data, training=training)
    assert 0 <= value_of(results.rows[0].metrics["accuracy"]) <= 100


def test_the_loss_is_the_mean_over_the_rows_of_a_step_however_they_are_split() -> None:
    model, task = toy_classifier(), toy_task()
    batch = collate_sequences(task.train, [0, 1, 2, 3, 4, 5])
    output = model(**batch.inputs())
    assert output.logits.shape == (6, 3)
    expected = functional.cross_entropy(output.logits, batch.labels)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    parts = [model(**batch.rows(rows).inputs(), totals=batch.totals()) for rows in (slice(0, 2), slice(2, 6))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), output.logits, rtol=1e-4, atol=1e-5)


def test_predictions_are_those_of_each_row_alone_in_the_order_of_the_rows() -> None:
    task, model = toy_task(), toy_classifier().model.train()
    predicted = predict_classes(model, task.test, batch_size=4)
    assert model.training
    model.eval()
    with torch.no_grad():
        alone = [int(model(torch.from_numpy(ids).long()[None]).logits.argmax()) for ids in task.test.ids]
    assert predicted.tolist() == alone
    model.score.bias.data.fill_(float("nan"))
    with pytest.raises(EvaluationError) as error:
        predict_classes(model, task.test)
    assert "learning_rate" in str(error.value)


def test_accuracy_and_the_commonest_class() -> None:
    labels = np.array([0, 2, 2, 1, 2, 0, 2, 2])
    rows = Sequences([np.ones(1, dtype=np.int32)] * 8, labels)
    assert commonest_class(rows) == 2
    metrics = accuracy_metrics(np.array([0, 2, 2, 1, 1, 1, 1, 1]), labels, 2)
    assert metrics["accuracy"].mean == 50
    assert metrics["majority_accuracy"].mean == 62.5
    # Wilson's interval of 4 of 8, from its closed form.
    z = 1.959963984540054
    half = 100 * z / (8 + z**2) * (8 * 0.25 + z**2 / 4) ** 0.5
    assert metrics["accuracy"].low == pytest.approx(50 - half)
    assert metrics["accuracy"].high == pytest.approx(50 + half)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": BLOCK_STATE | {"num_labels": 3}}, "num_labels"),
        ({"model": BLOCK_STATE | {"vocab_size": 20}}, "model.vocab_size"),
        ({"model": BLOCK_STATE | {"window": 24}}, "window"),
        ({"model": BLOCK_STATE | {"widht": 24}}, "widht"),
        ({"model": BLOCK_STATE | {"kernel": "unstructured", "kernel_length": 8, "kernel_limit": 16}}, "kernel_limit"),
        ({"model": LLAMA | {"max_position_embeddings": 16}}, "max_position_embeddings"),
        ({"model": {"model_type": "vit"}}, "vit"),
        ({"model": {"hidden_size": 16}}, "model_type"),
        ({"model": "gpt2"}, "model"),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"training": {"epochs": 1}}, "training.epochs"),
        ({"evaluation": {"batch_size": 0}}, "batch_size"),
        ({"device": "meat"}, "meat"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(GraftError) as error:
        run(tmp_path, **changes)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_of_a_classifier_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values(tmp_path)))
    recipe = load_recipe(path, ["training.steps=2"])
    assert isinstance(recipe, ClassifierRecipe)
    with pytest.raises(RecipeError) as error:
        compare_recipe(recipe)
    assert "graft train" in str(error.value)


def test_a_folder_that_is_no_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        evaluate_classifier(tmp_path, {})
    assert "sequences.json" in str(error.value)
    record = tmp_path / "sequences.json"
    for content in ("{", "[]", "{}", '{"data": {"task": "words"}, "classes": [], "commonest": 0}'):
        record.write_text(content)
        with pytest.raises(ArtifactError) as error:
            evaluate_classifier(tmp_path, {})
        assert str(tmp_path) in str(error.value)

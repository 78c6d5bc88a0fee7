"""Language models from a recipe: what is written, what goes on after a kill, and what the user may get wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftlm.data import Mixture, TokenBlocks, build_documents
from graftlm.errors import BackboneError, DataError, GraftError, RecipeError
from graftlm.evaluation import Results, score, value_of
from graftlm.runs.language_run import LanguageModelRecipe
from graftlm.runs.recipe import compare_recipe, load_recipe, run_recipe
from graftlm.training import TrainingConfig
from graftlm.training.language_model import LanguageModel, new_model, read_model, save_model, train_tokenizer
from graftlm.training.optimizer import make_optimizer, parameters_without_decay
from graftlm.training.stateful import StatefulBatches
from tiny import tiny_tokenizer

BLOCK_STATE = {
    "model_type": "block-state",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "window": 8,
    "mixer_layers": [1],
    "kernel_length": 32,
}
WORDS = "the river ran under the old house and the garden slept below a white moon until morning came. "
MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "train.txt").write_text(WORDS * 40, encoding="utf-8")
    (folder / "test.txt").write_text(WORDS[::-1] * 4 + WORDS * 4, encoding="utf-8")
    return {
        "kind": "language-model",
        "model": MODEL,
        "tokenizer": {"vocab_size": 270},
        "data": {
            "train": [{"path": str(folder / "train.txt")}],
            "test": {"river": [{"path": str(folder / "test.txt")}]},
            "length": 32,
        },
        "training": {"steps": 6, "batch_size": 4, "learning_rate": 0.01, "checkpoint_every": 2},
        "evaluation": {"lengths": [16, 64]},
        "device": "cpu",
        "out": str(folder / "run"),
    } | changes


def run(folder: Path, out: str = "run", **changes: Any) -> Results:
    recipe = LanguageModelRecipe.parse(values(folder, **changes))
    return run_recipe(recipe, folder / out, progress=False, log=lambda _: None)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(two[name], tensor) for name, tensor in one.items())


def test_a_run_leaves_a_model_that_transformers_reads(tmp_path: Path) -> None:
    results = run(tmp_path)
    out = tmp_path / "run"
    assert {"model", "tokenizer", "recipe.yaml", "results.json", "report.md"} <= {path.name for path in out.iterdir()}
    assert load_recipe(out / "recipe.yaml") == LanguageModelRecipe.parse(values(tmp_path))
    metrics = results.row("llama").metrics
    assert {"bpb_river", "bpb_river_at_16", "bpb_river_at_32", "bpb_river_at_64", "train_tokens_per_s"} <= set(metrics)
    losses: Any = results.details["losses"]["llama"]  # type: ignore[index, call-overload]
    assert losses[-1][1] < losses[0][1]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "model"), AutoTokenizer.from_pretrained(out / "model")
    assert model.config.vocab_size == len(tokenizer) <= 270
    assert model.config.eos_token_id == tokenizer.eos_token_id
    documents = build_documents(LanguageModelRecipe.parse(values(tmp_path)).data.test["river"])
    found = score(model, tokenizer, documents, length=64).value("bits_per_byte")
    assert value_of(metrics["bpb_river_at_64"]) == pytest.approx(found, abs=1e-5)

    written = (out / "model" / "model.safetensors").stat().st_mtime_ns
    assert run(tmp_path).rows == results.rows
    assert (out / "model" / "model.safetensors").stat().st_mtime_ns == written, "a finished run is read back"


@pytest.mark.usefixtures("undrawn_figures")
def test_resume_is_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "whole")
    draw = Mixture.batch

    def cut(self: Mixture, step: int) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return draw(self, step)

    monkeypatch.setattr(Mixture, "batch", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "cut")
    monkeypatch.setattr(Mixture, "batch", draw)
    run(tmp_path, "cut")
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    training = {"steps": 60, "batch_size": 4, "learning_rate": 0.01, "checkpoint_every": 1}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values(tmp_path, training=training)))
    command = [sys.executable, "-m", "graftlm", "train", str(recipe), "--quiet", "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it was done before it could be killed"
    torch.set_num_threads(1)
    run(tmp_path, "killed", training=training)
    run(tmp_path, "whole", training=training)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("undrawn_figures")
def test_a_model_of_the_house_is_trained_and_goes_on(tmp_path: Path) -> None:
    results = run(tmp_path, model=BLOCK_STATE)
    metrics = results.row("block-state").metrics
    assert metrics["parameters"] > 0
    assert {"bpb_river_at_16", "bpb_river_at_64"} <= set(metrics)
    training = {"steps": 1, "batch_size": 4, "learning_rate": 1e-9}
    run(tmp_path, "further", model=str(tmp_path / "run" / "model"), tokenizer=None, training=training)
    assert parameters_without_decay(AutoModelForCausalLM.from_pretrained(tmp_path / "further" / "model"))


def test_rows_go_on_where_those_of_the_step_before_ended() -> None:
    marked = np.arange(4, 4 + 7 * 5, dtype=np.int32).reshape(7, 5)
    streams = StatefulBatches(TokenBlocks(marked, boundaries="joined"), 2)
    batches = [streams.batch(step) for step in range(4)]
    read = [torch.cat([batch.input_ids[row] for batch in batches[:3]]).tolist() for row in (0, 1)]
    assert read == [list(range(4, 19)), list(range(19, 34))]
    assert [bool(batch.starts.all()) for batch in batches if batch.starts is not None] == [True, False, False, True]
    assert torch.equal(batches[3].input_ids, batches[0].input_ids)
    with pytest.raises(DataError) as error:
        StatefulBatches(TokenBlocks(marked, boundaries="joined"), 8)
    assert "batch_size" in str(error.value)


def test_the_recurrent_state_continues_a_text_as_one_longer_pass_does() -> None:
    torch.manual_seed(0)
    bare = new_model(BLOCK_STATE, tiny_tokenizer(), 0)
    model = LanguageModel(bare).train()
    ids, stream = torch.randint(0, 50, (2, 40)), torch.arange(2)
    whole = bare(ids, use_cache=False).logits
    first = model(ids[:, :27], labels=ids[:, :27], stream=stream, starts=torch.ones(2, dtype=torch.bool))
    kept = model.recurrent_state()
    second = model(ids[:, 27:], labels=ids[:, 27:], stream=stream, starts=torch.zeros(2, dtype=torch.bool))
    assert torch.allclose(torch.cat([first.logits, second.logits], dim=1), whole, atol=1e-4)
    assert not any(tensor.requires_grad for tensor in kept.values())

    other = LanguageModel(bare).train()
    other.set_recurrent_state(kept)
    again = other(ids[:, 27:], labels=ids[:, 27:], stream=stream, starts=torch.zeros(2, dtype=torch.bool))
    assert torch.equal(again.logits, second.logits)


@pytest.mark.slow
def test_a_run_whose_rows_go_on_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"model": BLOCK_STATE, "data": values(tmp_path)["data"] | {"stream": True}}
    changes["training"] = values(tmp_path)["training"] | {"micro_batch_size": 2}
    run(tmp_path, "whole", **changes)
    draw = StatefulBatches.batch

    def cut(self: StatefulBatches, step: int) -> Any:
        if step == 5:
            raise KeyboardInterrupt
        return draw(self, step)

    monkeypatch.setattr(StatefulBatches, "batch", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "cut", **changes)
    monkeypatch.setattr(StatefulBatches, "batch", draw)
    run(tmp_path, "cut", **changes)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    apart = run(tmp_path, "apart", **changes | {"data": values(tmp_path)["data"]})
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "apart")), apart


@pytest.mark.slow
def test_a_model_goes_on_from_its_folder(tmp_path: Path) -> None:
    run(tmp_path)
    before = weights(tmp_path / "run")
    training = {"steps": 1, "batch_size": 4, "learning_rate": 1e-9}
    results = run(tmp_path, "further", model=str(tmp_path / "run" / "model"), tokenizer=None, training=training)
    after = weights(tmp_path / "further")
    assert all(torch.allclose(after[name], tensor, atol=1e-6) for name, tensor in before.items())
    assert value_of(results.row("llama").metrics["bpb_river_at_64"]) < 8


def test_documents_may_be_kept_apart(tmp_path: Path) -> None:
    data = values(tmp_path)["data"] | {"boundaries": "separate"}
    (tmp_path / "train.jsonl").write_text('{"text": "the old house"}\n{"text": "a white moon"}\n' * 60)
    data["train"] = [{"path": str(tmp_path / "train.jsonl")}]
    assert run(tmp_path, data=data).row("llama")


def test_what_keeps_a_state_does_not_decay() -> None:
    model = nn.Linear(3, 2)
    model.weight._no_weight_decay = True  # type: ignore[attr-defined]
    wide = nn.Linear(3, 2)
    both = nn.ModuleDict({"kept": model, "plain": wide})
    assert parameters_without_decay(both) == {"kept.weight"}
    config = TrainingConfig(steps=1, weight_decay=0.1)
    decaying, others = make_optimizer(
        dict(both.named_parameters()), config, parameters_without_decay(both)
    ).param_groups
    assert decaying["weight_decay"] == 0.1
    assert [id(p) for p in decaying["params"]] == [id(wide.weight)]
    assert others["weight_decay"] == 0.0
    assert len(others["params"]) == 3


def test_a_state_space_model_names_what_does_not_decay() -> None:
    model = new_model(BLOCK_STATE, tiny_tokenizer(), 0)
    kept = parameters_without_decay(LanguageModel(model))
    assert kept
    assert all(".kernels." in name for name in kept)
    assert kept <= {name for name, _ in LanguageModel(model).named_parameters()}


def test_its_loss_is_that_of_transformers() -> None:
    tokenizer = tiny_tokenizer()
    model = new_model(MODEL, tokenizer, 0)
    ids = torch.randint(0, len(tokenizer), (3, 20))
    assert torch.allclose(LanguageModel(model)(ids, labels=ids).loss, model(ids, labels=ids).loss, atol=1e-6)


def test_pieces_write_every_text() -> None:
    tokenizer = train_tokenizer([WORDS * 10], 300)
    text = "Grüße, 你好 \x00 🌙"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 257 < len(tokenizer) <= 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": MODEL | {"model_type": "lama"}}, "'lama'.*llama"),
        ({"model": MODEL | {"model_type": "t5"}}, "t5"),
        ({"model": MODEL | {"hidden": 3}}, "key hidden,"),
        (
            {"model": MODEL | {"num_attention_heads": 3}},
            "model: .*llama.*attention heads",
        ),
        (
            {"model": MODEL | {"hidden_size": "wide"}},
            "model: .*llama.*hidden_size",
        ),
        ({"model": MODEL | {"vocab_size": 100}}, "tokens.*llama has 100"),
        ({"model": {"hidden_size": 16}}, "model_type"),
        ({"model": "nowhere/at-all", "tokenizer": {"vocab_size": 260}}, "model nowhere/at-all"),
        ({"tokenizer": "nowhere/at-all"}, "tokenizer nowhere/at-all"),
        ({"tokenizer": None}, "no tokenizer"),
        ({"tokenizer": {"vocab_size": 100}}, "tokenizer.vocab_size: .*257"),
        ({"tokenizer": {}}, "name or a vocab_size"),
        (
            {"evaluation": {"lengths": [128]}},
            "evaluation.lengths has 128.* 64 positions",
        ),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"model": BLOCK_STATE | {"window": 32}}, "32.*data.length"),
        (
            {"model": BLOCK_STATE, "separate": True},
            "block-state.*position ids",
        ),
        (
            {"stream": True},
            "cache of a llama model.*data.stream",
        ),
        (
            {"stream": True, "separate": True},
            "boundaries to joined",
        ),
        (
            {"stream": True, "model": BLOCK_STATE, "training": {"steps": 1, "gradient_checkpointing": True}},
            "data.stream and training.gradient_checkpointing",
        ),
        ({"model": BLOCK_STATE | {"num_attention_heads": 3}}, "num_attention_heads, 3"),
        ({"device": "meat"}, "device meat"),
    ],
)
def test_mistakes_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = dict(changes)
    data: dict[str, Any] = {"boundaries": "separate"} if said.pop("separate", False) else {}
    data |= {"stream": True} if said.pop("stream", False) else {}
    changes = said | ({"data": values(tmp_path)["data"] | data} if data else {})
    with pytest.raises(GraftError) as caught:
        run(tmp_path, **changes)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_an_error_of_the_model(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([WORDS * 10], 300)
    save_model(new_model(MODEL, tokenizer, seed=0), tokenizer, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BackboneError) as error:
        read_model(str(tmp_path / "model"), tokenizer)
    assert str(tmp_path / "model") in str(error.value)


def test_a_recipe_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values(tmp_path)))
    recipe = load_recipe(path, ["training.steps=2"])
    assert recipe.training.steps == 2
    with pytest.raises(RecipeError) as error:
        compare_recipe(recipe)
    assert "graft train" in str(error.value)
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["kind=language"])
    assert repr("language") in str(error.value)

"""The examples work: the graft in one file keeps the laws, and a recipe trains it from Python and as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from examples.my_graft import LowRankBias, LowRankBiasConfig
from graftlm import GraftError, graft_config, load_backbone, load_graft, load_recipe, register_graft, run_recipe
from graftlm.evaluation import Results, value_of
from graftlm.grafts import FitsOnText, Graft, GraftConfig, HasHeads, HasTensors, graft_class
from graftlm.grafts.baselines import FineTuning
from graftlm.grafts.registry import REGISTRY
from graftlm.runs.recipe import Recipe
from graftlm.testing import GraftLaws
from tiny import BackboneFolder

ROOT = Path(__file__).parents[1]
# Importing the example registers its graft, but other tests of this process list the registered kinds.
REGISTRY.pop("low-rank-bias", None)


@pytest.fixture(autouse=True, scope="module")
def registered_example() -> Iterator[None]:
    REGISTRY["low-rank-bias"] = LowRankBias
    yield
    del REGISTRY["low-rank-bias"]


class TestLowRankBias(GraftLaws):
    config = {"kind": "low-rank-bias", "rank": 6}
    families = ("llama", "bert")


@pytest.mark.slow
class TestLowRankBiasOnMoreFamilies(TestLowRankBias):
    families = ("gemma3", "gpt2", "llama+bfloat16")


@pytest.fixture
def recipe(tmp_path: Path, tiny_backbone: BackboneFolder) -> Path:
    (tmp_path / "old.txt").write_text("the quick brown fox " * 60)
    (tmp_path / "new.txt").write_text("le renard brun " * 60)
    sources = {name: [{"path": f"{name}.txt"}] for name in ("old", "new")}
    values = {
        "backbone": {"name": str(tiny_backbone("llama"))},
        "graft": {"kind": "low-rank-bias", "rank": 3},
        "data": {**sources, "length": 24, "test": sources},
        "training": {"steps": 4, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 0},
        "evaluation": {"limit_tokens": 100, "decode_prompts": 0, "own_tokens": 100},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "recipe.yaml"


def test_a_recipe_trains_the_example(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    results = run_recipe(load_recipe(recipe), "out", progress=False)
    assert "low-rank bias" in {row.label for row in results.rows}
    folder = next(Path("out").rglob("graft.json")).parent
    graft = load_graft(folder, load_backbone(load_recipe(recipe).backbone.name))
    assert isinstance(graft, LowRankBias)
    assert graft.config == LowRankBiasConfig(rank=3)
    for linear in graft.u:
        assert linear.weight.abs().max() > 0  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_example_runs_as_a_script(recipe: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "my_graft.py"), "recipe.yaml", "out"]
    run = subprocess.run(command, cwd=recipe.parent, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((recipe.parent / "out" / "results.json").read_text())["rows"]


def test_a_kind_is_registered_once_and_with_a_class_that_fits() -> None:
    register_graft("low-rank-bias", LowRankBias)  # a second time, as when a notebook's cell runs again
    with pytest.raises(GraftError) as error:
        register_graft("finetune", LowRankBias)
    assert "graftlm.grafts.baselines:FineTuning" in str(error.value)
    with pytest.raises(GraftError) as error:
        register_graft("other", LowRankBias)
    assert "'low-rank-bias'" in str(error.value)
    with pytest.raises(GraftError) as error:
        register_graft("other", GraftConfig)  # type: ignore[arg-type]  # the mistake
    assert "subclass of Graft" in str(error.value)
    with pytest.raises(GraftError) as error:
        register_graft("other", "my_package")
    assert "'my_package'" in str(error.value)


def test_a_registered_name_that_can_not_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.grafts.registry.REGISTRY", {"gone": "my_package.gone:Gone", "away": "json:Away"})
    with pytest.raises(GraftError) as error:
        graft_class("gone")
    assert "my_package.gone:Gone" in str(error.value)
    with pytest.raises(GraftError) as error:
        graft_config({"kind": "away"})
    assert "json:Away" in str(error.value)


def test_the_contract_is_narrow() -> None:
    own = [name for name in vars(Graft) if not name.startswith("_") and callable(getattr(Graft, name))]
    assert {"taps", "prepare", "auxiliary_loss", "observe", "describe", "add_token_rows"} == set(own)
    assert len(own) < 8
    assert issubclass(FineTuning, HasTensors)
    assert not issubclass(FineTuning, HasHeads | FitsOnText)


def test_three_languages_are_taught_in_one_run(
    tmp_path: Path, tiny_backbone: BackboneFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"danish": "det var en mørk aften. ", "slovak": "bol tmavý večer. ", "czech": "byl tmavý večer. "}
    texts["english"] = "it was a dark evening. "
    for size, (name, text) in zip((400, 90, 200, 60), texts.items(), strict=True):
        for part, times in ((name, size), (f"{name}-test", 10)):
            (tmp_path / "text" / part).mkdir(parents=True)
            (tmp_path / "text" / part / "one.txt").write_text(text * times, encoding="utf-8")
    small = ["steps=30", "batch_size=8", "warmup_steps=0"]
    overrides = [f"backbone.name={tiny_backbone('llama')}", *(f"training.{key}" for key in small)]
    overrides += ["data.length=16", "data.replay_fraction=0.25", "data.old.1.tokens=200", "data.old.1.batch_size=8"]
    overrides += ["evaluation.own_tokens=0", "evaluation.decode_prompts=0"]
    recipe = Recipe.from_yaml(ROOT / "examples" / "three-languages.yaml", overrides)
    (row,) = (row for row in run_recipe(recipe, progress=False).rows if row.id == "neutral-residues")
    learned = [value_of(row.metrics[f"learned_{name}"]) for name in ("da", "sk", "cs")]
    assert value_of(row.metrics["learned"]) == pytest.approx(sum(learned) / 3, abs=1e-6)
    results = Results.read(tmp_path / "runs" / "three-languages")
    read = results.details["trained"]["neutral-residues"]["read"]  # type: ignore[index, call-overload]
    shares = [source["share"] for source in read if source["domain"] == "new"]  # type: ignore[index, union-attr, call-overload]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)

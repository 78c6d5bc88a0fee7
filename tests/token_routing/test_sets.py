"""Each new expert trains on its own named set of new text, whatever the nearest centroid of a document is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm import load_recipe, run_recipe
from graftlm.data import DataConfig, SourceConfig
from graftlm.data.mixture import build_mixture
from graftlm.data.rows import NEW, NO_SET, OLD
from graftlm.errors import RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.fitting import example_sources
from graftlm.runs.graft_recipe import Recipe
from graftlm.runs.graft_run import GraftRun
from tiny import BackboneFolder, tiny_tokenizer
from token_routing import reference
from token_routing.tools import backbone

ENGLISH = "The quick brown fox jumps over the lazy dog. "
FRENCH = "Le renard brun saute par-dessus le chien paresseux. "
EXPERTS = {
    "english": {"rank": 2, "targets": ["down_proj"], "texts": [ENGLISH]},
    "french": {"rank": 2, "targets": ["down_proj"], "texts": [FRENCH]},
}


def trained(sets: list[str], **settings: Any) -> GraftedModel:
    """A model in training mode with random experts, told of the sets of new text."""
    config = graft_config({"kind": "token-routing", "experts": EXPERTS, **settings})
    graft: Any = build_graft(config, backbone("llama"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    graft.train_on_sets(sets)
    return GraftedModel(backbone("llama"), {"graft": graft}).train()


def rows(text: str) -> Tensor:
    ids = backbone("llama").need_tokenizer()(text, return_tensors="pt")["input_ids"]
    assert isinstance(ids, Tensor)
    return ids[:, :8]


def gradients(model: Any, ids: Tensor, text_set: list[int]) -> dict[str, float]:
    """The sum of the sizes of the gradients of each expert after one pass."""
    model.zero_grad()
    loss = model(ids, labels=ids, extras={"text_set": torch.tensor(text_set)}).loss
    loss.backward()
    graft = model.grafts["graft"]
    sizes = dict.fromkeys(graft.names, 0.0)
    for _, mixture in graft._mixtures_by_path():
        for index, number in enumerate(mixture.layout.experts):
            for factor in (mixture.a[index], mixture.b[index]):
                if factor.grad is not None:
                    sizes[graft.names[number]] += float(factor.grad.abs().sum())
    return sizes


@pytest.mark.parametrize("fixed", [None, {"english": 0.5, "french": 0.5}])
@pytest.mark.parametrize("text", [ENGLISH, FRENCH], ids=["english", "french"])
def test_no_gradient_of_a_sets_rows_reaches_another_expert(text: str, fixed: dict[str, float] | None) -> None:
    """Also where the nearest centroid is that of the other expert, as of a mislabelled document."""
    with trained(["english", "french"], fixed=fixed) as model:
        first = gradients(model, rows(text), [0])
        second = gradients(model, rows(text), [1])
    assert first["french"] == 0 < first["english"]
    assert second["english"] == 0 < second["french"]


def test_sets_in_another_order_than_the_experts() -> None:
    with trained(["french", "english"]) as model:
        assert gradients(model, rows(ENGLISH), [0])["english"] == 0


def test_a_batch_of_both_sets_adds_the_gradients_of_each() -> None:
    both = torch.cat([rows(ENGLISH), rows(FRENCH)])
    with trained(["english", "french"]) as model:
        together = gradients(model, both, [0, 1])
        english = gradients(model, rows(ENGLISH), [0])
        french = gradients(model, rows(FRENCH), [1])
    assert together["english"] == pytest.approx(english["english"] / 2, rel=1e-4)
    assert together["french"] == pytest.approx(french["french"] / 2, rel=1e-4)


def test_the_update_is_that_of_the_one_expert() -> None:
    """In training, a module adds s B A x of the expert of the row's set, with the weight 1."""
    seen: list[Tensor] = []
    ids = rows(ENGLISH)
    with trained(["english", "french"]) as model:
        graft: Any = model.grafts["graft"]
        path, mixture = next(iter(graft._mixtures_by_path()))
        forward = mixture.forward
        mixture.forward = lambda x, routes: seen.extend((x, forward(x, routes))) or seen[-1]
        gradients(model, ids, [1])
        factors = graft.factors("french")[path]
    x, update = seen[:2]
    for token in range(ids.shape[1]):
        expected = reference.update(x[0, token], [1.0], [factors])
        torch.testing.assert_close(update[0, token], expected, rtol=1e-4, atol=1e-5)


def test_rows_without_a_set_train_the_nearest_expert() -> None:
    with trained(["english", "french"]) as model:
        old = gradients(model, rows(FRENCH), [NO_SET])
    assert old["english"] == 0 < old["french"]


def test_inference_follows_the_text() -> None:
    with trained(["english", "french"]) as model, torch.no_grad():
        ids = rows(FRENCH)
        one = model.eval()(ids, extras={"text_set": torch.tensor([0])}).logits
        torch.testing.assert_close(one, model(ids).logits, rtol=1e-4, atol=1e-4)


# The rows of a recipe


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"english": ENGLISH * 30, "french": FRENCH * 10}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {name: str(tmp_path / f"{name}.txt") for name in texts}


WORDS, NUMBERS = ENGLISH * 30, "0123456789" * 60


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_have_text_of_one_set_and_its_number(streaming: bool, tmp_path: Path) -> None:
    new = {}
    own = []
    tokenizer = tiny_tokenizer()
    for name, text in (("words", WORDS), ("numbers", NUMBERS)):
        (tmp_path / name).with_suffix(".txt").write_text(text)
        new[name] = [{"path": str(tmp_path / f"{name}.txt"), "streaming": streaming}]
        own.append(set(tokenizer(text)["input_ids"]) | set(tokenizer.all_special_ids))
    assert own[0] & own[1] == set(tokenizer.all_special_ids)
    old = [{"path": str(tmp_path / "words.txt")}]
    config = DataConfig.parse({"new": new, "old": old, "replay_fraction": 0.25, "length": 16})
    mixture = build_mixture(config, tokenizer, 8, by_set=True)
    counts = [0, 0]
    for step in range(12):
        batch = mixture.batch(step)
        assert batch.text_set is not None
        for row in range(len(batch)):
            number = int(batch.text_set[row])
            assert (number == NO_SET) == (int(batch.domain[row]) == OLD)
            if int(batch.domain[row]) == NEW:
                counts[number] += 1
                assert set(batch.input_ids[row].tolist()) <= own[number]
    sizes = [len(tokenizer(text)["input_ids"]) for text in (WORDS, NUMBERS)]
    share = 0.5 if streaming else sizes[0] / sum(sizes)
    assert counts[0] / sum(counts) == pytest.approx(share, abs=0.1)


def test_batches_have_no_sets_unless_they_are_wanted(files: dict[str, str]) -> None:
    new = {name: [{"path": path}] for name, path in files.items()}
    config = DataConfig.parse({"new": new, "replay_fraction": 0, "length": 16})
    batch = build_mixture(config, tiny_tokenizer(), 4).batch(0)
    assert batch.text_set is None
    assert "extras" not in batch.inputs()


# Which expert trains on which set


@pytest.mark.parametrize("top", [1, 2, 3])
def test_a_recipe_with_more_routes_than_experts_is_refused(top: int) -> None:
    parsed = Recipe.parse(
        {
            "backbone": {"name": "x"},
            "graft": {"kind": "token-routing", "experts": {"a": {"path": "a"}, "b": {"path": "b"}}, "top": top},
            "training": {"steps": 0},
        }
    )
    if top <= 2:
        assert parsed.run().graft == parsed.graft
        return
    with pytest.raises(RecipeError) as caught:
        parsed.run()
    assert "top is 3" in str(caught.value)


def new_expert(**values: object) -> dict[str, object]:
    return {"rank": 2, "targets": ["down_proj"], **values}


def sets_of(experts: dict[str, dict[str, object]], sets: list[str]) -> dict[str, str]:
    return graft_config({"kind": "token-routing", "experts": experts}).set_of_parts(sets)


def test_experts_train_on_the_sets_of_their_names() -> None:
    experts = {"a": new_expert(), "b": new_expert()}
    assert sets_of(experts, ["b", "a"]) == {"a": "a", "b": "b"}
    assert sets_of(experts, []) == {}
    assert sets_of(experts, ["a", "c"]) == {}, "which was routed by centroids before"
    assert sets_of({"a": new_expert(set="c"), "b": new_expert()}, ["b", "c"]) == {"a": "c", "b": "b"}
    frozen = {"a": new_expert(), "b": {"path": "adapters/b"}}
    assert sets_of(frozen, ["a"]) == {"a": "a"}


WRONG: dict[str, tuple[dict[str, dict[str, object]], list[str], str]] = {
    "no such set": ({"a": new_expert(set="x")}, ["a"], "x"),
    "no named sets": ({"a": new_expert(set="x")}, [], "x"),
    "a set of two experts": ({"a": new_expert(set="b"), "b": new_expert()}, ["b"], "b"),
    "a set without an expert": ({"a": new_expert(set="a")}, ["a", "b"], "b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_sets_that_do_not_belong_to_the_experts(case: str) -> None:
    experts, sets, offence = WRONG[case]
    with pytest.raises(RecipeError) as caught:
        sets_of(experts, sets)
    assert offence in str(caught.value)


def test_an_existing_adapter_has_no_set() -> None:
    with pytest.raises(RecipeError) as caught:
        sets_of({"a": {"path": "adapters/a", "set": "a"}}, ["a"])
    assert "set" in str(caught.value)


def recipe(files: dict[str, str], host: Path, out: Path, experts: str, new: str, **data: object) -> Path:
    more = "".join(f"\n  {key}: {json.dumps(value)}" for key, value in data.items())
    path = out / "recipe.yaml"
    path.write_text(
        f"""
backbone: {{name: {host}, device: cpu}}
graft:
  kind: token-routing
  experts: {experts}
data:
  new: {new}
  replay_fraction: 0
  length: 16{more}
training: {{steps: 2, batch_size: 4, learning_rate: 0.01}}
evaluation: {{decode_prompts: 0, own_tokens: 0}}
out: {out / "run"}
"""
    )
    return path


def run_of(path: Path) -> GraftRun:
    parsed: Any = load_recipe(path)
    run = parsed.run()
    assert isinstance(run, GraftRun)
    return run


TWO = "{english: {rank: 2, targets: [down_proj]}, french: {rank: 2, targets: [down_proj]}}"


MISMATCHES = {
    "an expert without a set": (["a", "b", "third"], ["a", "b"], "third"),
    "a set without an expert": (["a", "b"], ["a", "b", "third"], "third"),
    "no sets": (["a", "third"], [], "third"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_only_the_expert_or_set_without_the_other_is_named(case: str) -> None:
    experts, sets, offence = MISMATCHES[case]
    names = dict.fromkeys(experts, ())
    graft: Any = type("Stub", (), {"sources": lambda self: names})()
    new = [SourceConfig(path="x.txt", set=name) for name in sets] or [SourceConfig(path="x.txt")]
    with pytest.raises(RecipeError) as caught:
        example_sources(graft, new, {})
    message = str(caught.value)
    assert offence in message
    assert ("examples" in message) != bool(sets), "with sets, the others lack nothing"


def test_the_examples_of_an_expert_are_the_text_of_its_set(
    files: dict[str, str], tiny_backbone: BackboneFolder, tmp_path: Path
) -> None:
    new = f"{{english: [{{path: {files['english']}}}], french: [{{path: {files['french']}}}]}}"
    path = recipe(files, tiny_backbone("llama"), tmp_path, TWO, new)
    lines: list[str] = []
    run_recipe(load_recipe(path), progress=False, log=lines.append)
    assert any("english on english, french on french" in line for line in lines)


def test_only_runs_that_train_by_set_have_another_key(
    files: dict[str, str], tiny_backbone: BackboneFolder, tmp_path: Path
) -> None:
    host = tiny_backbone("llama")
    listed = f"[{{path: {files['english']}}}, {{path: {files['french']}}}]"
    settings = run_of(recipe(files, host, tmp_path, TWO, listed)).settings()
    assert "by_set" not in settings["data"]
    assert not settings["graft"]["experts"]["english"].keys() & {"set", "experts_in_memory"}
    assert "experts_in_memory" not in settings["graft"]
    named = f"{{english: [{{path: {files['english']}}}], french: [{{path: {files['french']}}}]}}"
    assert run_of(recipe(files, host, tmp_path, TWO, named)).settings()["data"]["by_set"] is True


def test_stateful_rows_have_no_sets(files: dict[str, str], tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    new = f"{{english: [{{path: {files['english']}}}], french: [{{path: {files['french']}}}]}}"
    path = recipe(files, tiny_backbone("llama"), tmp_path, TWO, new, stream=True, boundaries="joined")
    with pytest.raises(RecipeError) as caught:
        run_of(path)
    assert "stream" in str(caught.value)

"""Recipes of rivals from end to end: the anchored loss, own words, own answers, and random augmenting models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data.config import RewriteConfig
from graftlm.data.source_config import SourceConfig
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import RecipeError
from graftlm.evaluation import value_of
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.recipe import Recipe, compare_recipe, run_recipe
from graftlm.runs.rewriting_run import RewritingRun
from graftlm.store.artifact import load_graft, save_graft
from runs.test_recipe import NEW, OLD, values
from tiny import tiny_ids


def chat_recipe(tmp_path: Path, backbone: Path, **data: Any) -> dict[str, Any]:
    rows = []
    for place in ("river", "house", "garden"):
        question = {"role": "user", "content": f"the {place}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"le {place} Tessaby"}]})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    changed = values(tmp_path, backbone, graft={"kind": "lora", "rank": 2})
    changed["data"] |= {
        "new": [{"path": str(path), "messages_column": "messages"}],
        "length": 48,
        "boundaries": "whole",
    }
    changed["data"] |= {"replay_fraction": 0} | data
    changed["training"] |= {"steps": 4}
    changed["evaluation"] = {"decode_prompts": 0, "own_tokens": 0}
    return changed


@pytest.mark.usefixtures("undrawn_figures")
def test_an_anchor_learns_and_loses_less(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "plain": {"graft": {"kind": "lora", "rank": 2}},
        "asft": {"graft": {"kind": "lora", "rank": 2}, "data": {"new_objective": "dft", "anchor": 5.0}},
    }
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods)
    changed["data"] |= {"replay_fraction": 0}
    changed["evaluation"] |= {"decode_prompts": 0}
    results = compare_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    plain, anchored = (results.row(name).metrics for name in methods)
    assert value_of(anchored["new_kl"]) < value_of(plain["new_kl"])
    assert value_of(anchored["own_kl"]) < value_of(plain["own_kl"])


def test_anchors_that_have_no_backbone_to_follow_are_refused(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"))
    changed["data"] |= {"anchor": 0.1}
    for section, change in (
        ("training", {"sharded": True}),
        ("data", {"stream": True, "boundaries": "joined", "replay_fraction": 0}),
    ):
        with pytest.raises(RecipeError) as error:
            Recipe.parse(changed | {section: changed[section] | change})
        assert "anchor" in str(error.value)


@pytest.mark.usefixtures("undrawn_figures")
def test_new_answers_are_learned_in_the_backbone_s_words(
    tmp_path: Path, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_backbone(str(tiny_chat_model)).need_tokenizer()
    calls = []

    def sample(_self: TokenSampler, prompts: list[list[int]], *_: object, **__: object) -> list[list[int]]:
        calls.append(len(prompts))
        answers = ["It is Tessaby.<eos>", "no<eos>", "I say Tessaby.<eos>"]
        return [tokenizer(answers[number], add_special_tokens=False)["input_ids"] for number in range(len(prompts))]

    monkeypatch.setattr(TokenSampler, "sample", sample)
    changed = chat_recipe(tmp_path, tiny_chat_model, rewrite={})
    changed["methods"] = {f"rank-{rank}": {"graft": {"kind": "lora", "rank": rank}} for rank in (1, 2)}
    lines: list[str] = []
    results = compare_recipe(Recipe.parse(changed), progress=False, log=lines.append)
    (folder,) = (tmp_path / "run").glob("own-words-*")
    rows = [json.loads(line) for line in (folder / "new-0.jsonl").read_text(encoding="utf-8").splitlines()]
    learned = [row["messages"][-1]["content"].replace(" ", "") for row in rows]
    assert learned == ["ItisTessaby.", "lehouseTessaby", "IsayTessaby."]
    assert [row["messages"][0]["content"] for row in rows] == ["the river?", "the house?", "the garden?"]
    read: Any = results.details["trained"]
    assert all(read[name]["read"][0]["source"].endswith("new-0.jsonl") for name in changed["methods"])
    assert any("used: 2" in line for line in lines)
    assert sum(calls) == len(rows), "all methods learn the same words"


def test_equal_texts_in_other_folders_are_rewritten_once(tmp_path: Path) -> None:
    def run_id(folder: str, text: str) -> str:
        path = tmp_path / folder / "new.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return RewritingRun.of(BackboneConfig(name="one"), RewriteConfig(), 16, [SourceConfig(path=str(path))]).id

    assert run_id("a", "{}") == run_id("b", "{}")
    assert run_id("a", "{}") != run_id("a", "[]")


@pytest.mark.usefixtures("undrawn_figures")
def test_own_answers_to_the_new_prompts_are_old_rows(tmp_path: Path, tiny_chat_model: Path) -> None:
    old = [{"self": True, "near": "prompts", "tokens": 100, "batch_size": 4, "answer_tokens": 12}]
    recipe = Recipe.parse(chat_recipe(tmp_path, tiny_chat_model, old=old, replay_fraction=0.5))
    results = run_recipe(recipe, progress=False, log=lambda _: None)
    read: Any = results.details["trained"]
    assert {source["domain"] for source in read["lora"]["read"]} == {"old", "new"}
    (file,) = (tmp_path / "run" / "measurements").glob("own-text-*.json")
    metrics = json.loads(file.read_text())["row"]["metrics"]
    assert metrics["tokens"] >= 100
    assert "left_out_long_prompt" in metrics


AUGMENTING = {"random": {"name": "random", "seed": 3}, "vanilla": {"name": "vanilla"}}


@pytest.mark.parametrize("name", AUGMENTING)
def test_controls_of_a_composition(name: str, tmp_path: Path, tiny_backbone) -> None:
    backbone = load_backbone(str(tiny_backbone("llama")))
    config = graft_config({"kind": "composition", "augmenting": {"a": AUGMENTING[name]}, "stride": 1})
    graft = build_graft(config, backbone)
    other = graft.frozen_models()["a"]  # type: ignore[attr-defined]
    assert other.model is not backbone.model
    same = [
        torch.equal(own, their)
        for own, their in zip(backbone.model.parameters(), other.model.parameters(), strict=True)
    ]
    assert all(same) == (name == "vanilla")
    with GraftedModel(backbone, {"graft": graft}) as model, torch.no_grad():
        for block in graft.blocks["a"]:  # type: ignore[index, union-attr]
            block.w_o.weight.normal_(0, 0.1)
        expected = model(input_ids=tiny_ids()).logits
    save_graft(graft, backbone, tmp_path / "graft", training={}, card="")
    loaded = load_graft(tmp_path / "graft", backbone)
    with GraftedModel(backbone, {"graft": loaded}) as model, torch.no_grad():
        torch.testing.assert_close(model(input_ids=tiny_ids()).logits, expected)


def test_a_seed_gives_other_random_weights_and_like_another_shape(tiny_backbone) -> None:
    backbone = load_backbone(str(tiny_backbone("llama")))

    def model(**keys: Any) -> Any:
        section = {"kind": "composition", "augmenting": {"a": {"name": "random", **keys}}, "stride": 1}
        return build_graft(graft_config(section), backbone).frozen_models()["a"]  # type: ignore[attr-defined]

    first, again, other = model(seed=1), model(seed=1), model(seed=2)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert model(like=str(tiny_backbone("qwen2"))).sites.model_type == "qwen2"


@pytest.mark.parametrize("key", [{"like": "x"}, {"seed": 1}])
def test_keys_of_random_models_are_refused_in_others(key: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config({"kind": "composition", "augmenting": {"a": {"name": "vanilla", **key}}})
    assert next(iter(key)) in str(error.value)


def test_other_augmenting_models_keep_their_keys() -> None:
    config = graft_config({"kind": "composition", "augmenting": {"a": {"name": "folder"}}})
    values_of = config.model_dump(mode="json")["augmenting"]["a"]
    assert not {"like", "seed"} & values_of.keys()


def switch(tmp_path: Path) -> dict[str, Any]:
    return {
        "kind": "token-routing",
        "experts": {
            "french": {"rank": 2, "targets": ["ffn"]},
            "english": {"bare": True, "sources": [{"path": str(tmp_path / "old.txt")}]},
        },
        "top": 1,
    }


@pytest.mark.usefixtures("undrawn_figures")
def test_lora_behind_a_switch_leaves_the_other_language(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"), graft=switch(tmp_path))
    changed["data"] |= {"replay_fraction": 0}
    changed["evaluation"] |= {"decode_prompts": 0}
    results = run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    metrics = results.row("token-routing").metrics
    learned = value_of(metrics["learned"])
    assert learned > 0
    # The first tokens of a window may have the wrong route.
    assert abs(value_of(metrics["forgotten"])) < 0.1 * learned
    backbone = load_backbone(str(tiny_backbone("llama")))
    graft = load_graft(tmp_path / "run" / "graft", backbone)
    tokenizer = backbone.need_tokenizer()
    chosen = [graft.choose(tokenizer(text)["input_ids"]) for text in (NEW, OLD)]  # type: ignore[attr-defined]
    assert chosen == ["french", None]


@pytest.mark.parametrize(
    ("expert", "key"),
    [
        ({"bare": True}, "examples"),
        ({"bare": True, "texts": ["a"], "rank": 2}, "rank"),
        ({"bare": True, "texts": ["a"]}, "every expert"),
    ],
)
def test_a_bare_expert_has_examples_and_no_adapter(expert: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config({"kind": "token-routing", "experts": {"a": expert}})
    assert key in str(error.value)
    plain = graft_config({"kind": "token-routing", "experts": {"a": {"rank": 2, "targets": ["ffn"]}}})
    assert "bare" not in plain.model_dump(mode="json")["experts"]["a"]

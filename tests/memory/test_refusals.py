"""The backbones, sizes and passes that a memory accepts; others raise an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cases import thinned
from graftlm.backbone import Backbone, Call
from graftlm.errors import BackboneError, GraftError, RecipeError
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.memory import MemoryConfig, WindowShape
from graftlm.grafts.memory.method import chosen_layers
from graftlm.runs.recipe import Recipe, run_recipe
from memory.tools import REACH, live, memory_model, memory_of
from tests.runs.test_recipe import values
from tiny import tiny_ids, tiny_tokenizer

FITTING = ("llama", "gemma", "qwen2", "qwen3", "phi", "gpt_neox", "olmo", "olmo2", "stablelm", "nemotron", "falcon")
OTHERS = {
    "bert": "encoder",
    "gpt2": "no rotary positions",
    "bloom": "no rotary positions",
    "mistral": "sliding windows",
    "gemma3": "sliding windows",
    "lfm2": "recurrent states",
    "block-state": "no rotary positions",
    "cohere": "rotates its keys",
    "deepseek_v3": "rotates its keys",
}


@pytest.mark.parametrize("family", thinned(OTHERS, {"bert", "gpt2", "mistral", "block-state", "deepseek_v3"}))
def test_other_families_are_refused_by_name(family: str) -> None:
    backbone = live(family)
    with pytest.raises(GraftError) as error:
        build_graft(graft_config({"kind": "memory", "window": 8, "sinks": 2}), backbone)
    assert backbone.sites.model_type in str(error.value)
    assert OTHERS[family] in str(error.value)


def test_positions_that_change_with_the_text_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(GraftError):
        build_graft(graft_config({"kind": "memory", "window": 8, "sinks": 2}), live(rope_parameters=rope))


@pytest.mark.parametrize("family", thinned(FITTING, {"llama", "gemma", "gpt_neox", "stablelm"}))
def test_moved_keys_are_the_backbones_own_at_later_positions(family: str) -> None:
    backbone = live(family)
    ids = tiny_ids(1, 4)
    body: Any = backbone.sites.body
    shape = WindowShape(window=3, sinks=2, reach=12, frequencies=body.rotary_emb.inv_freq)
    keys = []
    for start in (0, 2 * shape.step):
        positions = torch.arange(start, start + 4)[None]
        cache: Any = DynamicCache(config=backbone.model.config)
        with torch.no_grad():
            backbone.model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
        keys.append(cache.layers[0].keys)
    torch.testing.assert_close(shape.moved(keys[0], torch.tensor([2])), keys[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"layers": [0, 2]}, ["layers is [0, 2]", "0 to 1"]),
        ({"layers": [0, 0]}, ["layers is [0, 0]", "0 to 1"]),
        ({"layers": 0}, ["layers is 0", "0 to 1"]),
        ({"layers": 3}, ["layers is 3", "0 to 1"]),
        ({"window": 510}, ["510", "reach", "512"]),
        ({"reach": 8}, ["window is 6", "sinks is 2", "reach", "8"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(GraftError) as error:
        memory_model(live(), **config)
    for part in named:
        assert part in str(error.value)


def assert_beyond_the_reach(error: pytest.ExceptionInfo[GraftError]) -> None:
    for part in ("17 tokens", "16 positions", "at most 8 tokens"):
        assert part in str(error.value)


def test_texts_beyond_the_reach_need_a_cache_and_pieces() -> None:
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        for options in ({}, {"use_cache": True}):
            with pytest.raises(GraftError) as error:
                model(tiny_ids(1, 17), **options)
            assert_beyond_the_reach(error)
        cache = model(tiny_ids(1, 16), use_cache=True).past_key_values
        assert model(tiny_ids(1, 8), past_key_values=cache, use_cache=True).logits.isfinite().all()
        with pytest.raises(GraftError) as error:
            model.generate(tiny_ids(1, 14), max_new_tokens=8, min_new_tokens=8, cache_implementation="static")
        assert_beyond_the_reach(error)
    with memory_model(live(), sinks=0, reach=REACH) as model, torch.no_grad():
        assert model(tiny_ids(1, 17)).logits.isfinite().all()


def test_rows_that_a_window_holds_are_refused_before_the_backbone_is_loaded(tmp_path: Path) -> None:
    changed = values(tmp_path, tmp_path / "nowhere", graft={"kind": "memory", "window": 14, "sinks": 2})
    with pytest.raises(RecipeError) as error:
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert "data.length" in str(error.value)
    MemoryConfig(window=14, sinks=2).check_rows(17)
    MemoryConfig(window=14, sinks=2, state="none").check_rows(16)
    # Rows of a stream continue those of the step before.
    changed["data"] |= {"stream": True, "replay_fraction": 0, "old": [], "boundaries": "joined"}
    with pytest.raises(BackboneError, match="nowhere"):
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)


def test_two_windows_of_other_sizes_are_refused() -> None:
    backbone = live()
    with memory_model(backbone) as model:
        cache = model(tiny_ids(1, 5), use_cache=True).past_key_values
    with memory_model(backbone, window=7) as model:
        with pytest.raises(GraftError) as error:
            memory_of(model).prepare(Call(tiny_ids(1, 5), cache=cache))
        assert "window 6" in str(error.value)
        assert "window 7" in str(error.value)


def test_tokens_that_left_the_window_do_not_come_back() -> None:
    with memory_model(live(), state="none") as model, pytest.raises(GraftError, match="prompt_lookup_num_tokens"):
        model.generate(tiny_ids(1, 12).repeat(1, 2), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)


def test_the_layers_and_the_reach_are_kept_with_the_graft() -> None:
    with memory_model(live(num_hidden_layers=10), layers=2) as model:
        config = memory_of(model).config
    assert config.layers == [8, 9]
    assert config.reach == 512


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, [8]), (3, [7, 8, 9]), (6, [4, 5, 6, 7, 8, 9]), (10, [*range(10)])]
)
def test_so_many_layers_are_the_last_ones(layers: int, expected: list[int]) -> None:
    assert chosen_layers(MemoryConfig(window=6, layers=layers), 10) == expected


def test_packed_documents_beyond_the_reach_are_refused() -> None:
    positions = torch.cat([torch.arange(12), torch.arange(17)])[None]
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        with pytest.raises(GraftError) as error:
            model(tiny_ids(1, 29), position_ids=positions, use_cache=False)
        assert_beyond_the_reach(error)
        assert model(tiny_ids(1, 28), position_ids=positions[:, :28], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("state", ["delta", "none"])
def test_embeddings_and_masks_with_gaps_are_refused(state: str) -> None:
    ids = tiny_ids(1, 9)
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, 4] = 0
    with memory_model(live(), state=state) as model, torch.no_grad():
        with pytest.raises(GraftError) as error:
            model(inputs_embeds=model.get_input_embeddings()(ids))
        assert "input_ids" in str(error.value)
        with pytest.raises(GraftError) as error:
            model(ids, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)
        assert "mask" in str(error.value)


def test_heads_without_a_vector_for_each_token_are_refused() -> None:
    backbone = live()
    model: Any = backbone.model
    head = model.lm_head
    model.lm_head = torch.nn.Linear(48, 20, bias=False)
    with pytest.raises(GraftError) as error:
        memory_model(backbone)
    assert "304 tokens" in str(error.value)
    assert "(20, 48)" in str(error.value)
    with memory_model(backbone, state="none") as grafted:
        assert not grafted.trainable_parameters()
    model.lm_head = head
    headless = Backbone.wrap(model.model, tiny_tokenizer(), "headless")
    with pytest.raises(GraftError) as error:
        memory_model(headless)
    assert "no output head" in str(error.value)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_backbone_and_graft_may_have_other_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    of_backbone, of_graft = dtypes
    backbone = live()
    model: Any = backbone.model
    model.to(of_backbone)
    with memory_model(backbone) as grafted, torch.no_grad():
        memory_of(grafted).to(of_graft)
        output = grafted(tiny_ids(1, 12)).logits
    assert output.dtype == of_backbone
    assert output.isfinite().all()

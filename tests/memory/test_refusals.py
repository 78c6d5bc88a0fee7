"""Which backbones, sizes and passes a memory takes; the others are refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

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
    "bert": "is an encoder",
    "gpt2": "has no rotary positions",
    "bloom": "has no rotary positions",
    "mistral": "has layers with a window or a state of their own",
    "gemma3": "has layers with a window or a state of their own",
    "lfm2": "has layers with a window or a state of their own",
    "block-state": "has no rotary positions",
    "cohere": "rotates its keys in another way than Llama",
    "deepseek_v3": "rotates its keys in another way than Llama",
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_refused_by_name(family: str) -> None:
    with pytest.raises(GraftError, match=f"but this [\\w-]+ model {OTHERS[family]}: choose another backbone"):
        build_graft(graft_config({"kind": "memory", "window": 8, "sinks": 2}), live(family))


def test_positions_that_change_with_the_text_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(GraftError, match="this llama model has rotary positions that change with the length"):
        build_graft(graft_config({"kind": "memory", "window": 8, "sinks": 2}), live(rope_parameters=rope))


@pytest.mark.parametrize("family", FITTING)
def test_moved_keys_are_the_backbones_own_at_later_positions(family: str) -> None:
    backbone, ids = live(family), tiny_ids(1, 4)
    body: Any = backbone.sites.body
    shape, keys = WindowShape(3, 2, 12, body.rotary_emb.inv_freq), []
    for start in (0, 2 * (12 - 5)):
        positions = torch.arange(start, start + 4)[None]
        cache: Any = DynamicCache(config=backbone.model.config)
        with torch.no_grad():
            backbone.model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
        keys.append(cache.layers[0].keys)
    torch.testing.assert_close(shape.moved(keys[0], torch.tensor([2])), keys[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers": [0, 2]}, r"layers is \[0, 2\], but the backbone has layers 0 to 1"),
        ({"layers": [0, 0]}, r"layers is \[0, 0\], but the backbone has layers 0 to 1"),
        ({"layers": 0}, "layers is 0, but the backbone has layers 0 to 1"),
        ({"layers": 3}, r"layers is 3, but the backbone has layers 0 to 1"),
        ({"window": 510}, "A window of 510 tokens and 2 sinks need more than the 512 positions of reach"),
        ({"reach": 8}, "A window of 6 tokens and 2 sinks need more than the 8 positions of reach"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(GraftError, match=message):
        memory_model(live(), **config)


def test_texts_beyond_the_reach_need_a_cache_and_pieces() -> None:
    refused = r"A text of 17 tokens is longer than the 16 positions .* in pieces of at most 8 tokens, or set sinks to 0"
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        with pytest.raises(GraftError, match=refused):
            model(tiny_ids(1, 17))
        with pytest.raises(GraftError, match=refused):
            model(tiny_ids(1, 17), use_cache=True)
        cache = model(tiny_ids(1, 16), use_cache=True).past_key_values
        assert model(tiny_ids(1, 8), past_key_values=cache, use_cache=True).logits.isfinite().all()
        with pytest.raises(GraftError, match="longer than the 16 positions"):
            model.generate(tiny_ids(1, 14), max_new_tokens=8, min_new_tokens=8, cache_implementation="static")
    with memory_model(live(), sinks=0, reach=REACH) as model, torch.no_grad():
        assert model(tiny_ids(1, 17)).logits.isfinite().all()


def test_rows_that_a_window_holds_are_refused_before_the_backbone_is_loaded(tmp_path: Path) -> None:
    changed = values(tmp_path, tmp_path / "nowhere", graft={"kind": "memory", "window": 14, "sinks": 2})
    refused = "Rows of 16 tokens are no longer than the window of 14 and its 2 sinks, so .*: raise data.length"
    with pytest.raises(RecipeError, match=refused):
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    for config, length in (({"window": 14, "sinks": 2}, 17), ({"window": 14, "sinks": 2, "state": "none"}, 16)):
        MemoryConfig(**config).check_rows(length)
    streamed = {"stream": True, "replay_fraction": 0, "old": [], "boundaries": "joined"}
    changed["data"] |= streamed  # rows go on from step to step
    with pytest.raises(BackboneError, match="nowhere"):
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)


def test_two_windows_of_other_sizes_are_refused() -> None:
    backbone = live()
    with memory_model(backbone) as model:
        cache = model(tiny_ids(1, 5), use_cache=True).past_key_values
    with (
        memory_model(backbone, window=7) as model,
        pytest.raises(GraftError, match=r"The cache has WindowShape\(window=6, sinks=2, reach=512\), but this"),
    ):
        memory_of(model).prepare(Call(tiny_ids(1, 5), cache=cache))


def test_tokens_that_left_the_window_do_not_come_back() -> None:
    with memory_model(live(), state="none") as model, pytest.raises(GraftError, match="left a window can't come back"):
        model.generate(tiny_ids(1, 12).repeat(1, 2), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)


def test_the_layers_and_the_reach_are_kept_with_the_graft() -> None:
    with memory_model(live(num_hidden_layers=10), layers=2) as model:
        config = memory_of(model).config
    assert (config.layers, config.reach) == ([8, 9], 512)


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, [8]), (3, [7, 8, 9]), (6, [4, 5, 6, 7, 8, 9]), (10, [*range(10)])]
)
def test_so_many_layers_are_the_last_ones(layers: int, expected: list[int]) -> None:
    assert chosen_layers(MemoryConfig(window=6, layers=layers), 10) == expected


def test_packed_documents_beyond_the_reach_are_refused() -> None:
    positions = torch.cat([torch.arange(12), torch.arange(17)])[None]
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        with pytest.raises(GraftError, match="A text of 17 tokens is longer than the 16 positions"):
            model(tiny_ids(1, 29), position_ids=positions, use_cache=False)
        assert model(tiny_ids(1, 28), position_ids=positions[:, :28], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("state", ["delta", "none"])
def test_embeddings_and_masks_with_gaps_are_refused(state: str) -> None:
    ids, mask = tiny_ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[0, 4] = 0
    with memory_model(live(), state=state) as model, torch.no_grad():
        with pytest.raises(GraftError, match="A memory remembers tokens: pass input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids))
        with pytest.raises(GraftError, match="hides tokens behind a row's first token"):
            model(ids, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)


def test_heads_without_a_vector_for_each_token_are_refused() -> None:
    backbone = live()
    model: Any = backbone.model
    head, model.lm_head = model.lm_head, torch.nn.Linear(48, 20, bias=False)
    with pytest.raises(GraftError, match=r"a vector for each of 304 tokens, but found .* of the shape \(20, 48\)"):
        memory_model(backbone)
    with memory_model(backbone, state="none") as grafted:
        assert not grafted.trainable_parameters()
    model.lm_head = head
    headless = Backbone.wrap(model.model, tiny_tokenizer(), "headless")
    with pytest.raises(GraftError, match="304 tokens, but found no head"):
        memory_model(headless)


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

"""Experts that are read when a route needs them: the outputs are those of all experts in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import graft_config
from graftlm.grafts.token_routing.expert_store import ExpertStore
from graftlm.store.artifact import load_graft, save_graft
from tiny import tiny_ids
from token_routing import reference
from token_routing.tools import backbone, generate, routing, write_adapters

WORDS = ["fox", "dog", "def", "return", "renard", "chien", "maison", "class", "import", "lambda", "table", "chaise"]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of eight adapters of several ranks and modules."""
    chosen = {}
    for number in range(8):
        targets = ["q_proj", "down_proj"] if number % 2 else ["v_proj", "down_proj", "up_proj"]
        chosen[f"e{number}"] = {"r": 2 + number % 3, "lora_alpha": 4, "target_modules": targets}
    return write_adapters("llama", tmp_path_factory.mktemp("many"), chosen)


def routed(folders: dict[str, str], memory: int | None, **settings: Any) -> GraftedModel:
    """A routing by the last token alone, so that nearly every token has other experts."""
    examples = {name: [f"{WORDS[n]} {WORDS[n]}"] for n, name in enumerate(folders)}
    experts = {name: {"path": folder, "texts": examples[name]} for name, folder in folders.items()}
    values: dict[str, Any] = {"window": 2, "every": 1, "top": 2, "prompt": "whole", "temperature": 0.3, **settings}
    if memory is not None:
        values["experts_in_memory"] = memory
    return routing("llama", folders, **{"experts": experts, **values})


def store_of(model: GraftedModel) -> ExpertStore:
    graft: Any = model.grafts["graft"]
    assert isinstance(graft.store, ExpertStore)
    return graft.store


def prompts() -> Tensor:
    """Three rows, whose tokens differ."""
    return torch.cat([tiny_ids(3, 7)])


@pytest.mark.parametrize("memory", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top": 1},
        {"prompt": "causal"},
        {"cache": "recompute"},
        {"threshold": 0.2},
    ],
    ids=["top 2", "top 1", "causal", "recompute", "threshold"],
)
def test_decoding_and_prefill_are_those_of_all_experts_in_memory(
    memory: int, settings: dict[str, Any], many: dict[str, str]
) -> None:
    """Rows of one batch have different experts, more of them than stay in memory."""
    ids = prompts()
    with routed(many, None, **settings) as model:
        expected = generate(model, ids)
        weights = model.cache_traces(expected.past_key_values)["graft"].values
    experts_used = (weights[..., :-1] != 0).flatten(0, 1).any(0).sum()
    assert experts_used > memory, "evictions are forced"
    with routed(many, memory, **settings) as model:
        actual = generate(model, ids)
        store = store_of(model)
        assert store.reads > experts_used, "experts were read again"
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), **CLOSE)


def test_rows_of_one_batch_have_different_experts(many: dict[str, str]) -> None:
    with routed(many, 1) as model:
        output = generate(model, prompts())
        weights = model.cache_traces(output.past_key_values)["graft"].values
    assert (weights[0] != weights[1]).any()
    together = (weights[:, -1, :-1] != 0).any(0).sum()
    assert together > 2


def test_the_update_is_the_literal_sum(many: dict[str, str]) -> None:
    with routed(many, 1) as model, torch.no_grad():
        graft: Any = model.grafts["graft"]
        seen: dict[str, Any] = {}
        path, projection = next((p, m) for p, m in graft._mixtures_by_path() if p.endswith("down_proj"))
        forward = projection.forward

        def record(x: Tensor, routes: Any) -> Tensor | None:
            update = forward(x, routes)
            seen.update(x=x, weights=routes.weights, update=update)
            return update

        projection.forward = record
        model(prompts(), prompt=torch.ones_like(prompts(), dtype=torch.bool))
        experts = [graft.factors(name)[path] for name in graft.names]
    for row in range(3):
        expected = reference.update(seen["x"][row, -1], seen["weights"][row, -1].tolist(), experts)
        torch.testing.assert_close(seen["update"][row, -1], expected, **CLOSE)


def test_memory_is_bounded_and_only_routed_experts_are_read(many: dict[str, str]) -> None:
    with routed(many, 3, top=1) as model, torch.no_grad():
        store = store_of(model)
        assert store.in_memory == frozenset(), "nothing is read before a route"
        tokenizer = backbone("llama").need_tokenizer()
        for number, word in enumerate(WORDS[:8]):
            ids = tokenizer(f"{word} {word}", return_tensors="pt")["input_ids"]
            before = store.reads
            model(ids, prompt=torch.ones_like(ids, dtype=torch.bool))
            assert store.reads <= before + 1
            assert len(store.in_memory) <= 3
            model(ids, prompt=torch.ones_like(ids, dtype=torch.bool))
            assert store.reads <= before + 1, f"expert {number} was in memory"
        assert not list(model.grafts["graft"].parameters())
        size = store.bytes_in_memory
        largest = max(file.stat().st_size for folder in many.values() for file in Path(folder).glob("*.safetensors"))
        assert 0 < size < 4 * largest, "three experts, and a copy of the one that acts"


def test_stored_parameters_are_those_of_all_experts(many: dict[str, str]) -> None:
    with routed(many, None) as model:
        expected = sum(parameter.numel() for parameter in model.grafts["graft"].parameters())
        assert model.grafts["graft"].stored_parameters == 0
    with routed(many, 1) as model:
        assert model.grafts["graft"].stored_parameters == expected


def test_the_least_recently_used_expert_is_dropped_first(many: dict[str, str]) -> None:
    with routed(many, 2) as model:
        store = store_of(model)
        for number in (0, 1, 0, 2):
            store.hold([number])
        assert store.in_memory == {0, 2}
        assert store.reads == 3
        store.hold([0, 1, 2])
        assert store.in_memory == {0, 1, 2}, "a pass holds all of its experts"
        store.hold([3])
        assert len(store.in_memory) == 2


def test_passes_of_several_threads_share_the_experts(many: dict[str, str]) -> None:
    rows = prompts()
    with routed(many, None) as model, torch.no_grad():
        expected = [model(row[None], prompt=torch.ones_like(row[None]).bool()).logits for row in rows]
    with routed(many, 1) as model:
        store = store_of(model)
        problems: list[str] = []

        def hold(number: int) -> None:
            for turn in range(50):
                needed = {(number + turn) % 8, (number + turn + 3) % 8}
                held = store.hold(needed)
                if held.factors.keys() != needed:
                    problems.append(f"{held.factors.keys()} for {needed}")

        threads = [threading.Thread(target=hold, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        with torch.no_grad():
            actual = [model(row[None], prompt=torch.ones_like(row[None]).bool()).logits for row in rows]
    torch.testing.assert_close(actual, expected, **CLOSE)


# Files that change while the graft runs


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def replace(file: Path) -> None:
    save_file({key: value + 1 for key, value in load_file(file).items()}, file)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, replace, remove])
def test_a_file_that_changes_is_an_error_and_no_other_expert_takes_its_place(damage: Any, tmp_path: Path) -> None:
    chosen = {f"e{n}": {"r": 2, "target_modules": ["down_proj"]} for n in range(3)}
    folders = write_adapters("llama", tmp_path, chosen)
    with routed(folders, 1, top=1) as model, torch.no_grad():
        store = store_of(model)
        store.hold([0])
        file = Path(folders["e1"]) / "adapter_model.safetensors"
        saved = file.read_bytes()
        damage(file)
        tokenizer = backbone("llama").need_tokenizer()
        ids = tokenizer(f"{WORDS[1]} {WORDS[1]}", return_tensors="pt")["input_ids"]
        marks = {"prompt": torch.ones_like(ids, dtype=torch.bool)}
        for _ in range(2):
            with pytest.raises(ArtifactError) as caught:
                model(ids, **marks)
            assert "expert e1" in str(caught.value)
            assert "\n" not in str(caught.value)
        other = tokenizer(f"{WORDS[2]} {WORDS[2]}", return_tensors="pt")["input_ids"]
        model(other, prompt=torch.ones_like(other, dtype=torch.bool))
        file.write_bytes(saved)
        assert model(ids, **marks).logits.isfinite().all(), "restored"


# The rest of the graft


def test_a_saved_graft_reads_its_experts_again(many: dict[str, str], tmp_path: Path) -> None:
    with routed(many, 2) as model, torch.no_grad():
        expected = model(prompts(), use_cache=False).logits
        save_graft(model.grafts["graft"], backbone("llama"), tmp_path / "graft")  # type: ignore[arg-type]
    again = load_graft(tmp_path / "graft", backbone("llama"))
    with GraftedModel(backbone("llama"), {"graft": again}) as model, torch.no_grad():
        assert store_of(model).limit == 2
        torch.testing.assert_close(model(prompts(), use_cache=False).logits, expected, **CLOSE)


def test_a_fixed_mixture_is_merged_from_read_experts(many: dict[str, str]) -> None:
    settings = {"fixed": {"e1": 0.4, "e6": 0.5}, "top": None}
    merged = []
    for memory in (None, 1):
        with routed(many, memory, **settings) as model:
            graft: Any = model.grafts["graft"]
            with torch.no_grad():
                logits = model(prompts(), use_cache=False).logits
        with torch.no_grad():
            copied = graft.merged(backbone("llama"))(prompts(), use_cache=False).logits
        torch.testing.assert_close(copied, logits, rtol=1e-3, atol=1e-4)
        merged.append(copied)
        updates = graft.low_rank_updates(backbone("llama"))
        assert {path.rsplit(".", 1)[1] for path in updates} == {"q_proj", "v_proj", "up_proj", "down_proj"}
    torch.testing.assert_close(merged[0], merged[1], **CLOSE)


def test_a_written_expert_is_the_read_one(many: dict[str, str], tmp_path: Path) -> None:
    with routed(many, 1) as model:
        graft: Any = model.grafts["graft"]
        graft.write_adapter("e4", tmp_path / "copy")
    saved = load_file(Path(many["e4"]) / "adapter_model.safetensors")
    copied = load_file(tmp_path / "copy" / "adapter_model.safetensors")
    assert saved.keys() == copied.keys()
    for key, value in saved.items():
        torch.testing.assert_close(copied[key], value)


ADAPTER = {"path": "adapters/a", "texts": ["fox"]}
WRONG = {
    "a new expert": ({"experts": {"a": {"rank": 1, "targets": ["ffn"]}}, "top": 1}, "expert a"),
    "a bundle": ({"experts": {"a": ADAPTER}, "top": 1, "bundle": True}, "bundle"),
    "all experts for each token": ({"experts": {"a": ADAPTER}}, "top"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_need_all_experts(case: str) -> None:
    settings, offence = WRONG[case]
    with pytest.raises(RecipeError) as caught:
        graft_config({"kind": "token-routing", "experts_in_memory": 2, **settings})
    assert offence in str(caught.value)


def test_a_damaged_adapter_is_found_when_the_graft_is_built(tmp_path: Path) -> None:
    folders = write_adapters("llama", tmp_path, {"e0": {"r": 2, "target_modules": ["down_proj"]}})
    truncate(Path(folders["e0"]) / "adapter_model.safetensors")
    with pytest.raises(GraftError) as caught:
        routed(folders, 1, top=1)
    assert "e0" in str(caught.value)

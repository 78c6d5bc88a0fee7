"""A folder of `graft grow` as a whole: served, generated from and exported as the model after a stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from torch import Tensor

from cli.tools import invoke
from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import ArtifactError
from graftlm.generation.sums import read_summands, sum_of_grafts
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.app import create_app
from graftlm.serving.service import Service, open_service
from graftlm.store.artifact import load_grafts, save_graft
from graftlm.store.manifest import read_manifest
from graftlm.store.stages import chosen_graft, load_model_of, stages_in
from graftlm.testing import attach_graft, logits, randomise
from tiny import BackboneFolder, tiny_ids

RECIPE = "stages:\n  first: {data: {}}\n  second: {data: {}}\n"
RESIDUES = {"kind": "neutral-residues", "width": 4}
ADAPTER = {"kind": "adapter", "width": 5}
LORA = {"kind": "lora", "rank": 2}


def grow(folder: Path, backbone: Backbone, first: dict[str, object], second: dict[str, object]) -> None:
    """Write what `graft grow` writes, without training."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    for name, config, training in (("first", first, {}), ("second", second, {"trained_after": ["first"]})):
        with randomise(attach_graft(backbone, config).eval(), 0.3, seed=len(name)) as model:
            graft = model.grafts["graft"]
        save_graft(graft, backbone, folder / name / "graft", training=training)  # type: ignore[arg-type]


def expected(folder: Path, backbone: Backbone, stage: str) -> Tensor:
    with GraftedModel(backbone, load_grafts(folder / stage / "graft", backbone)) as model:
        return logits(model.eval(), tiny_ids())


@pytest.fixture
def host(tiny_backbone: BackboneFolder) -> Backbone:
    return load_backbone(tiny_backbone("llama"))


@pytest.fixture(params=[(RESIDUES, ADAPTER), (LORA, RESIDUES)], ids=["adapters", "lora first"])
def grown(request: pytest.FixtureRequest, tmp_path: Path, host: Backbone) -> Path:
    grow(tmp_path / "run", host, *request.param)
    return tmp_path / "run"


def test_a_stage_is_one_graft_with_those_before_it(grown: Path, host: Backbone) -> None:
    for stage in ("first", "second"):
        with GraftedModel(host, {"one": load_model_of(grown / stage / "graft", host)}) as model:
            found = logits(model.eval(), tiny_ids())
        torch.testing.assert_close(found, expected(grown, host, stage), rtol=1e-4, atol=1e-5)
    assert (expected(grown, host, "first") - expected(grown, host, "second")).abs().max() > 1e-3


def test_the_whole_folder_is_its_last_stage(grown: Path) -> None:
    assert list(stages_in(grown)) == ["first", "second"]
    assert chosen_graft(grown) == grown / "second" / "graft"
    assert chosen_graft(grown / "first") == grown / "first" / "graft"
    for file in (grown / "second" / "graft").iterdir():
        file.unlink()
    with pytest.raises(ArtifactError) as error:
        chosen_graft(grown)
    assert "second" in str(error.value)


def answers(service: Service, ask: Callable[[TestClient], object]) -> object:
    try:
        with TestClient(create_app(service), base_url="http://localhost") as client:
            return ask(client)
    finally:
        service.engine.close(0)


def test_the_model_after_each_stage_is_served_under_its_name(grown: Path, host: Backbone) -> None:
    body = {"prompt": "the fox", "max_tokens": 3, "temperature": 0, "logprobs": 1}

    def ask(client: TestClient) -> dict[str, object]:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        found = {name: client.post("/v1/completions", json=body | {"model": name}).json() for name in names[1:]}
        traced = client.post("/v1/completions", json=body | {"model": "second", "graftlm": {"trace": True}}).json()
        return {"names": names, "found": found, "traced": traced}

    found = answers(open_service(host, folder=grown, name="tiny"), ask)
    assert isinstance(found, dict)
    assert found["names"] == ["tiny", "first", "second"]
    ids = host.need_tokenizer()("the fox", return_tensors="pt")["input_ids"]
    for stage in ("first", "second"):
        with GraftedModel(host, load_grafts(grown / stage / "graft", host)) as model:
            best = logits(model.eval(), ids)[0, -1].log_softmax(-1).max()
        (choice,) = found["found"][stage]["choices"]
        assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(float(best), abs=1e-3)
    values = found["traced"]["choices"][0]["graftlm"]["trace"][0]["values"]
    assert any(label.startswith(("first: ", "second: ")) for label in values)


def test_a_stage_is_no_part_of_a_sum(grown: Path, host: Backbone) -> None:
    body = {"prompt": "the fox", "max_tokens": 1, "model": "first+second"}
    service = open_service(host, folder=grown, name="tiny")
    status = answers(service, lambda client: client.post("/v1/completions", json=body).status_code)
    assert status == 400


def test_the_weight_of_a_stage_is_that_of_all_grafts_up_to_it(tmp_path: Path, host: Backbone) -> None:
    grow(tmp_path / "run", host, RESIDUES, ADAPTER)
    stage = tmp_path / "run" / "second" / "graft"
    ids = host.need_tokenizer()("the fox", return_tensors="pt")["input_ids"]
    with GraftedModel(host, load_grafts(stage, host), weights={"first": 0.5, "graft": 0.5}) as model:
        wanted = logits(model.eval(), ids)
    with sum_of_grafts(read_summands(f"{tmp_path}/run/second:0.5"), host) as model:
        torch.testing.assert_close(logits(model.eval(), ids), wanted, rtol=1e-4, atol=1e-5)
    body = {"prompt": "the fox", "max_tokens": 1, "temperature": 0, "logprobs": 1, "model": "second:0.5"}
    service = open_service(host, folder=tmp_path / "run", name="tiny")
    answer = answers(service, lambda client: client.post("/v1/completions", json=body).json())
    assert isinstance(answer, dict)
    (found,) = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert found == pytest.approx(float(wanted[0, -1].log_softmax(-1).max()), abs=1e-3)


def test_generate_takes_a_weight_of_a_stage_and_no_sum_with_it(grown: Path) -> None:
    alone = invoke("generate", f"{grown}/second/graft:0.5", "the fox", "--max-new-tokens", "3", "--trace", "--json")
    assert json.loads(alone.out)["weights"] == {"second": 0.5}, alone.err
    together = invoke("generate", f"{grown}/first+{grown}/second", "the fox", "--max-new-tokens", "3")
    assert together.code == 2
    assert str(grown / "second") in together.err


def test_a_given_folder_is_the_last_stage(grown: Path, host: Backbone) -> None:
    service = open_service(host, {"all": grown}, name="tiny")
    assert answers(service, lambda client: service.engine.names) == ("tiny", "all")
    assert service.store.entries()["all"].folder == grown / "second" / "graft"


def test_a_changed_earlier_stage_is_loaded_again(grown: Path, host: Backbone) -> None:
    service = open_service(host, folder=grown, name="tiny")
    service.engine.close(0)
    loads: list[str] = []
    service.store.refresh(lambda name, graft: loads.append(name))
    assert not loads
    config = read_manifest(grown / "first" / "graft").graft_config().model_dump()
    with randomise(attach_graft(host, config).eval(), 0.1) as model:
        changed = model.grafts["graft"]
    save_graft(changed, host, grown / "first" / "graft")  # type: ignore[arg-type]
    service.store.refresh(lambda name, graft: loads.append(name), now=True)
    assert sorted(loads) == ["first", "second"]


def test_a_missing_earlier_stage_is_waited_for(grown: Path, host: Backbone) -> None:
    shutil.move(grown / "first", grown.parent / "elsewhere")
    service = open_service(host, folder=grown, name="tiny")
    service.engine.close(0)
    assert list(service.store.problems()) == ["second"]
    assert str(grown / "first") in service.store.problems()["second"]
    shutil.move(grown.parent / "elsewhere", grown / "first")
    loads: list[str] = []
    for _ in range(3):
        service.store.refresh(lambda name, graft: loads.append(name))
    assert sorted(loads) == ["first", "second"]


def test_a_stage_with_the_name_of_a_path_is_refused(grown: Path, host: Backbone) -> None:
    file = grown / "second" / "graft" / "graft.json"
    manifest = json.loads(file.read_text())
    manifest["training"]["trained_after"] = ["../run/first"]
    file.write_text(json.dumps(manifest))
    service = open_service(host, folder=grown, name="tiny")
    service.engine.close(0)
    assert list(service.store.problems()) == ["second"]


def test_generate_takes_the_whole_folder(grown: Path) -> None:
    whole = invoke("generate", str(grown), "the fox", "--max-new-tokens", "3", "--json")
    last = invoke("generate", str(grown / "second/graft"), "the fox", "--max-new-tokens", "3", "--json")
    assert json.loads(whole.out)["text"] == json.loads(last.out)["text"]


def test_stages_of_adapters_are_exported_as_one_model(tmp_path: Path, host: Backbone) -> None:
    from transformers import AutoModelForCausalLM

    grow(tmp_path / "run", host, RESIDUES, ADAPTER)
    for place, stage in (("run", "second"), ("run/first", "first")):
        outcome = invoke("export", str(tmp_path / place), "--to", str(tmp_path / f"{stage}-model"))
        assert outcome.code == 0, outcome.err
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"{stage}-model", trust_remote_code=True).eval()
        found = logits(loaded, tiny_ids())
        torch.testing.assert_close(found, expected(tmp_path / "run", host, stage), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("to", ["model", "model.gguf"])
def test_stages_of_other_kinds_are_not_exported(to: str, tmp_path: Path, host: Backbone) -> None:
    grow(tmp_path / "run", host, LORA, RESIDUES)
    outcome = invoke("export", str(tmp_path / "run"), "--to", str(tmp_path / to))
    assert outcome.code == 2
    assert "first" in outcome.err
    assert not (tmp_path / to).exists()


def test_a_stage_that_replaces_the_weights_is_not_served(tmp_path: Path, host: Backbone) -> None:
    grow(tmp_path / "run", host, {"kind": "finetune"}, RESIDUES)
    with pytest.raises(ArtifactError) as error:
        load_model_of(tmp_path / "run/second/graft", host)
    assert "first" in str(error.value)


def test_a_single_graft_stays_itself(tmp_path: Path, host: Backbone) -> None:
    graft: Graft = build_graft(graft_config(ADAPTER), host)
    save_graft(graft, host, tmp_path / "run" / "graft")
    assert type(load_model_of(tmp_path / "run" / "graft", host)) is type(graft)

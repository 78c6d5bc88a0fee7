"""Laws 5 and 11: a saved graft gives the same logits in a fresh process, and a damaged one is refused."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import rotated
from graftlm.backbone import FAMILIES, Backbone, load_backbone, register_family
from graftlm.errors import ArtifactError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.store.artifact import backbone_of, load_graft, save_graft
from graftlm.store.manifest import read_manifest
from graftlm.testing import logits, randomise
from laws.cover import marks
from laws.examples import HOSTED, Example, backbone, examples, first_example
from laws.tools import graft_onto
from tiny import LAW_DECODERS, BackboneFolder, save_tiny_backbone, tiny_ids, tiny_model

NAMES = (*LAW_DECODERS, "bert", *HOSTED)
TESTS = Path(__file__).parents[1]


def _cases() -> Iterator[Any]:
    for example in examples():
        for name in NAMES:
            if example.exception(name) is None:
                yield pytest.param(example, name, id=f"{example}-{name}", marks=marks(example, name, "reloaded"))


@pytest.fixture(scope="module")
def reloaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Case -> the logits before saving, and those of a fresh process; of the cases that this run has selected."""
    root, folders = tmp_path_factory.mktemp("reloaded"), tmp_path_factory.mktemp("backbones")
    params = [item.callspec.params for item in request.session.items if "reloaded" in getattr(item, "fixturenames", ())]
    before = {}
    for example, name in ((chosen["example"], chosen["name"]) for chosen in params):
        case = root / f"{example}-{name}"
        case.mkdir()
        stored = "+" not in name
        if stored and not (folders / name).exists():
            save_tiny_backbone(folders / name, name)
        (case / "backbone").write_text(str(folders / name) if stored else name, encoding="utf-8")
        with randomise(graft_onto(backbone(name), example), example.spread).eval() as model:
            before[case.name] = logits(model, tiny_ids())
            save_graft(model.grafts["graft"], backbone(name), case / "graft")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    run = subprocess.run(
        [sys.executable, "-m", "laws.reload", str(root)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {case: (logits, load_file(root / case / "logits.safetensors")["logits"]) for case, logits in before.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("example", "name"), list(_cases()))
def test_a_fresh_process_gives_the_same_logits(example: Example, name: str, reloaded: dict[str, Any]) -> None:
    before, after = reloaded[f"{example}-{name}"]
    assert torch.equal(after, before)


def test_the_folder_holds_three_files_and_the_grafts_tensors(example: Example, saved: Path) -> None:
    tensors = load_file(saved / "graft.safetensors")
    assert not set(tensors) & set(backbone("llama").model.state_dict()) or example.kind == "finetune"
    assert {path.name for path in saved.iterdir()} == {"graft.json", "graft.safetensors", "README.md"}
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1, "who may read one may read all"


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Example], Path]:
    """`artefacts(example)` is the artefact of a random graft on the tiny Llama. Do not change it."""
    root = tmp_path_factory.mktemp("artefacts")

    @functools.cache
    def artefact(example: Example) -> Path:
        with randomise(graft_onto(backbone("llama"), example), example.spread) as model:
            return save_graft(model.grafts["graft"], backbone("llama"), root / str(example))

    return artefact


@pytest.fixture
def saved(example: Example, artefacts: Callable[[Example], Path], tmp_path: Path) -> Path:
    """A copy of an example's artefact."""
    return shutil.copytree(artefacts(example), tmp_path / "graft")


def _load(folder: Path, host: Backbone | None = None) -> None:
    host = host or backbone("llama")
    GraftedModel(host, {"graft": load_graft(folder, host)}).detach()


def example_cases(values: Iterable[str]) -> list[Any]:
    """Every example with every value; the default run has each kind of graft and each value at least once."""
    values = list(values)
    first = [example for example in examples() if example is first_example(example.kind)]
    more = [example for example in examples() if example not in first]
    slow = [pytest.param(example, value, marks=pytest.mark.slow) for example in more for value in values]
    return rotated(first, values) + slow


OTHERS: dict[str, Callable[[], Any]] = {
    "other weights": lambda: tiny_model("llama", seed=1),
    "another family": lambda: tiny_model("gpt2"),
    "another depth": lambda: tiny_model("llama", num_hidden_layers=3),
}


@pytest.mark.parametrize(("example", "other"), example_cases(OTHERS), ids=str)
def test_another_backbone_is_refused(example: Example, saved: Path, other: str) -> None:
    with pytest.raises(WrongBackboneError) as error:
        load_graft(saved, Backbone.wrap(OTHERS[other](), name="another"))
    assert "llama" in str(error.value)
    assert "another" in str(error.value)


def test_unknown_keys_are_named(example: Example, saved: Path) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config(example.values() | {"capasity": 1})
    assert "capasity" in str(error.value)
    manifest = json.loads((saved / "graft.json").read_text())
    manifest["config"]["capasity"] = 1
    (saved / "graft.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError) as error:
        _load(saved)
    assert "capasity" in str(error.value)


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.abort, ())


def _cut(share: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share * (len(content) - 1))])

    return cut


def _foreign(path: Path) -> None:
    save_file({"foreign": torch.zeros(3)}, path)


def _misshapen(path: Path) -> None:
    save_file({key: torch.zeros(3) for key in load_file(path)}, path)


def _one_missing(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(min(tensors))
    save_file(tensors, path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": _cut(0),
    "half a header": _cut(0.01),
    "half": _cut(0.5),
    "one byte short": _cut(1),
    "pickled": lambda path: path.write_bytes(pickle.dumps(_Bomb())),
    "torch's pickle": lambda path: torch.save({"w": torch.zeros(1), "bomb": _Bomb()}, path),
    "text": lambda path: path.write_text("not tensors"),
    "missing": Path.unlink,
    "foreign names": _foreign,
    "one missing": _one_missing,
    "other shapes": _misshapen,
}


@pytest.mark.parametrize(("example", "damage"), example_cases(DAMAGE), ids=str)
def test_damaged_tensors_are_refused(example: Example, saved: Path, damage: str) -> None:
    DAMAGE[damage](saved / "graft.safetensors")
    with pytest.raises(ArtifactError) as caught:
        load_graft(saved, backbone("llama"))
    assert "\n" not in str(caught.value)
    assert "train" in str(caught.value) or "copy" in str(caught.value), "it must say what to do"


@pytest.mark.parametrize(("kind", "family"), [("adapter", "llama"), ("lora", "gemma3"), ("adapter", "gemma3")])
def test_grafts_of_format_1_are_read_where_they_compute_the_same(kind: str, family: str, tmp_path: Path) -> None:
    """Where a norm follows the FFN, they acted before it."""
    graft = build_graft(graft_config({"kind": kind}), backbone(family))
    with GraftedModel(backbone(family), {"graft": graft}):
        pass
    folder = save_graft(graft, backbone(family), tmp_path / "graft")
    values = json.loads((folder / "graft.json").read_text())
    assert values["format"] == 2
    (folder / "graft.json").write_text(json.dumps(values | {"format": 1}))
    if (kind, family) != ("adapter", "gemma3"):
        assert load_graft(folder, backbone(family))
        return
    with pytest.raises(ArtifactError) as error:
        load_graft(folder, backbone(family))
    assert "format 1" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "llama"}', '{"format": 99}', '{"kind": "lora"}', "\udcff"])
def test_damaged_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "graft.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError):
        load_graft(tmp_path, backbone("llama"))


@pytest.mark.parametrize("config", [{"kind": "lora"}, {"kind": "peft", "method": "ia3"}])
def test_a_graft_without_its_tensors_is_not_written(config: Any, tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    """Those that get them when they are attached; else it would be refused when it is loaded, as damaged."""
    backbone = load_backbone(tiny_backbone("llama"))
    graft = build_graft(graft_config(config), backbone)
    with pytest.raises(ArtifactError):
        save_graft(graft, backbone, tmp_path / "graft")
    GraftedModel(backbone, {"graft": graft}).detach()
    assert load_graft(save_graft(graft, backbone, tmp_path / "graft"), backbone)


def test_a_backbones_folder_is_no_graft(tiny_backbone: BackboneFolder) -> None:
    with pytest.raises(ArtifactError) as error:
        load_graft(tiny_backbone("llama"), backbone("llama"))
    assert "graft.json" in str(error.value)


def test_a_kind_that_is_not_there(example: Example, saved: Path) -> None:
    manifest = json.loads((saved / "graft.json").read_text())
    manifest["kind"] = "neutral-residue"
    (saved / "graft.json").write_text(json.dumps(manifest))
    with pytest.raises(GraftError) as error:
        _load(saved)
    assert "neutral-residues" in str(error.value)


def test_the_backbone_comes_back_with_the_head_that_it_had(tmp_path: Path, tiny_backbone: BackboneFolder) -> None:
    encoder = load_backbone(tiny_backbone("bert"), kind="encoder")
    save_graft(build_graft(graft_config({"kind": "adapter"}), encoder), encoder, tmp_path / "graft")
    assert "kind='encoder'" in (tmp_path / "graft/README.md").read_text()
    assert backbone_of(tmp_path / "graft", device="cpu").kind == "encoder"
    values = json.loads((tmp_path / "graft/graft.json").read_text())
    del values["backbone"]["kind"]
    (tmp_path / "graft/graft.json").write_text(json.dumps(values))
    assert read_manifest(tmp_path / "graft").backbone.kind == "causal-lm", "as grafts before this was written"


def test_a_users_row_of_the_family_comes_back_with_the_graft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_backbone(tmp_path / "backbone", "qwen3")
    row = {"layers": "layers", "embedding": "embed_tokens", "norm": "norm", "attention": "self_attn", "ffn": "mlp"}
    row |= {"ffn_in": ["mlp.gate_proj", "mlp.up_proj"], "ffn_out": "mlp.down_proj", "gated": True}  # without norms
    monkeypatch.setitem(FAMILIES, "qwen3", FAMILIES["qwen3"])
    host = load_backbone(folder, family=row)
    graft = build_graft(graft_config({"kind": "neutral-residues"}), host)
    kept = save_graft(graft, host, tmp_path / "graft")
    register_family("qwen3", "llama")  # what another process would do, which does not know the row
    with pytest.raises(WrongBackboneError) as error:
        load_graft(kept, load_backbone(folder))
    assert "backbone.family" in str(error.value)
    again = backbone_of(kept)
    assert again.sites.family == host.sites.family
    load_graft(kept, again)

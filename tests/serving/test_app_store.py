"""Grafts by name: loaded, read again when their files change, kept when the new files are bad."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from graftlm.backbone import Backbone
from graftlm.backbone.formats import quantize_weights
from graftlm.errors import GraftError
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.app import _watch
from graftlm.serving.backbones import checked_name, served_name
from graftlm.serving.service import open_service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.store.artifact import save_graft
from tiny import tiny_model, tiny_tokenizer

CONFIG = graft_config({"kind": "adapter", "width": 4})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")


def write(backbone: Backbone, folder: Path, value: float) -> Path:
    """A graft all of whose numbers are this one."""
    graft = build_graft(CONFIG, backbone)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.fill_(value)
    return save_graft(graft, backbone, folder)


def value_of(graft: Graft | None) -> float | None:
    return None if graft is None else float(next(graft.parameters()).detach().reshape(-1)[0])


class Counter:
    """What is in service, and what was told of each change."""

    def __init__(self, shelf: GraftStore) -> None:
        self.shelf = shelf
        self.grafts = {name: value_of(graft) for name, graft in shelf.open().items()}
        self.told: list[tuple[str, str]] = []

    def replace(self, name: str, graft: Graft | None) -> None:
        if graft is None:
            del self.grafts[name]
        else:
            self.grafts[name] = value_of(graft)

    def look(self, times: int = 2, *, now: bool = False) -> list[tuple[str, str]]:
        """What some looks at the files tell."""
        self.told.clear()
        for _ in range(times):
            self.shelf.refresh(self.replace, lambda *told: self.told.append(told), now=now)
        return list(self.told)


@pytest.fixture
def folder(backbone: Backbone, tmp_path: Path) -> Path:
    """A folder of two grafts, and of what is none."""
    for name, value in (("danish", 1.0), ("french", 2.0)):
        write(backbone, tmp_path / "grafts" / name, value)
    (tmp_path / "grafts" / "notes").mkdir()
    (tmp_path / "grafts" / "readme.md").write_text("ours")
    return tmp_path / "grafts"


def test_a_full_disk_delays_new_files_and_loses_nothing(
    backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "danish", 3.0)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        assert counter.look(3) == [("danish", "refused")] * 2
        assert counter.grafts == {"danish": 1.0, "french": 2.0}
        assert "No space left on device" in counter.shelf.problems()["danish"]
    assert counter.look(1) == [("danish", "loaded")]
    assert counter.grafts == {"danish": 3.0, "french": 2.0}
    assert counter.shelf.problems() == {}


def test_all_grafts_of_a_folder_are_loaded_and_left_alone(backbone: Backbone, folder: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    assert counter.grafts == {"danish": 1.0, "french": 2.0}
    assert [entry.manifest.kind for entry in counter.shelf.entries().values()] == ["adapter", "adapter"]
    assert counter.look(3) == []
    assert counter.shelf.problems() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_are_served_in_bfloat16_where_the_backbone_is(dtype: torch.dtype, tmp_path: Path) -> None:
    kinds = {"adapter": {"width": 4}, "neutral-residues": {"width": 4}, "memory": {"window": 8}}
    served = Backbone.wrap(tiny_model("llama").to(dtype), tiny_tokenizer(), "tiny")
    for kind, values in kinds.items():
        save_graft(build_graft(graft_config({"kind": kind, **values}), served), served, tmp_path / kind)
    dtypes = {
        name: next(graft.parameters()).dtype
        for name, graft in GraftStore({"tiny": served}, {}, tmp_path).open().items()
    }
    adapters = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert dtypes == {"adapter": adapters, "neutral-residues": adapters, "memory": torch.float32}


def test_a_graft_of_tied_embeddings_is_served_in_int8(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    served = Backbone.wrap(tiny_model("llama", tie_word_embeddings=True), tiny_tokenizer(), "tiny")
    kinds = {"adapter": {"capacity": 0.3}, "neutral-residues": {"capacity": 0.3}}
    for kind, values in kinds.items():
        save_graft(build_graft(graft_config({"kind": kind, **values}), served), served, tmp_path / kind)
    quantize_weights(served.bare_model, "int8", "tiny")
    store = GraftStore({"tiny": served}, {}, tmp_path)
    assert (sorted(store.open()), store.problems()) == (sorted(kinds), {})


def test_a_changed_graft_takes_over_once_its_files_are_still(backbone: Backbone, folder: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "danish", 3.0)
    assert counter.look(1) == [], "it may still be written"
    assert counter.look(1) == [("danish", "loaded")]
    assert counter.grafts == {"danish": 3.0, "french": 2.0}
    assert counter.look() == []


def test_who_asks_for_it_does_not_wait(backbone: Backbone, folder: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "danish", 3.0)
    assert counter.look(1, now=True) == [("danish", "loaded")]


def test_files_that_are_overwritten_in_place_are_seen_too(backbone: Backbone, folder: Path, tmp_path: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    other = write(backbone, tmp_path / "other", 5.0)
    shutil.copyfile(other / "graft.safetensors", folder / "danish" / "graft.safetensors")
    assert counter.look() == [("danish", "loaded")]
    assert counter.grafts["danish"] == 5.0


@pytest.mark.parametrize("damage", ["tensors", "manifest", "gone", "kind"])
def test_a_bad_file_leaves_the_old_graft_in_service(
    backbone: Backbone, folder: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    tensors, manifest = folder / "danish" / "graft.safetensors", folder / "danish" / "graft.json"
    if damage == "tensors":
        tensors.write_bytes(tensors.read_bytes()[:-8])
    elif damage == "gone":
        tensors.unlink()
    elif damage == "kind":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"kind": "adaptor"}))
    else:
        manifest.write_text("{")
    assert counter.look(4) == [("danish", "refused")], "it is told once"
    assert counter.grafts == {"danish": 1.0, "french": 2.0}
    assert [entry.name for entry in counter.shelf.entries().values()] == ["danish", "french"]
    (problem,) = counter.shelf.problems().values()
    assert str(folder) in problem or damage == "kind"
    assert "graftlm-" not in problem, "the private copy is nobody's business"
    assert "stays in service" in caplog.text
    write(backbone, tmp_path / "new", 4.0)
    shutil.rmtree(folder / "danish")
    (tmp_path / "new").rename(folder / "danish")
    assert counter.look() == [("danish", "loaded")]
    assert counter.shelf.problems() == {}


def test_a_graft_that_the_engine_refuses_leaves_the_old_one(backbone: Backbone, folder: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "danish", 3.0)

    def refuse(name: str, graft: Graft | None) -> None:
        raise GraftError("That kind can't be served.")

    counter.shelf.refresh(refuse)
    counter.shelf.refresh(refuse)
    assert counter.shelf.problems() == {"danish": "That kind can't be served."}
    assert counter.look(1) == []
    assert counter.look(1, now=True) == [("danish", "loaded")], "who asks for it gets another try"


def test_a_file_that_changes_while_it_is_read_waits(
    backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "danish", 3.0)
    load, written = GraftStore._load, []

    def slow(self: GraftStore, name: str, place: Path):
        found = load(self, name, place)
        if not written:
            written.append(write(backbone, place, 4.0))
        return found

    monkeypatch.setattr(GraftStore, "_load", slow)
    assert counter.look() == []
    assert counter.grafts["danish"] == 1.0
    assert counter.look(2) == [("danish", "loaded")]
    assert counter.grafts["danish"] == 4.0


def test_folders_that_come_and_go(backbone: Backbone, folder: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, folder=folder))
    write(backbone, folder / "german", 7.0)
    assert counter.look() == [("german", "loaded")]
    shutil.rmtree(folder / "french")
    assert counter.look(1) == [], "a folder that is replaced is not there for a moment"
    assert counter.look(1) == [("french", "withdrawn")]
    assert counter.grafts == {"danish": 1.0, "german": 7.0}
    assert [entry.name for entry in counter.shelf.entries().values()] == ["danish", "german"]


def test_a_graft_that_was_given_by_name_stays(backbone: Backbone, tmp_path: Path) -> None:
    counter = Counter(GraftStore({"tiny": backbone}, {"danish": write(backbone, tmp_path / "graft", 1.0)}))
    shutil.rmtree(tmp_path / "graft")
    assert counter.look(3) == [("danish", "refused")]
    assert counter.grafts == {"danish": 1.0}


def test_drafts_and_odd_names_are_no_grafts(backbone: Backbone, folder: Path) -> None:
    for name in (".danish.1234", "a b", "one+two", "tiny"):
        shutil.copytree(folder / "danish", folder / name)
    shelf = GraftStore({"tiny": backbone}, folder=folder)
    assert set(shelf.open()) == {"danish", "french"}
    assert set(shelf.problems()) == {"a b", "one+two", "tiny"}
    assert "tiny" in shelf.problems()["tiny"]


def test_a_broken_graft_of_the_folder_does_not_keep_the_others(backbone: Backbone, folder: Path) -> None:
    (folder / "danish" / "graft.json").write_text("{")
    shelf = GraftStore({"tiny": backbone}, folder=folder)
    assert set(shelf.open()) == {"french"}
    assert set(shelf.problems()) == {"danish"}
    service = open_service(backbone, folder=folder, name="tiny")
    loads = generate_latest(service.metrics.registry).decode()
    service.engine.close(0)
    assert 'loads_total{graft="danish",outcome="refused"} 1.0' in loads
    assert 'loads_total{graft="french",outcome="loaded"} 1.0' in loads


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        ({"danish": "nowhere"}, "nowhere"),
        ({"a+b": "nowhere"}, "a+b"),
        ({"tiny": "nowhere"}, "tiny"),
    ],
)
def test_a_graft_that_was_given_and_can_t_be_used_is_told_at_once(backbone: Backbone, given, culprit: str) -> None:
    with pytest.raises(GraftError) as caught:
        open_service(backbone, given, name="tiny")
    assert culprit in str(caught.value)


def test_a_folder_that_is_not_there_and_names_that_can_t_be(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="nowhere"):
        open_service(backbone, folder="nowhere", name="tiny")
    (tmp_path / "my model+").mkdir()
    with pytest.raises(GraftError):
        checked_name(served_name(str(tmp_path / "my model+")))
    (tmp_path / "llama").mkdir()
    assert served_name(str(tmp_path / "llama")) == "llama"
    assert served_name("google/gemma-2-2b") == "google/gemma-2-2b"


class _UnreadableOnce:
    """A service whose first check of the grafts' files fails."""

    def __init__(self) -> None:
        self.settings = ServerSettings(reload_seconds=0.001)
        self.checks = 0

    def reload(self) -> None:
        self.checks += 1
        if self.checks == 1:
            raise PermissionError(errno.EACCES, "Permission denied", "grafts")
        self.settings = ServerSettings(reload_seconds=0)  # ends the loop


def test_the_watch_goes_on_after_a_failed_check() -> None:
    service: Any = _UnreadableOnce()
    asyncio.run(asyncio.wait_for(_watch(service), 60))
    assert service.checks == 2


async def _watched(backbone: Backbone, folder: Path) -> str:
    service = open_service(backbone, folder=folder, name="tiny", settings=ServerSettings(reload_seconds=0.01))
    watching = asyncio.create_task(_watch(service))
    await asyncio.to_thread(write, backbone, folder / "danish", 3.0)
    while not (page := generate_latest(service.metrics.registry).decode()).count('graft="danish",outcome="loaded"'):
        await asyncio.sleep(0.01)
    watching.cancel()
    service.engine.close(5)
    return page


def test_a_server_looks_by_itself(backbone: Backbone, folder: Path) -> None:
    assert 'graftlm_graft_loads_total{graft="danish",outcome="loaded"} 1.0' in asyncio.run(
        asyncio.wait_for(_watched(backbone, folder), 60)
    )

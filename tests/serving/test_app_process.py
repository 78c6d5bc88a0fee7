"""Servers as processes of their own: what signals do to them, and what is left behind."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from graftlm.backbone import load_backbone
from graftlm.backbone.formats import quantize_weights
from graftlm.errors import GraftError
from graftlm.grafts import build_graft, graft_config
from graftlm.serving.protocol import EngineLimits, GenerationRequest
from graftlm.serving.service import open_service
from graftlm.store.artifact import save_graft
from serving.engines import complete
from serving.web import until
from tiny import BackboneFolder

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A backbone, and two states of a graft on it."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "llama").symlink_to(tiny_backbone("llama"))
    backbone = load_backbone(folder / "llama")
    for name, seed in (("danish", 0), ("other", 1)):
        torch.manual_seed(seed)
        graft = build_graft(graft_config({"kind": "adapter", "width": 4}), backbone)
        with torch.no_grad():
            for parameter in graft.parameters():
                parameter.normal_()
        save_graft(graft, backbone, folder / name)
    return folder


@pytest.fixture(scope="module")
def start(home: Path) -> Iterator[Start]:
    """Starts `graft serve` in the folder; gives the process and its address."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "graftlm", "serve", "--backbone", "llama", "--port", "0", *options]
        (home / "scratch").mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(home / "scratch")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=home, env=environment, **pipes)
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("serving "):
                return process, line.split(" at ")[1].strip()
        raise AssertionError(f"it ended with {process.wait()}")

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def answer(address: str, model: str) -> str:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
    return client.completions.create(model=model, prompt="the fox", max_tokens=8, temperature=0).choices[0].text


def answers_of_a_long_prompt(address: str) -> list[tuple[str, bool]]:
    """Each answer, and whether the prefix cache knew the prompt's beginning."""
    body = {"model": "danish", "prompt": [5 + number % 90 for number in range(200)], "max_tokens": 8, "temperature": 0}
    answers = [httpx.post(f"{address}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    return [(one["choices"][0]["text"], "prompt_tokens_details" in one["usage"]) for one in answers]


@pytest.mark.slow
def test_servers_that_are_killed_and_stopped(home: Path, start: Start) -> None:
    """Three processes for all of it, as each start costs seconds."""
    shutil.copytree(home / "danish", home / "grafts" / "danish")
    process, address = start("--grafts", "grafts", "--reload-every", "0")
    check_answers(address)
    check_reload(home, process, address)
    said = answer(address, "llama")
    check_kill(home, process)
    process, address = start("--graft", "danish=danish", "--grafts", "grafts")
    assert answer(address, "llama") == said
    before = answers_of_a_long_prompt(address)
    assert [known for _, known in before] == [False, True]
    check_kill(home, process)
    process, address = start("--graft", "danish=danish", "--grafts", "grafts", "--batch-size", "1", "--grace", "200")
    assert answers_of_a_long_prompt(address) == before, "the cache was memory, and answers need none"
    check_end(process, address)


def check_answers(address: str) -> None:
    command = ["curl", "-sS", f"{address}/v1/completions", "-H", "Content-Type: application/json"]
    body = {"model": "danish", "prompt": "the fox", "max_tokens": 8, "temperature": 0}
    said = json.loads(subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, timeout=60).stdout)
    assert said["choices"][0]["text"] == answer(address, "danish")
    assert answer(address, "llama") != answer(address, "danish"), "the graft does something"
    seeded = {"model": "danish", "prompt": "the fox", "max_tokens": 8, "seed": 3}
    texts = {
        httpx.post(f"{address}/v1/completions", json=seeded, timeout=60).json()["choices"][0]["text"] for _ in "ab"
    }
    assert len(texts) == 1


def check_reload(home: Path, process: subprocess.Popen[str], address: str) -> None:
    before = answer(address, "danish")
    tensors = home / "grafts" / "danish" / "graft.safetensors"
    shutil.copyfile(home / "other" / "graft.safetensors", tensors)
    assert answer(address, "danish") == before, "nobody said that it should look"
    process.send_signal(signal.SIGHUP)
    assert until(lambda: answer(address, "danish") != before, 30)
    after = answer(address, "danish")
    tensors.write_bytes(b"spoilt")
    process.send_signal(signal.SIGHUP)
    assert until(lambda: httpx.get(f"{address}/health").json()["broken"] == ["danish"], 30)
    assert answer(address, "danish") == after


def check_kill(home: Path, process: subprocess.Popen[str]) -> None:
    """What is on the disk stays as it is."""
    before = hashes(home / "grafts" / "danish")
    process.kill()
    process.wait(30)
    assert hashes(home / "grafts" / "danish") == before
    assert not [*home.rglob(".*"), *(home / "scratch").iterdir()], "nothing is left lying about"


def refused(client: openai.OpenAI) -> bool:
    """Whether the server says that it ends. One that has ended fails the test: its clients got no reason."""
    try:
        client.models.list()
    except openai.InternalServerError as error:
        return error.code == "shutting_down"
    return False


def check_end(process: subprocess.Popen[str], address: str) -> None:
    """What was begun is finished, what comes later is refused, and the process ends well.

    One answer at a time, so that the work outlasts a client that gets little of the processor.
    """
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
    how = {"model": "danish", "prompt": "the fox", "max_tokens": 300, "temperature": 0, "stop": None}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        stream = client.completions.create(**how, stream=True, stream_options={"include_usage": True})
        first = next(stream)
        whole = [pool.submit(client.completions.create, **how) for _ in range(12)]
        assert until(lambda: sum(httpx.get(f"{address}/health").json()[key] for key in ("running", "waiting")) > 6)
        process.send_signal(signal.SIGTERM)
        assert until(lambda: refused(client), 30)
        chunks = [first, *stream]
        answers = [one.result() for one in whole]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert {one.choices[0].text for one in answers} == {text}
    assert chunks[-1].usage == answers[0].usage
    assert process.wait(200) == 0
    assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def test_grafts_are_served_on_their_backbone_in_int8(home: Path) -> None:
    pytest.importorskip("torchao")
    backbone = load_backbone(home / "llama")
    quantize_weights(backbone.bare_model, "int8", "llama")
    ids = [5, 40, 7, 90, 12]
    expected = backbone.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)[0, len(ids) :].tolist()
    service = open_service(backbone, {"danish": home / "danish"}, name="llama")
    requests = [GenerationRequest(tuple(ids), model, max_tokens=6) for model in ("llama", "danish")]
    plain, danish = complete(service.engine, requests)
    assert [output.token for output in plain.outputs] == expected[: len(plain.outputs)]
    assert [output.token for output in danish.outputs] != expected[: len(danish.outputs)]
    assert service.engine.close(10)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (("--graft", "danish"), "'danish'"),
        (("--graft", "a=b", "--graft", "a=c"), "--graft"),
        (("--graft", "a=nowhere"), "nowhere"),
        (("--grafts", "nowhere"), "nowhere"),
        (("--api-keys", "nowhere"), "nowhere"),
        (("--chat-template", "nowhere"), "nowhere"),
        (("--quantize", "int3"), "'int3'"),
        (("--dtype", "half"), "'half'"),
        (("--name", "a+b"), "'a+b'"),
        (("--host", "192.0.2.1"), "192.0.2.1:0"),
    ],
)
def test_what_the_user_can_mend(home: Path, monkeypatch: pytest.MonkeyPatch, options, culprit: str) -> None:
    from cli.tools import invoke

    monkeypatch.chdir(home)
    outcome = invoke("serve", "--backbone", "llama", "--port", "0", *options)
    assert outcome.code == 2
    assert culprit in outcome.err
    assert outcome.err.count("\n") <= 4, "a sentence, no traceback"


def test_a_taken_port_is_noticed_before_anything_loads(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.tools import invoke

    monkeypatch.chdir(home)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = invoke("serve", "--backbone", "llama", "--port", str(port))
    assert outcome.code == 2
    assert f"127.0.0.1:{port}" in outcome.err
    assert "loading" not in outcome.err


@pytest.mark.parametrize(("options", "pack"), [((), True), (("--no-pack",), False)])
def test_the_engine_learns_of_no_pack(home: Path, monkeypatch: pytest.MonkeyPatch, options, pack: bool) -> None:
    from cli.tools import invoke

    def stop(*_: object, limits: EngineLimits, **__: object) -> None:
        raise GraftError(f"pack is {limits.pack}")

    monkeypatch.setattr("graftlm.serving.service.open_service", stop)
    assert f"pack is {pack}" in invoke("serve", "--backbone", str(home / "llama"), "--port", "0", *options).err


@pytest.mark.parametrize(("options", "wanted"), [((), None), (("--compile",), True), (("--no-compile",), False)])
def test_the_engine_learns_whether_to_compile(home: Path, monkeypatch: pytest.MonkeyPatch, options, wanted) -> None:
    from cli.tools import invoke

    def stop(*_: object, limits: EngineLimits, **__: object) -> None:
        raise GraftError(f"compile is {limits.compile}")

    monkeypatch.setattr("graftlm.serving.service.open_service", stop)
    outcome = invoke("serve", "--backbone", str(home / "llama"), "--port", "0", *options)
    assert f"compile is {wanted}" in outcome.err


def test_without_the_extra_it_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.tools import invoke

    for name in list(sys.modules):
        if name.startswith("graftlm.serving"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    outcome = invoke("serve", "--backbone", "llama", "--port", "0")
    assert outcome.code == 2
    assert "fastapi" in outcome.err
    assert "graftlm[serve]" in outcome.err

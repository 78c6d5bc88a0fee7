"""What serves on many machines: the router by prefixes, the image, the deployment, and how many servers are needed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer.main
import yaml

from graftlm.cli import app
from graftlm.pipelines.summarize.readers.pdf import _CHILD_LIMITS
from graftlm.serving.settings import KEYS_VARIABLE, ServerSettings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "examples" / "kubernetes" / "Dockerfile").read_text(encoding="utf-8")
SERVE = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
OPTIONS = {name for parameter in SERVE.params for name in parameter.opts}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# The router of examples/ray_serve


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example with a Ray that has nothing but the router's base class."""

    class RequestRouter:
        def __init__(self) -> None:
            self.replica_queue_len_cache: dict[str, int] = {}

        def update_replicas(self, replicas: list[Any]) -> None:
            self.replicas = replicas

    names = ["ray", "ray.exceptions", "ray.serve"] + [
        f"ray.serve.{n}" for n in ("config", "exceptions", "request_router")
    ]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["ray"].serve = modules["ray.serve"]
    modules["ray.serve"].Application = object
    modules["ray.serve.config"].AutoscalingConfig = modules["ray.serve.config"].RequestRouterConfig = SimpleNamespace
    modules["ray.serve.exceptions"].BackPressureError = TimeoutError  # any that nothing else raises
    modules["ray.exceptions"].RayActorError = ConnectionError
    modules["ray.serve.request_router"].RequestRouter = RequestRouter
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return load(ROOT / "examples" / "ray_serve" / "serve_replicas.py")


def body(text: str, model: str = "tiny") -> bytes:
    return json.dumps({"model": model, "prompt": text}).encode()


def test_prompts_share_as_many_prefixes_as_blocks(example: Any) -> None:
    block = example.BLOCK
    first, second = example.prefixes(body("a" * 5 * block)), example.prefixes(body("a" * (3 * block + 7) + "b" * 700))
    assert len(first) == 5
    assert [one == other for one, other in zip(first, second, strict=True)] == [True] * 3 + [False] * 2
    assert not {*first} & {*example.prefixes(body("a" * 5 * block, "danish"))}
    assert not {*first} & {*example.prefixes(body("b" + "a" * 5 * block))}
    assert len(example.prefixes(body("a" * 10**6))) == example.MAX_BLOCKS
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "\ud800" + "a" * 3 * block}]}
    assert len(example.prefixes(json.dumps(chat).encode())) == 3
    assert [example.prefixes(bad) for bad in (b"", b"{", b"[]", b"\xff", b'{"prompt": null}', b'{"prompt": [1]}')] == [
        []
    ] * 6


def test_a_prompt_goes_where_its_longest_beginning_was_read(example: Any) -> None:
    router, replicas = example.PrefixRouter(), [SimpleNamespace(replica_id=name) for name in "abc"]
    router.initialize_state()
    router.update_replicas(replicas)

    def ranks(text: str) -> list[set[str]]:
        request = SimpleNamespace(args=[example.prefixes(body(text))])
        chosen = asyncio.run(router.choose_replicas(replicas, request))
        return [{replica.replica_id for replica in rank} for rank in chosen]

    def routed(text: str, replica: str) -> None:
        router.on_request_routed(SimpleNamespace(args=[example.prefixes(body(text))]), replica, None)

    long, other = "x" * 1000, "y" * 1000
    assert ranks("short") == ranks(long) == [{*"abc"}]  # nobody knows it: Ray takes the one with the fewest requests
    routed(long, "a")
    routed(other, "b")
    assert ranks("short") == [{*"abc"}]
    assert ranks(long + "?" * 600) == [{"a"}, {*"abc"}]
    assert ranks(other + "!" * 600) == [{"b"}, {*"abc"}]
    routed(long[:600], "c")
    assert ranks(long) == [{"a"}, {"c"}, {*"abc"}]
    router.replica_queue_len_cache["a"] = example.BATCH
    assert ranks(long) == [{"c"}, {*"abc"}]  # a has a full batch
    router.update_replicas(replicas[1:])
    assert set(router._read) == {"b", "c"}
    router._read["b"] = type(router._read["c"])(dict.fromkeys(map(str, range(example.KEPT))))  # too many with more
    routed(long, "b")
    assert len(router._read["b"]) == example.KEPT
    assert "0" not in router._read["b"]
    assert asyncio.run(router.choose_replicas(replicas)) != []  # no request is known yet


class Parts:
    """Ray's generator of an answer's parts."""

    def __init__(self, parts: Any, cancel: Any) -> None:
        self._parts, self.cancel = parts, cancel

    def __aiter__(self) -> Any:
        return self._parts


class Replicas:
    """A handle of replicas that all say who asked; `error` is raised in place of an answer."""

    error: Exception | None = None
    waits, cancelled = "", 0  # where an answer never goes on, and how many were cancelled

    def options(self, stream: bool) -> Any:
        self.answer = SimpleNamespace(remote=self.remote)
        return self

    def remote(self, *request: Any) -> Any:
        return Parts(self.said(*request), self.cancel)

    def cancel(self) -> None:
        self.cancelled += 1

    async def said(self, prefixes: list[str], scope: dict[str, Any], body: bytes) -> Any:
        if self.error is not None:
            raise self.error
        if self.waits == "before":
            await asyncio.Future()
        yield 200, []
        yield body
        if self.waits == "within":
            await asyncio.Future()


def test_the_front_checks_key_and_size_before_it_reads(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ann:" + "k" * 16)
    replicas, key = Replicas(), {"authorization": "Bearer " + "k" * 16}
    front, unread = example.Front(replicas), {"content-length": str(example.MAX_BODY + 1)}

    def ask(headers: dict[str, str], size: int | None) -> tuple[int, str]:
        """The status and the code of the error, of a request whose body can not be read where its size is None."""

        async def receive() -> Any:
            assert size is not None, "the body was read"
            return {"type": "http.request", "body": b"." * size, "more_body": False}

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": pairs}
        answer = asyncio.run(front(example.Request(scope, receive)))
        return answer.status_code, json.loads(answer.body)["error"]["code"] if answer.status_code != 200 else ""

    assert ask({}, None) == (401, "invalid_api_key")
    assert ask(key | unread, None) == (413, "request_too_large")
    assert ask(key, example.MAX_BODY + 1) == (413, "request_too_large")
    assert ask(key, 10) == (200, "")
    replicas.error = example.BackPressureError()
    assert ask(key, 10)[0] == 429
    replicas.error = example.RayActorError()  # as of a replica that was killed
    assert ask(key, 10) == (503, "replica_died")


@pytest.mark.parametrize("waits", ["before", "within", ""])
def test_a_replica_stops_when_its_client_leaves(example: Any, waits: str) -> None:
    replicas = Replicas()
    replicas.waits, sent = waits, []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        answer = await example.Front(replicas)(example.Request(scope, receive))
        await answer.stream_response(send)

    async def leave() -> None:
        task = asyncio.create_task(ask())
        for _ in range(20):  # until the answer has come as far as it comes
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert replicas.cancelled == bool(waits)
    assert len(sent) == {"before": 0, "within": 2, "": 3}[waits]


# The image and the deployment of examples/kubernetes


def test_the_image_is_built_from_the_wheel_and_starts_the_server() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert extras is not None
    assert {*extras[1].split(",")} <= {*project["optional-dependencies"]}
    assert f"graftlm:{project['version']}" in DOCKERFILE
    assert re.search(r"^FROM \S+:\d", DOCKERFILE, re.MULTILINE)  # a version, and not the latest
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["10001"]
    assert DOCKERFILE.index("useradd") < DOCKERFILE.index("\nUSER")
    entry = json.loads(DOCKERFILE.split("\nENTRYPOINT ")[1].partition("\n")[0])
    assert entry[:2] == ["graft", "serve"]
    assert {word for word in entry if word.startswith("--")} <= OPTIONS


def test_the_deployment_fits_the_server() -> None:
    text = (ROOT / "examples" / "kubernetes" / "graftlm.yaml").read_text(encoding="utf-8")
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    assert list(documents) == ["Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"]
    pod = documents["Deployment"]["spec"]["template"]
    spec, (server,) = pod["spec"], pod["spec"]["containers"]
    assert {word for word in server["args"] if word.startswith("--")} <= OPTIONS
    grace = float(server["args"][server["args"].index("--grace") + 1])
    assert spec["terminationGracePeriodSeconds"] > grace + float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert [entry["name"] for entry in server["env"] if "valueFrom" in entry] == [KEYS_VARIABLE]
    port = ServerSettings().port
    assert server["ports"] == [{"name": "http", "containerPort": port}]
    assert f"EXPOSE {port}" in DOCKERFILE
    assert {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {"/health"}
    assert server["livenessProbe"]["timeoutSeconds"] > 1
    children = 2 * _CHILD_LIMITS["RLIMIT_DATA"] // 2**20
    assert f"two processes that read PDF files, of {children // 2}Mi each" in text
    assert server["resources"]["limits"]["memory"] == f"{3 + children // 1024}Gi"
    assert "annotations" not in pod["metadata"]  # a scrape without a key gets 401
    labels = pod["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert documents[kind]["spec"]["selector"]["matchLabels"] == labels
    assert documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "graftlm"
    assert server["image"] in DOCKERFILE
    assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert spec["securityContext"]["runAsUser"] == 10001


# The arithmetic of docs/serving.md


def test_the_sizes_on_the_page_are_the_measured_ones() -> None:
    """Each figure of the table again, from results.json and the model's sizes, by hand."""
    results = json.loads((ROOT / "benchmarks" / "results" / "serving" / "results.json").read_text(encoding="utf-8"))
    row = {one["id"]: {name: value["mean"] for name, value in one["metrics"].items()} for one in results["rows"]}
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert "<!-- sizing -->" in page
    table = load(ROOT / "docs" / "hooks.py").on_page_markdown("<!-- sizing -->")
    cells = dict(line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    parameters, token = 134_515_008, 2 * 30 * 3 * 64 * 2  # of SmolLM2-135M: 30 layers, 3 heads of 64, 2 bytes
    prompt, together = 1020 / row["prefix_1000"]["first_s"], row["clients_16"]["tokens_per_s"]
    known = row["prefix_1000"]["second_s"]
    new_s, known_s = 1000 / prompt + 200 / together, known + 200 / together
    assert cells == {
        "weights": f"2 · {parameters / 1e6:.1f} · 10⁶ = {2 * parameters / 1e9:.2f} GB",
        "keys and values of a token": f"2 · 2 · 30 · 192 = {token / 1000:.1f} kB",
        "of 16 requests of 1,000 tokens": f"{16_000 * token / 1e9:.2f} GB",
        "of `--prefix-cache 8192`": f"{8192 * token / 1e9:.2f} GB",
        "prompts that are new": f"**{prompt:,.0f} tokens/s**",
        "1,000 tokens that are known": f"**{known:.2f} s**, where reading them takes {1000 / prompt:.2f} s",
        "answers, one client": f"**{row['clients_1']['tokens_per_s']:.0f} tokens/s**",
        "answers, 16 clients together": f"**{together:.0f} tokens/s**",
        "the same with four grafts in one batch": f"**{row['mixed_grafts_4']['ratio']:.2f}** of the rate with one",
        "a request of 1,000 new tokens, 200 of answer": f"{new_s:.1f} s of a replica: {0.7 / new_s:.2f} a second",
        "the same where the 1,000 tokens are known": f"{known_s:.1f} s of a replica: {0.7 / known_s:.2f} a second",
        "replicas for 5 such requests a second": (
            f"{-(-5 * new_s // 0.7):.0f}, or {-(-5 * known_s // 0.7):.0f} where all are known"
        ),
    }

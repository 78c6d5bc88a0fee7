"""Several backbones in one server: each model answers as it would alone, and names lead to their own backbone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest
import torch
from playwright.sync_api import Browser, expect
from prometheus_client import generate_latest

from graftlm.backbone import Backbone, BackboneKind, load_backbone
from graftlm.backbone.load import inspect_model
from graftlm.cli.serve import split_model
from graftlm.errors import ArtifactError, BackboneError, GraftError
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.recipe import run_recipe
from graftlm.runs.task_run import TaskRecipe
from graftlm.serving.backbones import load_backbones, name_models
from graftlm.serving.protocol import EngineLimits, GenerationRequest, ShuttingDownError
from graftlm.serving.router import EngineRouter
from graftlm.serving.service import Service, open_service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.store.artifact import save_graft
from serving.browsing import generate, opened, view
from serving.web import running
from tiny import BackboneFolder, tiny_model, tiny_tokenizer
from training.tasks import task_recipe

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
ROWS = [{"task": "topic", "text": "river fox"}, {"task": "animals", "text": ["the", "dog"]}]


def write(backbone: Backbone, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    graft = build_graft(graft_config({"kind": "adapter", "width": 4}), backbone)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_()
    return save_graft(graft, backbone, folder)


def decoders() -> dict[str, Backbone]:
    """Two, in float64, in which no rounding changes a token; with different templates. An engine owns its backbone."""
    other = tiny_tokenizer()
    other.chat_template = TEMPLATE
    llama = Backbone.wrap(tiny_model("llama").double(), tiny_tokenizer(), "llama")
    neox = Backbone.wrap(tiny_model("gpt_neox", max_position_embeddings=400).double(), other, "neox")
    return {"one": llama, "org/two": neox}


@pytest.fixture
def reader(tiny_backbone: BackboneFolder) -> Backbone:
    return load_backbone(tiny_backbone("bert"), kind="encoder")


@pytest.fixture(scope="module")
def grafts(tiny_backbone: BackboneFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graft for each backbone, and two for the first one."""
    folder, backbones = tmp_path_factory.mktemp("several"), decoders()
    run_recipe(TaskRecipe.parse(task_recipe(folder, tiny_backbone("bert"))), progress=False, log=lambda _: None)
    for name, backbone, seed in (("danish", "one", 1), ("french", "org/two", 2), ("german", "one", 3)):
        write(backbones[backbone], folder / "grafts" / name, seed)
    shutil.copytree(folder / "run" / "graft", folder / "grafts" / "tasks")
    return folder / "grafts"


def limits() -> dict[str, Any]:
    return {"limits": EngineLimits(batch_size=4, max_tokens=100), "settings": ServerSettings(port=0, reload_seconds=0)}


@pytest.fixture(scope="module")
def service(tiny_backbone: BackboneFolder, grafts: Path) -> Service:
    encoder = load_backbone(tiny_backbone("bert"), kind="encoder")
    return open_service(decoders() | {"reader": encoder}, folder=grafts, **limits())


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with running(service) as address:
        yield address


class Request(NamedTuple):
    """A request whose answer does not depend on chance; `key` is the same for the same request."""

    key: str
    path: str
    body: dict[str, Any]


def requests_to(model: str) -> list[Request]:
    """Requests to every route that names a model."""
    user = [{"role": "user", "content": "the fox"}]
    greedy = {"model": model, "temperature": 0, "max_tokens": 12}
    ids = {"model": model, "prompt": [5, 9, 40], "max_tokens": 12, "seed": 3, "temperature": 1}
    embedded = {"model": model, "input": "the fox", "encoding_format": "base64"}
    return [
        Request(f"{model} text", "v1/completions", greedy | {"prompt": "the quick"}),
        Request(f"{model} ids", "v1/completions", ids),
        Request(f"{model} chat", "v1/chat/completions", greedy | {"messages": user}),
        Request(f"{model} embedding", "v1/embeddings", embedded),
    ]


def said(address: str, request: Request) -> Any:
    """What an answer says, without ids, times and the last digits of an embedding."""
    answer = httpx.post(f"{address}/{request.path}", json=request.body, timeout=60)
    assert answer.status_code == 200, answer.text
    values = answer.json()
    if request.path == "v1/embeddings":
        return len(values["data"][0]["embedding"])
    choice = values["choices"][0]
    text = choice.get("text") or choice["message"]["content"]
    return text, values["usage"]["prompt_tokens"]


_MODELS = {"one": ["one", "danish", "danish+german"], "org/two": ["org/two", "french"]}


@pytest.mark.slow
def test_each_model_answers_as_it_would_alone(address: str, grafts: Path, service: Service) -> None:
    """Interleaved requests to all models, against a server of each backbone."""
    alone: dict[str, Any] = {}
    requests: list[Request] = []
    for name, models in _MODELS.items():
        parts = {part for model in models for part in model.split("+")} - {name}
        own = {part: grafts / part for part in parts}
        with running(open_service(decoders()[name], own, name=name, **limits())) as single:
            for model in models:
                for request in requests_to(model):
                    alone[request.key] = said(single, request)
                    requests.append(request)
    random.Random(0).shuffle(requests)
    requests *= 2
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda request: said(address, request), requests))
    for request, value in zip(requests, found, strict=True):
        assert value == alone[request.key], request.key
    texts = {value for key, value in alone.items() if key.endswith(" text")}
    assert len(texts) == 5, "no two models say the same"
    for model, context in (("one", 512), ("org/two", 400)):
        assert httpx.get(f"{address}/v1/models/{model}").json()["max_model_len"] == context
    assert service.engine.stats().tokens == sum(member.engine.stats().tokens for member in service.members.values())


def test_an_encoder_beside_decoders(address: str, reader: Backbone, grafts: Path) -> None:
    body = {"model": "tasks", "rows": ROWS}
    with running(open_service(reader, {"tasks": grafts / "tasks"}, name="reader", **limits())) as single:
        expected = httpx.post(f"{single}/v1/graftlm/predict", json=body, timeout=60).json()["data"]
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(said, address, requests_to("danish")[0])
        predicted = pool.submit(httpx.post, f"{address}/v1/graftlm/predict", json=body, timeout=60)
    assert text.result()
    for one, other in zip(predicted.result().json()["data"], expected, strict=True):
        assert one.get("label") == other.get("label")
        assert one.get("tags") == other.get("tags")


def test_what_is_served(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
    cards = {card.id: card.graftlm for card in client.models.list().data}  # type: ignore[attr-defined]
    assert list(cards) == ["one", "org/two", "reader", "danish", "german", "french", "tasks"]
    kinds = {name: card["kind"] for name, card in cards.items()}
    assert [kinds[name] for name in ("one", "org/two", "reader", "danish")] == ["backbone"] * 3 + ["adapter"]
    assert [cards[name]["chat"] for name in ("danish", "french", "reader", "tasks")] == [
        "plain",
        "template",
        "none",
        "none",
    ]
    assert client.models.retrieve("org/two").id == "org/two"
    assert client.models.retrieve("danish+german").graftlm["kind"] == "mixture"  # type: ignore[attr-defined]
    health = httpx.get(f"{address}/health").json()
    assert (health["status"], health["models"], health["broken"]) == ("ready", 7, [])
    told = httpx.get(f"{address}/v1/graftlm/grafts").json()
    assert [one["name"] for one in told["backbones"]] == ["one", "org/two", "reader"]
    assert [one["context"] for one in told["backbones"]][:2] == [512, 400]
    on = {graft["name"]: graft["backbone"] for graft in told["data"]}
    assert on == {"danish": "one", "french": "org/two", "german": "one", "tasks": "reader"}
    body = {"model": "french", "text": "The fox runs. The dog sleeps.", "max_tokens": 4}
    answer = httpx.post(f"{address}/v1/graftlm/summarize", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("v1/completions", {"model": "two", "prompt": "a"}, 404, "one, org/two, reader, danish, german, french, tasks"),
        (
            "v1/completions",
            {"model": "danish+french", "prompt": "a"},
            400,
            "one and org/two",
        ),
        ("v1/completions", {"model": "tasks", "prompt": "a"}, 400, "reader"),
        ("v1/embeddings", {"model": "gone", "input": "a"}, 404, "'gone'"),
        ("v1/graftlm/predict", {"model": "danish", "rows": ROWS}, 400, "one"),
        ("v1/graftlm/predict", {"model": "reader", "rows": ROWS}, 400, "tasks"),
        ("v1/graftlm/clarify", {"model": "gone", "start": {"text": "a"}}, 404, "'gone'"),
    ],
)
def test_names_that_do_not_fit(address: str, path: str, body: dict[str, Any], status: int, sentence: str) -> None:
    answer = httpx.post(f"{address}/{path}", json=body, timeout=60)
    assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (status, True), answer.text


def test_changed_grafts_and_the_end_reach_every_engine(reader: Backbone, tmp_path: Path) -> None:
    """A graft that was trained again on another backbone moves there; at the end all engines finish what they have."""
    backbones = decoders()
    write(backbones["one"], tmp_path / "danish", 1)
    service = open_service(backbones, folder=tmp_path, **limits())
    router = service.engine
    assert isinstance(router, EngineRouter)
    assert [engine.names for engine in router.engines] == [("one", "danish"), ("org/two",)]
    write(backbones["org/two"], tmp_path / "danish", 2)
    write(backbones["one"], tmp_path / "german", 3)
    write(reader, tmp_path / "foreign", 4)
    service.reload(now=True)
    assert [engine.names for engine in router.engines] == [("one", "german"), ("org/two", "danish")]
    assert "one, org/two" in service.store.problems()["foreign"]
    shutil.rmtree(tmp_path / "danish")
    service.reload(now=True)
    assert router.names == ("one", "org/two", "german")
    assert b'graftlm_graft_loads_total{graft="danish",outcome="withdrawn"} 1.0' in generate_latest(
        service.members["org/two"].metrics.registry
    )
    for name in router.names[:2]:
        router.submit([GenerationRequest((5, 6), name, max_tokens=30)])
    assert router.close(30)
    assert router.stats().running == router.stats().waiting == 0
    assert sum(router.stats().finished.get(reason, 0) for reason in ("stop", "length")) == 2
    for name in router.names:
        with pytest.raises(ShuttingDownError):
            router.submit([GenerationRequest((5, 6), name, max_tokens=2)])


def test_a_graft_of_two_equal_backbones_is_refused(grafts: Path) -> None:
    twins = {"one": decoders()["one"], "two": decoders()["one"]}
    with pytest.raises(ArtifactError, match="one and two"):
        GraftStore(twins, {"danish": grafts / "danish"}).open()


def test_models_are_loaded_by_what_their_grafts_are(
    tiny_backbone: BackboneFolder, grafts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"writer": str(tiny_backbone("llama")), "reader": str(tiny_backbone("bert"))}
    loaded = load_backbones(models, {}, grafts, device="cpu")
    assert {name: backbone.kind for name, backbone in loaded.items()} == {"writer": "causal-lm", "reader": "encoder"}
    sizes = {name: inspect_model(model, loaded[name].kind)[0] for name, model in models.items()}
    for name, backbone in loaded.items():
        assert sizes[name] == sum(one.numel() * one.element_size() for one in backbone.model.parameters())
    assert inspect_model(models["writer"], "causal-lm", dtype="bfloat16")[0] == sizes["writer"] / 2
    memory = psutil.virtual_memory()._replace(available=sum(sizes.values()) - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(BackboneError, match="writer .* reader"):
        load_backbones(models, {}, grafts, device="cpu")
    for name, backbone in loaded.items():  # one alone fits, and without grafts the architecture decides
        assert load_backbones({name: models[name]}, {}, device="cpu")[name].kind == backbone.kind


def test_an_encoder_is_one_whatever_graft_is_named(tiny_backbone: BackboneFolder, grafts: Path) -> None:
    given = {"danish": grafts / "danish"}
    backbones = load_backbones({"reader": str(tiny_backbone("bert"))}, given, device="cpu")
    with pytest.raises(GraftError, match="danish .* llama"):
        open_service(backbones, given, **limits())


def test_grafts_that_are_named_decide_what_a_model_is(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    """An encoder's graft of the same architecture in the folder, or in a folder of nobody, makes no encoder of it."""
    folder = tiny_backbone("llama")
    kinds: dict[str, BackboneKind] = {"chat": "causal-lm", "served/mood": "encoder", "hidden/.old": "encoder"}
    for name, kind in kinds.items():
        backbone = load_backbone(folder, kind=kind)
        graft = build_graft(graft_config({"kind": "adapter", "width": 4}), backbone)
        save_graft(graft, backbone, tmp_path / name)

    def loaded(given: dict[str, Path], grafts: str, *names: str) -> list[str]:
        models = load_backbones(dict.fromkeys(names, str(folder)), given, tmp_path / grafts, device="cpu")
        return [backbone.kind for backbone in models.values()]

    chat = {"chat": tmp_path / "chat"}
    assert loaded(chat, "served", "one") == ["causal-lm"]
    assert loaded({}, "served", "one") == ["encoder"]
    assert loaded({}, "hidden", "one") == ["causal-lm"]
    assert loaded(chat, "served", "one", "two") == ["causal-lm", "causal-lm"]
    assert loaded({}, "served", "one", "two") == ["encoder", "encoder"]


def test_names_of_backbones(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    assert name_models([(None, str(tmp_path / "llama")), ("b", "org/x")]) == {
        "llama": str(tmp_path / "llama"),
        "b": "org/x",
    }
    with pytest.raises(GraftError):
        name_models([("a", "x"), ("a", "y")])
    for text in ("=x", "x="):
        with pytest.raises(GraftError) as caught:
            split_model(text)
        assert repr(text) in str(caught.value)
    with pytest.raises(GraftError):
        GraftStore({"one": Backbone.wrap(tiny_model("llama"), tiny_tokenizer())}, {"one": tmp_path}).open()


@pytest.mark.slow
def test_the_page_asks_each_backbone_for_its_own(address: str, browser: Browser, complaints: list[str]) -> None:
    """A column has the grafts of the backbone that is chosen there, and none of an encoder."""
    with opened(browser, address, complaints) as page:
        first = page.locator("article.column").first
        chips = first.locator("label.chip:visible")
        expect(chips).to_have_text(["danish", "german"])
        first.get_by_role("checkbox", name="danish").check()
        with page.expect_request("**/v1/completions") as sent:
            generate(page, "the fox")
        assert sent.value.post_data_json["model"] == "danish"
        expect(first.get_by_role("status")).to_contain_text("tokens")
        first.get_by_label("Backbone").select_option("org/two")
        expect(chips).to_have_text(["french"])
        expect(first.get_by_role("heading")).to_have_text("bare org/two")
        first.get_by_role("checkbox", name="french").check()
        expect(first.get_by_role("heading")).to_have_text("french")
        view(page, "Grafts")
        expect(page.locator("#backbone-line")).to_contain_text("and reader (an encoder, 512 tokens of context)")
    assert complaints == []

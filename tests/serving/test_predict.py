"""Twenty tasks in one graft: trained by a recipe, loaded, and answered over HTTP in mixed batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from graftlm.backbone import load_backbone, max_sequence_length
from graftlm.backbone.load import served_kind
from graftlm.errors import EvaluationError
from graftlm.generation.predict import TaskGraft, load_task_graft, predict_rows, read_question
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import run_recipe
from graftlm.runs.task_run import TaskRecipe
from graftlm.serving import prediction
from graftlm.serving.backbones import load_backbones
from graftlm.serving.protocol import EngineLimits, Finish, ServingError
from graftlm.serving.service import Service, open_service
from graftlm.serving.settings import ServerSettings
from serving.extending import client_of, refusal
from serving.scripted import scripted_service
from serving.web import running
from tiny import BackboneFolder
from training.tasks import WORDS, task_recipe

BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A run of twenty tasks: fourteen of two to fifteen classes, and one or two of each other type."""
    folder = tmp_path_factory.mktemp("twenty")
    recipe = task_recipe(folder, tiny_backbone("bert"))
    for number in range(14):
        rows = [
            {"text": f"{a} {b}", "label": f"c{(i + j) % (number + 2)}"}
            for i, a in enumerate(WORDS)
            for j, b in enumerate(WORDS[:5])
        ]
        path = folder / "rows" / f"class{number}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        recipe["tasks"][f"class{number}"] = {"type": "classification", "train": str(path), "test": str(path)}
    recipe |= {"sampler": {"policy": "uniform"}, "training": {"steps": 8, "batch_size": 20, "learning_rate": 1e-2}}
    run_recipe(TaskRecipe.parse(recipe), progress=False, log=lambda _: None)
    return folder / "run" / "graft"


@pytest.fixture(scope="module")
def task_graft(folder: Path) -> TaskGraft:
    return load_task_graft(folder)


@pytest.fixture(scope="module")
def service(folder: Path, tiny_backbone: BackboneFolder) -> Service:
    backbone, limits = load_backbone(tiny_backbone("bert"), kind="encoder"), EngineLimits(batch_size=BATCH, queue=200)
    return open_service(
        backbone, {"other": folder, "tasks": folder}, name="tiny", limits=limits, settings=ServerSettings(port=0)
    )


@pytest.fixture(scope="module")
def passes() -> Iterator[list[list[int]]]:
    """The tasks of each pass of the encoder."""
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        predict = GraftedModel.predict

        def noting(model: GraftedModel, *args: Any, extras: Any = None, **inputs: Any) -> Any:
            seen.append(extras["task"].tolist())
            return predict(model, *args, extras=extras, **inputs)

        patch.setattr(GraftedModel, "predict", noting)
        yield seen


@pytest.fixture(scope="module")
def address(service: Service, passes: Any) -> Iterator[str]:
    with running(service) as address:
        yield address


def text_of(name: str, task_graft: TaskGraft, number: int) -> Any:
    words = [WORDS[(number * 5 + step) % len(WORDS)] for step in range(2 + number % 4)]
    if task_graft.task(name).type == "tagging":
        return words
    return " ".join(words) if len(task_graft.config(name).texts) == 1 else [" ".join(words[::-1]), " ".join(words)]


def alone(task_graft: TaskGraft, name: str, text: Any) -> dict[str, Any]:
    """What `graft predict` says of one row."""
    config = task_graft.config(name)
    values = text if len(config.texts) > 1 else [text]
    (answer,) = predict_rows(task_graft, name, [read_question(config, values, config.texts, "row")])
    return {"task": name} | answer


def close(a: Any, b: Any) -> bool:
    """Equal, but for rounding of probabilities and numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    return a == pytest.approx(b, abs=1e-4) if isinstance(a, float) else a == b


@pytest.mark.slow
def test_twenty_tasks_in_mixed_batches_of_several_requests(
    address: str, task_graft: TaskGraft, passes: list[list[int]], service: Service
) -> None:
    names = list(task_graft.tasks)
    assert len(names) == 20
    rows = [{"task": name, "text": text_of(name, task_graft, number)} for number, name in enumerate(names)]
    bodies = [{"model": "tasks", "rows": rows[start::4]} for start in range(4)]
    passes.clear()
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda body: httpx.post(f"{address}/v1/graftlm/predict", json=body, timeout=60), bodies)
        )
    shared = list(passes)
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code == 200, answer.text
        for row, found in zip(body["rows"], answer.json()["data"], strict=True):
            assert close(alone(task_graft, row["task"], row["text"]), found), (row, found)
    assert sorted(task for own in shared for task in own) == list(range(20))
    assert max(map(len, shared)) > 5, "a request has five rows, so a pass holds rows of several"
    assert max(map(len, shared)) <= BATCH
    assert len(service.engine.stats().finished) == 1


def test_more_rows_than_a_batch_are_answered_in_their_order(address: str, task_graft: TaskGraft) -> None:
    rows = [{"task": "topic", "text": text_of("topic", task_graft, number)} for number in range(2 * BATCH + 3)]
    answer = httpx.post(f"{address}/v1/graftlm/predict", json={"model": "tasks", "rows": rows}, timeout=60).json()
    assert (answer["object"], answer["model"]) == ("list", "tasks")
    labels = [alone(task_graft, "topic", row["text"])["label"] for row in rows[::3]]
    assert len(answer["data"]) == len(rows)
    assert [row["label"] for row in answer["data"][::3]] == labels


def test_grafts_take_turns_on_one_encoder(address: str, task_graft: TaskGraft) -> None:
    row = {"task": "animals", "text": text_of("animals", task_graft, 3)}
    expected = alone(task_graft, row["task"], row["text"])
    for model in ("tasks", "other", "tasks"):
        answer = httpx.post(f"{address}/v1/graftlm/predict", json={"model": model, "rows": [row]}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert close(expected, answer.json()["data"][0])


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "gone", "rows": [{"task": "topic", "text": "a"}]}, 404, "'gone'"),
        (
            {"model": "tiny", "rows": [{"task": "topic", "text": "a"}]},
            400,
            "other, tasks",
        ),
        ({"model": "tasks", "rows": [{"task": "topics", "text": "a"}]}, 400, "'topics' (did you mean topic?)"),
        (
            {"model": "tasks", "rows": [{"task": "alike", "text": "fox"}]},
            400,
            "Row 0",
        ),
        ({"model": "tasks", "rows": [{"task": "topic", "text": " "}]}, 400, "Row 0"),
        ({"model": "tasks", "rows": []}, 400, "rows"),
    ],
)
def test_what_a_client_can_mend(address: str, body: dict[str, Any], status: int, sentence: str) -> None:
    answer = httpx.post(f"{address}/v1/graftlm/predict", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]["message"]


def test_a_row_without_a_prediction_stops_no_other(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = prediction.decode_prediction

    def failing(spec: Any, row: Any, *rest: Any) -> Any:
        if row.texts == ("bad",):
            raise EvaluationError("not finite")
        return decode(spec, row, *rest)

    monkeypatch.setattr(prediction, "decode_prediction", failing)
    rows = [{"task": "topic", "text": text} for text in ("bad", "fox")]
    answer = httpx.post(f"{address}/v1/graftlm/predict", json={"model": "tasks", "rows": rows}, timeout=60)
    bad, good = answer.json()["data"]
    assert bad == {"task": "topic", "error": "not finite"}
    assert good["label"]


@pytest.mark.parametrize(
    ("reason", "code"), [("time", "timed_out"), ("cancelled", "shutting_down")], ids=["time", "cancelled"]
)
def test_rows_that_were_not_reached(reason: Any, code: str) -> None:
    async def stream() -> AsyncIterator[Finish]:
        yield Finish("stop", 3, 0, prediction={"label": "a"})
        yield Finish(reason, 3, 0, index=1)

    with pytest.raises(ServingError) as error:
        asyncio.run(prediction.predictions(stream()))  # type: ignore[arg-type]  # only the iteration is used
    assert (error.value.status, error.value.code) == (503, code)


def test_an_encoder_writes_no_text(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", json={"model": "tasks", "prompt": "a"}, timeout=60)
    assert answer.status_code == 400
    assert "/v1/graftlm/predict" in answer.text
    assert {model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]} == {"tiny", "other", "tasks"}
    assert httpx.get(f"{address}/health").json()["status"] == "ready"


def test_an_encoder_embeds_texts_without_its_grafts(address: str, service: Service, task_graft: TaskGraft) -> None:
    """Texts of many lengths in one request, between predictions of its grafts, as the encoder's means of each alone."""
    plain, tokenizer = task_graft.backbone.bare_model, task_graft.encoder.tokenizer
    texts = [" ".join(WORDS[(n + step) % len(WORDS)] for step in range(1 + 7 * (n % 5))) for n in range(40)]
    row = {"task": "topic", "text": "river fox"}
    with ThreadPoolExecutor(3) as pool:
        bodies = [{"model": "tiny", "input": texts}] * 2 + [{"model": "tasks", "rows": [row] * 40}]
        paths = ["embeddings", "embeddings", "graftlm/predict"]
        answers = [
            *pool.map(lambda path, body: httpx.post(f"{address}/v1/{path}", json=body, timeout=60), paths, bodies)
        ]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    for text, *items in zip(texts, answers[0].json()["data"], answers[1].json()["data"], strict=True):
        with torch.no_grad():
            (mean,) = plain(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)
        for item in items:
            assert torch.allclose(torch.tensor(item["embedding"]), mean, atol=1e-5), text
    answer = httpx.post(f"{address}/v1/embeddings", json={"model": "tasks", "input": "a"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize("name", ["T5", "Llava", "CLIP", "GPT2", "Bart"])
def test_what_is_no_encoder_is_not_taken_for_one(name: str, tmp_path: Path) -> None:
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    assert served_kind(str(tmp_path)) == "causal-lm"


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_an_encoder_is_served_without_grafts(tiny_backbone: BackboneFolder, family: str) -> None:
    ((name, backbone),) = load_backbones({"reader": str(tiny_backbone(family))}, {}, device="cpu").items()
    texts = ["the fox", "a quick brown fox jumps over the lazy dog by the river", "dog"]
    tokenizer, plain = backbone.need_tokenizer(), backbone.bare_model
    if family == "bert":
        tokenizer.pad_token = None  # as those of many decoders, which may be encoders too
    with running(open_service(backbone, name=name, settings=ServerSettings(reload_seconds=0))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
        answer = client.embeddings.create(model="reader", input=texts)
        (card,) = client.models.list().data
        body = {"model": "reader", "rows": [{"task": "topic", "text": "a"}]}
        refused = httpx.post(f"{address}/v1/graftlm/predict", json=body, timeout=60)
    told = card.model_dump()
    assert told["graftlm"] == {"kind": "backbone", "chat": "none"}
    assert told["max_model_len"] == max_sequence_length(backbone)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    for text, item in zip(texts, answer.data, strict=True):
        with torch.no_grad():
            (mean,) = plain(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)
        assert torch.allclose(torch.tensor(item.embedding), mean, atol=1e-5), text


def test_a_server_that_writes_has_no_heads(tmp_path: Path) -> None:
    service = scripted_service(tmp_path)
    said = refusal(client_of(service), "predict", model="tiny", rows=[{"task": "topic", "text": "a"}])
    assert "tiny" in said

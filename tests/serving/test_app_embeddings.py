"""Embeddings and tokens over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.serving.protocol import EngineLimits
from graftlm.serving.service import open_service
from graftlm.serving.settings import ApiKeys
from graftlm.store.artifact import save_graft
from graftlm.testing import randomise
from serving.web import ScriptedEngine, running, web_service
from tiny import tiny_model, tiny_tokenizer

IDS = [[5, 6, 7, 8], [9, 10], list(range(20, 90))]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.wrap(tiny_model("llama", max_position_embeddings=128), tiny_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def expected(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The mean of the last hidden states, each text by itself, of the backbone and of a graft; and its folder."""

    def means(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            passes = [model(input_ids=torch.tensor([ids]), output_hidden_states=True) for ids in IDS]
        return [output.hidden_states[-1][0].mean(0) for output in passes]

    folder = tmp_path_factory.mktemp("grafts") / "danish"
    bare = means(backbone.model)
    graft = build_graft(graft_config({"kind": "neutral-residues"}), backbone)
    with randomise(GraftedModel(backbone, {"danish": graft}).eval(), 0.3) as model:
        grafted = means(model)
    save_graft(graft, backbone, folder)
    return {"tiny": bare, "danish": grafted, "folder": folder}


@pytest.fixture(scope="module")
def address(backbone: Backbone, expected: dict[str, Any]) -> Iterator[str]:
    limits = EngineLimits(batch_size=2)
    with running(open_service(backbone, {"danish": expected["folder"]}, limits=limits)) as address:
        yield address


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=30)


@pytest.mark.parametrize("model", ["tiny", "danish"])
@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}])
def test_embeddings_are_means_of_the_last_states(
    client: openai.OpenAI, expected: dict[str, Any], model: str, form: dict[str, Any]
) -> None:
    answer = client.embeddings.create(model=model, input=IDS, **form)
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, mean in zip(answer.data, expected[model], strict=True):
        assert torch.allclose(torch.tensor(item.embedding), mean, atol=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (76, 76)
    assert not torch.allclose(expected["tiny"][0], expected["danish"][0], atol=1e-3), "the graft acts"


def test_a_text_and_what_does_not_fit(client: openai.OpenAI) -> None:
    one, two = (client.embeddings.create(model="tiny", input=text).data for text in ("the fox", ["the fox"]))
    assert one[0].embedding == two[0].embedding
    for wrong, status, param in [
        ({"model": "dansk", "input": "a"}, 404, None),
        ({"model": "tiny", "input": ""}, 400, "input"),
        ({"model": "tiny", "input": [[5], [999_999]]}, 400, "input.1"),
        ({"model": "tiny", "input": [list(range(200))]}, 400, "input"),
        ({"model": "tiny", "input": ["a", "the fox " * 200]}, 400, "input.1"),
        ({"model": "tiny", "input": "a", "dimensions": 5}, 400, "dimensions"),
        ({"model": "tiny", "input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ]:
        with pytest.raises(openai.APIStatusError) as caught:
            client.post("/embeddings", body=wrong, cast_to=object)
        assert (caught.value.status_code, caught.value.param) == (status, param)


def test_langchain_s_client_embeds(address: str) -> None:
    from langchain_openai import OpenAIEmbeddings  # takes seconds to import

    chat: Any = {"model": "tiny", "base_url": f"{address}/v1", "api_key": "unused", "check_embedding_ctx_length": False}
    vectors = OpenAIEmbeddings(**chat).embed_documents(["the fox", "a dog"])
    assert len(vectors) == 2
    assert len(vectors[0]) == 48


def test_keys_are_asked_for() -> None:
    with running(web_service(ScriptedEngine(), keys=ApiKeys([("ann", "k" * 40)]))) as address:
        assert httpx.post(f"{address}/v1/embeddings", json={}).status_code == 401

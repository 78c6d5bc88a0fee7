"""OpenAI's own client, LangChain's and curl find what they expect."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from graftlm.errors import TapConflictError
from graftlm.serving.protocol import ContextLengthError, EngineError, Finish, QueueFullError, ShuttingDownError
from serving.web import HELLO, Script, ScriptedEngine, chat, completion, outputs, post, running, web_service

USER = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine()
    with running(web_service(engine)) as address:
        yield engine, address


@pytest.fixture
def engine(served: tuple[ScriptedEngine, str]) -> Iterator[ScriptedEngine]:
    engine = served[0]
    engine.requests.clear()
    engine.scripts.clear()
    engine.refusal, engine.names = None, ("tiny", "danish", "french")
    yield engine
    engine.refusal = None


@pytest.fixture
def address(served: tuple[ScriptedEngine, str], engine: ScriptedEngine) -> str:
    return served[1]


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=20)


def test_models_are_the_backbone_and_its_grafts(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "danish", "french"]
    assert client.models.retrieve("danish+french").id == "danish+french"
    with pytest.raises(openai.NotFoundError, match="tiny, danish, french"):
        client.models.retrieve("dansk")


def test_a_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="danish", messages=USER, max_completion_tokens=9)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world!")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
    }
    assert answer.id.startswith("chatcmpl-")
    assert (engine.requests[0].model, engine.requests[0].max_tokens, engine.requests[0].temperature) == (
        "danish",
        9,
        1.0,
    )


def test_keys_of_vllm_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    options = {"ignore_eos": True, "top_k": 3, "repetition_penalty": 1.2}
    client.completions.create(model="tiny", prompt="the fox", extra_body=options)
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, extra_body=options)
    for request in engine.requests:
        assert (request.ignore_eos, request.top_k, request.repetition_penalty) == (True, 3, 1.2)
    assert len(engine.requests) == 2


def test_keys_of_openai_without_an_effect_on_the_answer_are_ignored(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    keys: Any = {"user": "ann", "metadata": {"topic": "foxes"}, "store": False, "service_tier": "auto"}
    keys |= {"safety_identifier": "a1", "prompt_cache_key": "b2", "prompt_cache_retention": "24h"}
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=9)
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, **keys)
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, extra_body={"user": None})
    assert engine.requests[0] == engine.requests[1] == engine.requests[2]
    client.embeddings.create(model="tiny", input="the fox", user="ann")


def test_what_vllm_bench_serve_sends(address: str, engine: ScriptedEngine) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    text = completion(repetition_penalty=1.0, max_tokens=9, logprobs=None, ignore_eos=True, **stream)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    talk = chat(messages=parts, max_completion_tokens=9, **stream)
    assert post(address, "/v1/completions", text).status_code == 200
    assert post(address, "/v1/chat/completions", talk).status_code == 200
    assert [request.max_tokens for request in engine.requests] == [9, 9]


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="danish", messages=USER, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas[1:-1]] == list(HELLO)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream_comes_last(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options=options)
    assert (last.choices, last.usage.total_tokens) == ([], 8)
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = client.completions.create(model="tiny", prompt="a", stream=True, stream_options=options)
    assert (last.choices, last.usage.total_tokens) == ([], 8)


def test_a_completion_and_its_stream(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    whole = client.completions.create(model="tiny", prompt="the fox")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello world!", "stop")
    assert engine.requests[0].max_tokens == 16, "OpenAI's default"
    pieces = list(client.completions.create(model="tiny", prompt="the fox", stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello world!"
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_prompts_come_as_text_or_ids_one_or_several(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for prompt in ("the fox", ["the fox", "a dog"], [5, 6], [[5, 6], [7]]):
        client.completions.create(model="tiny", prompt=prompt)
    ids = [request.prompt for request in engine.requests]
    assert ids[0] == ids[1]
    assert ids[2] != ids[0]
    assert ids[3:] == [(5, 6), (5, 6), (7,)]


def test_several_choices_draw_each_their_own(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=7, temperature=0.5, top_p=0.9)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.seed for request in engine.requests] == [7, 8, 7, 8]
    assert {(request.temperature, request.top_p) for request in engine.requests} == {(0.5, 0.9)}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 20), "each prompt counts once"


def test_several_choices_stream_beside_each_other(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="tiny", messages=USER, stream=True, n=2):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "Hello world!", 1: "Hello world!"}


def test_top_p_of_nothing_takes_the_likeliest(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="tiny", prompt="a", top_p=0)
    assert (engine.requests[0].temperature, engine.requests[0].top_p) == (0.0, 1.0)


def test_stop_strings(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script([*outputs("He", "llo", "", "", reason="stop")]))
    answer = client.completions.create(model="tiny", prompt="a", stop=["\n", "END"], logprobs=1)
    assert engine.requests[0].stop == ("\n", "END")
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs.tokens == ["H", "l"], "tokens of the stop string are not told"
    client.completions.create(model="tiny", prompt="a", stop="END")
    assert engine.requests[1].stop == ("END",)


def test_what_was_held_back_and_is_no_stop_string(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts += [Script(outputs("He", "", reason="length", held="EN")) for _ in range(2)]
    whole = client.completions.create(model="tiny", prompt="a", stop="END", logprobs=0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("HeEN", "length")
    assert len(whole.choices[0].logprobs.tokens) == 2
    stream = client.completions.create(model="tiny", prompt="a", stop="END", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "HeEN"


def test_logprobs_of_a_completion(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script(outputs("the", " fox", "é")))
    told = client.completions.create(model="tiny", prompt="a", logprobs=2).choices[0].logprobs
    assert engine.requests[0].logprobs == 2
    assert told.token_logprobs == [-0.5, -1.5, -2.5]
    assert told.tokens[0] == "th"
    assert told.text_offset[0] == 0
    assert told.top_logprobs[0] == {"th": -0.5, "$": -2.5}


def test_logprobs_of_a_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts += [Script(outputs("H", "é")) for _ in range(2)]
    how = {"model": "tiny", "messages": USER, "logprobs": True, "top_logprobs": 1}
    told = client.chat.completions.create(**how).choices[0].logprobs.content
    assert engine.requests[0].logprobs == 1
    assert [(one.token, one.logprob, one.bytes) for one in told] == [
        ("H", -0.5, [72]),
        ("bytes:\\xc3", -1.5, [0xC3]),
    ]
    assert [(top.token, top.logprob) for top in told[0].top_logprobs] == [("H", -0.5), ("$", -2.5)]
    chunks = client.chat.completions.create(**how, stream=True)
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == told
    client.chat.completions.create(model="tiny", messages=USER, logprobs=True)
    assert engine.requests[-1].logprobs == 0


def test_traces_stand_under_our_own_key(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts += [Script(outputs("H", "i", trace={"danish": 0.93})) for _ in range(2)]
    extra = {"graftlm": {"trace": True}}
    whole = client.chat.completions.create(model="danish", messages=USER, extra_body=extra)
    expected = [{"token": "H", "values": {"danish": 0.93}}, {"token": "i", "values": {"danish": 0.93}}]
    assert engine.requests[0].trace
    assert whole.choices[0].graftlm == {"trace": expected}
    chunks = client.chat.completions.create(model="danish", messages=USER, extra_body=extra, stream=True)
    assert [one for chunk in chunks for one in getattr(chunk.choices[0], "graftlm", {}).get("trace", [])] == expected
    plain = client.chat.completions.create(model="danish", messages=USER)
    assert not hasattr(plain.choices[0], "graftlm"), "who does not ask sees OpenAI's keys alone"


def test_an_answer_that_time_ended_says_so(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script(outputs("He", reason="time")))
    (choice,) = client.completions.create(model="tiny", prompt="a").choices
    assert (choice.text, choice.finish_reason, choice.graftlm) == ("He", "length", {"ended": "time"})


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [
        (ContextLengthError("The prompt has 9 tokens."), openai.BadRequestError, "context_length_exceeded"),
        (QueueFullError("The queue is full."), openai.RateLimitError, "queue_full"),
        (ShuttingDownError("The server is shutting down."), openai.InternalServerError, "shutting_down"),
        (EngineError("The request failed."), openai.InternalServerError, "engine_failed"),
    ],
)
def test_refusals_of_the_engine(client: openai.OpenAI, engine: ScriptedEngine, refusal, kind, code: str) -> None:
    engine.refusal = refusal
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.completions.create(model="tiny", prompt="a", stream=stream)
        assert caught.value.code == code
        assert caught.value.status_code == refusal.status


def test_a_mistake_that_a_model_finds_is_the_request_s(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.refusal = TapConflictError("Both grafts write at ffn 0.")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="danish+french", prompt="a")


def test_an_error_on_the_way(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    broken = [*outputs("He", "llo")[:-1], EngineError("A gate broke.")]
    engine.scripts += [Script(list(broken)) for _ in range(2)]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="a")
    stream = client.completions.create(model="tiny", prompt="a", stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="A gate broke"):
        seen.extend(chunk.choices[0].text for chunk in stream)
    assert seen == ["He", "llo"]


def test_a_mistake_of_ours_tells_clients_nothing_of_itself(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts += [Script([ZeroDivisionError("secret")]) for _ in range(2)]
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="a")
    assert caught.value.code == "internal_error"
    assert "secret" not in str(caught.value)
    with pytest.raises(openai.APIError) as streamed:
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    assert "secret" not in str(streamed.value)


@pytest.mark.parametrize(
    ("end", "code"), [(Finish("cancelled", 3, 2), "shutting_down"), (Finish("time", 3, 0), "timed_out")]
)
def test_no_answer_looks_whole_that_is_not(
    client: openai.OpenAI, engine: ScriptedEngine, end: Finish, code: str
) -> None:
    engine.scripts.append(Script([end]))
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="a")
    assert (caught.value.status_code, caught.value.code) == (503, code)


def test_langchain(address: str, engine: ScriptedEngine) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{address}/v1", api_key="unused", model="danish", temperature=0, max_retries=0, stop=["END"], seed=3
    )
    answer = model.invoke([("system", "Be brief."), ("human", "the fox")])
    assert answer.content == "Hello world!"
    assert answer.usage_metadata["total_tokens"] == 8
    assert (engine.requests[0].temperature, engine.requests[0].seed) == (0.0, 3)
    assert "END" in engine.requests[0].stop
    assert "".join(chunk.content for chunk in model.stream("the fox")) == "Hello world!"
    with pytest.raises(openai.NotFoundError):
        model.bind(model="nix").invoke("the fox")


def test_curl(address: str) -> None:
    command = ["curl", "-sS", "-N", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(chat(stream=True))]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Hello world!"


def test_an_assistant_s_answer_can_be_sent_back_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER).choices[0].message
    with_null = answer.model_dump()
    with_annotations = with_null | {"annotations": [{"type": "url_citation"}]}
    for sent_back in (answer, with_null, with_annotations):
        messages: Any = [*USER, sent_back, {"role": "user", "content": "and then?"}]
        client.chat.completions.create(model="tiny", messages=messages)
    first, *others = (request.prompt for request in engine.requests)
    assert len(others[0]) > len(first)
    assert others[0] == others[1] == others[2]


def test_health_and_metrics(address: str, engine: ScriptedEngine) -> None:
    before = httpx.get(f"{address}/metrics").text
    post(address, "/v1/completions", completion(model="danish+french"))
    post(address, "/v1/completions", completion(model="nix"))
    health = httpx.get(f"{address}/health")
    assert health.status_code == 200
    assert health.json() == {"status": "ready", "running": 1, "waiting": 2, "models": 3, "broken": []}
    text = httpx.get(f"{address}/metrics").text
    assert value(text, 'graftlm_requests_total{path="/v1/completions",status="404"}') == 1 + value(
        before, 'graftlm_requests_total{path="/v1/completions",status="404"}'
    )
    assert value(text, 'graftlm_completion_tokens_total{model="mixture"}') == 5 + value(
        before, 'graftlm_completion_tokens_total{model="mixture"}'
    )
    assert value(text, 'graftlm_continuations_total{reason="stop"}') == 4
    assert value(text, "graftlm_waiting") == 2
    assert 'graftlm_first_token_seconds_count{model="mixture"}' in text
    assert '"nix"' not in text, "clients can't make up labels"


def value(page: str, name: str) -> float:
    """A figure of a page of metrics, 0 where it is not there."""
    lines = [line for line in page.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0

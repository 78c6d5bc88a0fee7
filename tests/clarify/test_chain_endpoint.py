"""Endpoints over HTTP on this machine: servers that work, fail, stall, stream or break the protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from clarify.server import FRENCH, QUESTION, ChatServer, FaultyHandler, serving, translator
from graftlm.errors import EndpointError, MissingExtraError, RecipeError
from graftlm.generation.generate import Decoding, generate_text
from graftlm.pipelines.clarify import (
    Chain,
    Conversation,
    Cost,
    Endpoint,
    EndpointConfig,
    GainEstimator,
    LocalModel,
    Question,
    RecordedUser,
    load_template,
    prompts,
)
from tiny import tiny_model, tiny_tokenizer

PROMPT = prompts.build_prompt(load_template("translate"), "ask", "fr", "Are you sure?")
POLITE = "someone to be addressed politely"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.pipelines.clarify.endpoint._FIRST_PAUSE", 0.001)


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with serving(translator, FaultyHandler) as running:
        yield running


def endpoint(server: ChatServer, model: str, **more: Any) -> Endpoint:
    server.requests.clear()
    return Endpoint(EndpointConfig(url=server.url, model=model, **({"timeout": 5.0, "retries": 2} | more)))


@pytest.mark.parametrize("model", ["fails:0", "strict", "streams", "thinks", "fails:2", "rate_limits:1", "hangs_up:1"])
def test_the_endpoint_recovers_from_faults(server: ChatServer, model: str) -> None:
    one = endpoint(server, model)
    reply = one.generate(PROMPT)
    assert reply.text == QUESTION
    assert reply.cost.calls == 1
    assert reply.truncated == (model == "thinks"), "a reply that ends at the limit says so"
    conversation = Conversation.start("Are you sure?", "translate", "fr")
    found = Chain(one, RecordedUser([POLITE])).run(conversation)
    assert found.written is not None
    assert found.written.output == FRENCH[POLITE]
    assert found.written.author == model


@pytest.mark.parametrize("model", ["fails:0", "streams", "strict", "never_streams"])
def test_replies_are_streamed(server: ChatServer, model: str) -> None:
    one, parts = endpoint(server, model), []
    reply = one.generate(PROMPT, on_text=parts.append)
    assert "".join(parts) == reply.text == QUESTION
    assert len(parts) == (1 if model == "never_streams" else len(QUESTION.split()))
    again = one.generate(PROMPT, on_text=parts.append)
    assert again.text == QUESTION
    if model in {"fails:0", "strict"}:
        assert reply.cost.new_tokens == len(QUESTION.split())


def test_tokens_are_counted_as_the_server_does(server: ChatServer) -> None:
    reply = endpoint(server, "fails:0").generate(PROMPT)
    (request,) = server.requests
    read = sum(len(message["content"].split()) for message in request["messages"])
    assert reply.cost == Cost(calls=1, prompt_tokens=read, new_tokens=len(QUESTION.split()))
    assert request["messages"] == PROMPT.messages()
    assert (request["temperature"], request["max_tokens"]) == (0, 256)


def test_rejected_parameters_are_not_sent_again(server: ChatServer) -> None:
    one = endpoint(server, "strict")
    one.generate(PROMPT)
    assert [{"max_tokens", "temperature"} & request.keys() for request in server.requests][-1] == set()
    assert server.requests[-1]["max_completion_tokens"] == 256
    before = len(server.requests)
    one.generate(PROMPT)
    assert len(server.requests) == before + 1


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("fails", ["3 tries", "500", "out of memory"]),
        ("rate_limits", ["3 tries", "429", "slow down"]),
        ("wants_key", ["401", "OPENAI_API_KEY"]),
        ("knows_no_model", ["'knows_no_model'", "no such model"]),
        ("turns_down", ["400", "the text is too long"]),
        ("html", ["OpenAI's protocol", "<html><body>Welcome</body></html>"]),
        ("broken_json", ["OpenAI's protocol"]),
        ("other_json", ["OpenAI's protocol", "JSON"]),
        ("no_choice", ["OpenAI's protocol", "JSON"]),
        ("null", ["OpenAI's protocol", "JSON"]),
        ("breaks_off", ["OpenAI's protocol", "stream"]),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_server_errors_are_one_sentence(server: ChatServer, model: str, named: list[str], streamed: bool) -> None:
    one = endpoint(server, model)
    with pytest.raises(EndpointError) as error:
        one.generate(PROMPT, on_text=(lambda chunk: None) if streamed else None)
    message = str(error.value)
    assert message.startswith(f"The server {server.url} ")
    assert "\n" not in message
    for value in named:
        assert value in message


def test_an_empty_reply(server: ChatServer) -> None:
    found = Chain(endpoint(server, "says_nothing"), RecordedUser([POLITE])).run(
        Conversation.start("Are you sure?", "translate", "fr")
    )
    assert [turn.kind for turn in found.turns] == ["skipped", "written"]
    assert found.written is not None
    assert found.written.output == ""


def test_a_server_that_stalls(server: ChatServer) -> None:
    with pytest.raises(EndpointError) as error:
        endpoint(server, "stalls", timeout=0.05, retries=0).generate(PROMPT)
    assert "0.05 seconds, at the first try" in str(error.value)


def test_an_unreachable_server() -> None:
    one = Endpoint(EndpointConfig(url="http://127.0.0.1:9/v1", model="m", retries=0))
    with pytest.raises(EndpointError):
        one.generate(PROMPT)


def test_turns_before_a_failure_are_kept(server: ChatServer, tmp_path: Any) -> None:
    path = tmp_path / "c.json"
    conversation = Conversation.start("Are you sure?", "translate", "fr")
    with pytest.raises(EndpointError):
        Chain(endpoint(server, "fails_from:1"), RecordedUser([POLITE])).run(conversation, keep=path)
    kept = Conversation.load(path)
    assert [turn.kind for turn in kept.turns] == ["asked", "answered"]
    found = Chain(endpoint(server, "fails:0"), RecordedUser([POLITE])).run(kept, keep=path)
    assert found.written is not None
    assert found.written.output == FRENCH[POLITE]


def test_keys_come_from_the_environment(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    one = endpoint(server, "fails:0", key_variable="MY_KEY")
    one.generate(PROMPT)
    assert server.keys[-1] == "Bearer s3cret"
    monkeypatch.delenv("MY_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    endpoint(server, "fails:0", key_variable="MY_KEY").generate(PROMPT)
    assert "another" not in server.keys[-1], "no other key is sent"


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError) as error:
        Endpoint(EndpointConfig(url="http://localhost/v1", model="m"))
    assert "graftlm[clarify]" in str(error.value)


def test_invalid_addresses_are_refused() -> None:
    with pytest.raises(RecipeError) as error:
        EndpointConfig(url="localhost:8000", model="m")
    assert "url" in str(error.value)
    assert "'localhost:8000'" in str(error.value)


@pytest.fixture(scope="module")
def local() -> LocalModel:
    return LocalModel(tiny_model("llama", max_position_embeddings=8192), tiny_tokenizer(), max_new_tokens=6)


def test_a_real_model_behind_a_server(local: LocalModel) -> None:
    """The replies of a tiny random model arrive unchanged."""
    model, tokenizer = local._model, local._tokenizer

    def replies(body: Any) -> str:
        text = "\n".join(message["content"] for message in body["messages"])[-200:]
        return generate_text(model, tokenizer, text, Decoding(max_new_tokens=6)).text

    with serving(replies) as server:
        one = endpoint(server, "tiny")
        conversation = Conversation.start("Are you sure?", "translate", "fr")
        found = Chain(one, RecordedUser([POLITE])).run(conversation)
        assert found.step == "done"
        assert found.written is not None
        assert found.written.output == replies(server.requests[-1]).strip()
        assert found == Chain(one, RecordedUser([POLITE])).run(conversation), "the same every time"


def test_a_local_model_in_both_roles(local: LocalModel) -> None:
    conversation = Conversation.start("Are you sure?", "translate", "fr", budget=2, threshold=0.1)
    found = Chain(local, RecordedUser([POLITE])).run(conversation)
    assert found.step == "done"
    assert found.written is not None
    assert found.cost.new_tokens <= 6 * found.cost.calls
    assert found.cost.prompt_tokens > 0
    # A model that asks: the gain of its question comes from likelihoods.
    gain, _ = GainEstimator(local).estimate(conversation, Question(text="Who?", answers=("a friend", "a boss")))
    assert gain is not None
    assert gain.estimator == "likelihood"
    assert 0 <= gain.bits <= 1


def test_a_local_model_scores_and_writes_alike(local: LocalModel) -> None:
    prompt = prompts.build_prompt(load_template("answer"), "plain", "en", "What is it?")
    text = local.prompt_text(prompt)
    assert text == prompt.text()
    likely = generate_text(local._model, local._tokenizer, text, Decoding(max_new_tokens=6)).text
    assert local.generate(prompt).text == likely.partition(prompt.stop)[0]
    one, same, other = local.score(prompt, ["Rome.", "Rome.", "xx"])
    assert one == pytest.approx(same), "two rows of a batch may round differently"
    assert one != pytest.approx(other)
    assert max(one, other) < 0


def test_a_chat_model_reads_a_chat(local: LocalModel) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    chat = LocalModel(local._model, tokenizer, max_new_tokens=2)
    text = chat.prompt_text(PROMPT)
    assert text.startswith("<bos>system: A text is to be put into French."), "this tokenizer adds none of its own"
    assert text.endswith("Are you sure?\n</text>\nassistant:")
    assert chat.generate(PROMPT).cost.new_tokens == 2
    tokenizer.chat_template = str(tokenizer.chat_template).replace("m['content']", "m['content'][0]['text']")
    assert chat.prompt_text(PROMPT) == text, "a template may take contents in parts"

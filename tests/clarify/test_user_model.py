"""A user's model apart from the translator, exemplars from a file, and what both models cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from clarify.server import FRENCH, ChatHandler, ChatServer, FaultyHandler, serving, translator
from cli.tools import Outcome, invoke
from graftlm.errors import DataError, RecipeError
from graftlm.pipelines.clarify import (
    Bill,
    Chain,
    Conversation,
    Cost,
    Endpoint,
    EndpointConfig,
    Prices,
    RecordedUser,
    SimulatedUser,
    load_template,
    open_model,
    open_user_model,
)
from tiny import BackboneFolder

FRIEND, POLITE = FRENCH
TEXT = "Are you sure?"
CONTEXT = f"It is {FRIEND}."
COFFEE = {
    "id": "coffee",
    "kind": "formality",
    "text": "Would you like some coffee?",
    "context": "Please come in, Doctor.",
    "question": 'Who is "you"?',
    "answers": [FRIEND, POLITE],
    "answer": POLITE,
    "outputs": {"fr": "Voulez-vous du café ?"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with serving(translator, FaultyHandler) as running:
        yield running


def clarify(server: ChatServer, *arguments: str) -> Outcome:
    server.requests.clear()
    server.keys.clear()
    return invoke("clarify", TEXT, "--to", "fr", "--endpoint", server.url, "--model", "fails:0", *arguments)


def asked_of_user(server: ChatServer) -> list[str]:
    """The models that were asked to answer as the user."""
    return [body["model"] for body in server.requests if "Unknown" in body["messages"][0]["content"]]


def test_another_model_of_the_server_answers(server: ChatServer) -> None:
    found = clarify(server, "--context", CONTEXT, "--user", "fails:00")
    assert (found.code, found.out) == (0, f"{FRENCH[FRIEND]}\n")
    assert asked_of_user(server) == ["fails:00"]
    assert [body["model"] for body in server.requests] == ["fails:0", "fails:00", "fails:0"]
    assert "simulated by fails:00" in found.err


def test_a_model_of_another_server_answers_and_gets_its_own_key(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "first")
    monkeypatch.setenv("USER_API_KEY", "second")
    with serving(translator) as other:
        found = clarify(server, "--context", CONTEXT, "--user", "large", "--user-endpoint", other.url)
        assert found.out == f"{FRENCH[FRIEND]}\n"
        assert [body["model"] for body in other.requests] == ["large"]
        assert set(other.keys) == {"Bearer second"}
    assert asked_of_user(server) == []
    assert set(server.keys) == {"Bearer first"}


def test_a_local_model_answers_a_translator_on_a_server(server: ChatServer, tiny_backbone: BackboneFolder) -> None:
    own = Endpoint(EndpointConfig(url=server.url, model="fails:0"))
    folder = str(tiny_backbone("llama"))
    user = open_user_model(own, folder, context=CONTEXT, endpoint=server.url, user_endpoint="local")
    assert user.name == folder
    assert open_user_model(own, None, context=None) is own


@pytest.mark.parametrize(
    "arguments",
    [
        ("--user", "large"),
        ("--user", "large", "--answer", FRIEND),
        ("--context", CONTEXT, "--user-endpoint", "http://localhost:1/v1"),
        ("--context", CONTEXT, "--user", "large", "--user-endpoint", "localhost:1"),
        ("--context", CONTEXT, "--user", "large", "--user-prices", "1,2"),
        ("--prices", "1,2", "--user-prices", "1,2"),
        ("--prices", "1"),
        ("--prices", "1,-2"),
        ("--prices", "1,nan"),
    ],
)
def test_options_that_do_not_fit_are_refused(server: ChatServer, arguments: tuple[str, ...]) -> None:
    found = clarify(server, *arguments)
    assert (found.code, found.out, server.requests) == (2, "", [])
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1


def exemplar_file(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    values: dict[str, Any] = {"exemplars": [COFFEE]} | changes
    path.write_text(yaml.safe_dump(values, allow_unicode=True))
    return str(path)


def test_exemplars_of_a_file_replace_those_of_the_template(server: ChatServer, tmp_path: Path) -> None:
    own = exemplar_file(tmp_path)
    found = clarify(server, "--context", CONTEXT, "--exemplars", own, "--resume", str(tmp_path / "c.json"))
    assert (found.code, found.out) == (0, f"{FRENCH[FRIEND]}\n")
    clear = {exemplar.text for exemplar in load_template("translate").unambiguous}
    unanswerable = {exemplar.text for exemplar in load_template("translate").unanswerable}
    for body, kept in zip(server.requests, (clear, unanswerable, set()), strict=True):
        shown = {text_of(message) for message in body["messages"][1:-1] if message["role"] == "user"}
        assert shown == {COFFEE["text"]} | kept
    kept_file = Conversation.load(tmp_path / "c.json")
    assert kept_file.exemplars == own
    assert kept_file.template_sha256 == load_template("translate", own).sha256 != load_template("translate").sha256


def text_of(message: Mapping[str, str]) -> str:
    return message["content"].split("\n")[1]


def test_a_template_writes_the_languages_of_the_exemplars(tmp_path: Path) -> None:
    own = exemplar_file(tmp_path, unambiguous=[], unanswerable=[])
    template = load_template("translate", own)
    assert template.languages == {"fr": "French"}
    assert (template.unambiguous, template.unanswerable) == ((), ())
    with pytest.raises(RecipeError):
        Conversation.start(TEXT, "translate", "es", exemplars=own)


def test_other_exemplars_do_not_continue_a_conversation(tmp_path: Path) -> None:
    own = exemplar_file(tmp_path)
    path = tmp_path / "c.json"
    Conversation.start(TEXT, "translate", "fr", exemplars=own).save(path)
    assert Conversation.load(path).exemplars == own
    load_template.cache_clear()  # as a later process would
    exemplar_file(tmp_path, exemplars=[COFFEE | {"text": "Would you like tea?"}])
    with pytest.raises(RecipeError):
        Conversation.load(path)
    load_template.cache_clear()


def test_a_conversation_without_a_file_keeps_its_form(tmp_path: Path) -> None:
    path = Conversation.start(TEXT, "translate", "fr").save(tmp_path / "c.json")
    assert list(json.loads(path.read_text())) == [
        "format",
        "template",
        "template_sha256",
        "target",
        "text",
        "budget",
        "threshold",
        "turns",
    ]
    assert Cost(calls=1).model_dump() == {"calls": 1, "prompt_tokens": 0, "new_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"exemplars": []}, "exemplars"),
        ({"exemplars": [COFFEE, COFFEE]}, "coffee"),
        ({"exemplars": [COFFEE | {"answer": "nobody"}]}, "answer"),
        ({"exemplars": [COFFEE | {"context": ""}]}, "context"),
        ({"exemplars": [COFFEE | {"outputs": {"it": "Gradisce un caffè?"}}]}, "fr"),
        ({"exemplars": [{key: value for key, value in COFFEE.items() if key != "text"}]}, "text"),
        ({"examples": []}, "examples"),
    ],
)
def test_a_file_of_exemplars_is_validated(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    own = exemplar_file(tmp_path, **changes)
    with pytest.raises(RecipeError) as error:
        load_template("translate", own)
    assert key in str(error.value)
    assert "\n" not in str(error.value)
    load_template.cache_clear()


def test_the_server_opens_no_file_for_a_client(tmp_path: Path) -> None:
    from graftlm.serving.clarification import ClarifyBody, _continued
    from graftlm.serving.protocol import ServingError

    own = exemplar_file(tmp_path)
    conversation = Conversation.start(TEXT, "translate", "fr", exemplars=own)
    body = ClarifyBody.parse({"model": "m", "conversation": conversation.model_dump(mode="json")})
    with pytest.raises(ServingError):
        _continued(body)


class SilentHandler(ChatHandler):
    """Reports no usage in streams, and none at all for the model `silent`."""

    def send(self, document: Any, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        if isinstance(document, dict) and document.get("model") == "silent":
            document = {key: value for key, value in document.items() if key != "usage"}
        super().send(document, status, kind, **headers)

    def stream(self, text: str, *, complete: bool = True, usage: dict[str, int] | None = None) -> None:
        super().stream(text, complete=complete, usage=None)


def test_prices_are_those_of_each_model() -> None:
    with serving(translator) as server:
        models = [open_model(endpoint=server.url, model=name) for name in ("one", "two")]
        chain = Chain(models[0], SimulatedUser(models[1], CONTEXT))
        done = chain.run(Conversation.start(TEXT, "translate", "fr"))
    bill = Bill.read("3,5", "7,11", "two")
    assert bill is not None
    own, other = done.translator_cost, done.user_cost
    assert (own.calls, other.calls) == (2, 1)
    assert own + other == done.cost
    expected = 3 * own.prompt_tokens + 5 * own.new_tokens + 7 * other.prompt_tokens + 11 * other.new_tokens
    assert bill.of(done) == pytest.approx(expected / 1e6)
    assert Bill.read(None) is None


def test_unknown_tokens_are_not_counted_as_none() -> None:
    with serving(translator, SilentHandler) as server:
        model = open_model(endpoint=server.url, model="silent")
        done = Chain(model, RecordedUser([POLITE])).run(Conversation.start(TEXT, "translate", "fr"))
        assert done.cost == Cost(calls=2, unknown=2)
        assert Prices(prompt=1, new=1).of(done.cost) is None
        given = ("--endpoint", server.url, "--model", "silent", "--answer", POLITE, "--prices", "1,1")
        shown = invoke("clarify", TEXT, "--to", "fr", *given)
        assert "the tokens of 2 of them" in shown.err
        assert "the price is unknown" in shown.err
        values = json.loads(invoke("clarify", TEXT, "--to", "fr", *given, "--json").out)
        assert values["price"] is None
        assert values["summary"]["cost"]["unknown"] == 2


def test_a_missing_file_of_exemplars_is_named(tmp_path: Path) -> None:
    with pytest.raises((DataError, RecipeError)) as error:
        load_template("translate", str(tmp_path / "none.yaml"))
    assert "none.yaml" in str(error.value)

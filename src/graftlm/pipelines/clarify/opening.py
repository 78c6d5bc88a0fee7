"""Open the parts of a conversation: a model on a server or on this machine, a new or saved conversation, a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from graftlm.errors import DataError, RecipeError, shorten
from graftlm.generation.generate import load_model
from graftlm.pipelines.clarify.chain import HumanUser, RecordedUser, SimulatedUser, User
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.models import ChatModel, LocalModel
from graftlm.pipelines.clarify.terminal import ask_person


def open_model(
    *,
    endpoint: str | None = None,
    model: str | None = None,
    backbone: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    max_new_tokens: int = 256,
    **connection: object,
) -> ChatModel:
    """Open a model on a server or on this machine.

    Args:
        endpoint: URL of the server; requires `model`.
        model: the name of the model on the server; ignored with `backbone`.
        backbone: folder of a model or of a graft on this machine, instead of a server.
        device: torch device of a model on this machine; None selects the fastest available one.
        trust_remote_code: allow the repository of a model on this machine to run its own code.
        max_new_tokens: maximum number of tokens of a reply.
        connection: the keys `key_variable`, `timeout` and `retries` of `EndpointConfig`.

    Raises:
        RecipeError: neither or both of `endpoint` and `backbone` are given, the server's model is not named, or a value
            of the connection is invalid.
        MissingExtraError: the client of servers, `openai`, is not installed.
        ArtifactError: `backbone` is neither a model nor a graft, or its graft belongs to another backbone.
        BackboneError: the model on this machine can't be loaded, or has no tokenizer.
    """
    if endpoint is None and backbone is None:
        raise RecipeError("Neither --endpoint nor --backbone was given: name a server's URL or a model's folder.")
    if endpoint is not None and backbone is not None:
        raise RecipeError("Both --endpoint and --backbone were given: leave one of them out.")
    if backbone is not None:
        network, tokenizer = load_model(backbone, device=device, trust_remote_code=trust_remote_code)
        return LocalModel(network, tokenizer, name=backbone, max_new_tokens=max_new_tokens)
    if model is None:
        raise RecipeError(f"The server {endpoint} may have several models, but no model was named: name one (--model).")
    values = {"url": endpoint, "model": model, "max_new_tokens": max_new_tokens, **connection}
    return Endpoint(EndpointConfig.parse(values, where="--endpoint"))


def open_conversation(
    text: str | None,
    path: Path | None,
    *,
    template: str | None = None,
    target: str | None = None,
    budget: int | None = None,
    threshold: float | None = None,
    answers: Sequence[str] | None = None,
) -> Conversation:
    """Load a conversation, or start a new one if there is no such file.

    Args:
        text: the user's query; optional for a saved conversation.
        path: file of the conversation, which need not exist.
        template: name or YAML file of the template; None for `translate`.
        target: code of the output language; optional if the template has a single language.
        budget: maximum number of proposed questions; None for 1.
        threshold: expected gain in bits above which a question is asked; None asks every question.
        answers: the answers that the caller will give. They are not recorded; a finished conversation refuses them.

    For a saved conversation, None keeps the saved value, and another value than the saved one is an error.

    Raises:
        DataError: there is neither a text nor a file; the text is empty or in another language than the template; or
            the file can't be read as a conversation, differs from the other arguments, or is finished although there
            are answers.
        RecipeError: the template is unknown or has changed since the saved conversation began; the language is unknown,
            or not given although the template has several; or a number is negative.
    """
    if path is None or not path.exists():
        if text is None:
            raise DataError("There is no text to begin with: give one, or the file of a conversation (--resume).")
        return Conversation.start(
            text,
            template or "translate",
            target,
            budget=1 if budget is None else budget,
            threshold=threshold,
        )
    conversation = Conversation.load(path)
    given = {"text": text, "template": template, "target": target, "budget": budget, "threshold": threshold}
    for name, value in given.items():
        saved = getattr(conversation, name)
        if value is not None and value != saved:
            raise DataError(
                f"The {name} of the conversation {path} is {shorten(repr(saved), 40)}, but "
                f"{shorten(repr(value), 40)} was given: leave it out to continue the conversation, or name another "
                "file."
            )
    if answers and conversation.step == "done":
        raise DataError(
            f"The conversation in {path} is finished, so nothing is left to answer: leave out --answer to see its "
            "output, or name another file to start a new conversation (--resume)."
        )
    return conversation


def choose_user(
    answers: Sequence[str] | None,
    context: str | None,
    model: ChatModel,
    ask: Callable[[str], str] | None,
) -> User | None:
    """Return the user who answers: recorded answers, a model that reads the context, a person, or nobody.

    Args:
        answers: recorded answers, in the order of the questions.
        context: what a simulated user knows.
        model: the model of a simulated user.
        ask: shows a text to a person and returns what the person types; None if there is no person.

    Raises:
        RecipeError: both answers and a context are given.
    """
    if answers and context is not None:
        raise RecipeError(
            "Both --answer and --context were given: give either the answers, or the context from which a "
            "model answers."
        )
    if answers:
        return RecordedUser(list(answers))
    if context is not None:
        return SimulatedUser(model, context)
    if ask is None:
        return None
    return HumanUser(lambda question, possible: ask_person(question, possible, ask))

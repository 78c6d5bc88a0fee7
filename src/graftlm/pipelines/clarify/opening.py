"""Open the parts of a conversation: a model on a server or on this machine, a new or saved conversation, a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import DataError, RecipeError, shorten
from graftlm.generation.generate import load_model
from graftlm.pipelines.clarify.chain import HumanUser, RecordedUser, SimulatedUser, User
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.models import ChatModel, LocalModel
from graftlm.pipelines.clarify.terminal import ask_person

USER_KEY = "USER_API_KEY"
"""The environment variable with the API key of a user's model on a server of its own."""
LOCAL = "local"
"""In place of the URL of a user's model: this machine."""


@dataclass(frozen=True)
class ModelOptions:
    """How a user's model is opened, as in `open_model`.

    Args:
        device: torch device of a model on this machine.
        trust_remote_code: allow the repository of a model on this machine to run its own code.
        max_new_tokens: maximum number of tokens of a reply.
        timeout: time to wait for a server, in seconds.
        retries: number of retries of a request.
    """

    device: str | None = None
    trust_remote_code: bool = False
    max_new_tokens: int = 256
    timeout: float = 60.0
    retries: int = 3


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


def open_user_model(
    translator: ChatModel,
    name: str | None,
    *,
    context: str | None,
    endpoint: str | None = None,
    user_endpoint: str | None = None,
    keys: tuple[str, str] = ("OPENAI_API_KEY", USER_KEY),
    options: ModelOptions | None = None,
) -> ChatModel:
    """Open the model that answers the questions from a context, which may be another one than the translator.

    Args:
        translator: the translator, which answers if no other model is named.
        name: the model that answers: a model of the translator's server, or of `user_endpoint`, or a folder on this
            machine if the translator is on this machine too. None for the translator.
        context: what the simulated user knows; required with `name`.
        endpoint: URL of the translator's server; None for a translator on this machine.
        user_endpoint: URL of the server of `name`, or `local` for this machine; None for the translator's place.
        keys: the environment variables with the API keys of `endpoint` and of `user_endpoint`, which gets no other key.
        options: how the model is opened.

    Raises:
        RecipeError: a place is given without a model, or a model without a context; or as `open_model`.
        GraftError: the model can't be opened, as in `open_model`.
    """
    if name is None:
        if user_endpoint is not None:
            raise RecipeError(
                f"The server {user_endpoint} of the user's model was given, but no model: name one (--user)."
            )
        return translator
    if context is None:
        raise RecipeError(
            f"The model {name} is to answer the questions, but has nothing to answer from: give what it knows "
            "(--context), or leave out --user."
        )
    place = user_endpoint or endpoint
    chosen = options or ModelOptions()
    if place is None or place == LOCAL:
        return open_model(
            backbone=name,
            device=chosen.device,
            trust_remote_code=chosen.trust_remote_code,
            max_new_tokens=chosen.max_new_tokens,
        )
    is_own_server = user_endpoint is None or user_endpoint == endpoint
    return open_model(
        endpoint=place,
        model=name,
        max_new_tokens=chosen.max_new_tokens,
        key_variable=keys[0] if is_own_server else keys[1],
        timeout=chosen.timeout,
        retries=chosen.retries,
    )


def open_conversation(
    text: str | None,
    path: Path | None,
    *,
    template: str | None = None,
    exemplars: Path | None = None,
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
        exemplars: YAML file of exemplars that replace the template's; None for the template's own.
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
    own_exemplars = None if exemplars is None else str(exemplars)
    if path is None or not path.exists():
        if text is None:
            raise DataError("There is no text to begin with: give one, or the file of a conversation (--resume).")
        return Conversation.start(
            text,
            template or "translate",
            target,
            budget=1 if budget is None else budget,
            threshold=threshold,
            exemplars=own_exemplars,
        )
    conversation = Conversation.load(path)
    given = {
        "text": text,
        "template": template,
        "exemplars": own_exemplars,
        "target": target,
        "budget": budget,
        "threshold": threshold,
    }
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
        RecipeError: both answers and a context are given, or the context is empty.
    """
    if context is not None and not context.strip():
        raise RecipeError("The context is empty, but a model answers from it: give its text, or leave --context out.")
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

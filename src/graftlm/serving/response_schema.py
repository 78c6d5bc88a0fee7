"""The responses in OpenAI's form, with GraftLM's additions."""

from __future__ import annotations

from typing import Literal

from openai.types import Completion, CompletionChoice, CreateEmbeddingResponse, Embedding, Model, chat
from openai.types.chat.chat_completion import Choice
from openai.types.create_embedding_response import Usage
from pydantic import BaseModel


class TokenTrace(BaseModel):
    """The text of a token, and the activity of the grafts at this token by label."""

    token: str
    values: dict[str, float]


class ChoiceExtras(BaseModel):
    """GraftLM's additions to a choice.

    Attributes:
        trace: the activity of the grafts at each token, if requested.
        weights: with a trace, the weight of each graft of a sum.
        ended: `time` if the time limit ended the text.
    """

    trace: list[TokenTrace] | None = None
    weights: dict[str, float] | None = None
    ended: Literal["time"] | None = None


class TextChoice(CompletionChoice):
    """A continuation, or a part of it in a stream, where the finish reason comes last."""

    finish_reason: Literal["stop", "length"] | None
    graftlm: ChoiceExtras | None = None


class TextCompletion(Completion):
    """The response of /v1/completions, and each event of its stream."""

    choices: list[TextChoice]


class ChatChoice(Choice):
    """A message of the assistant, as a choice of a response."""

    graftlm: ChoiceExtras | None = None


class Chat(chat.ChatCompletion):
    """The response of /v1/chat/completions."""

    choices: list[ChatChoice]


class ModelCard(Model):
    """A name that requests may use.

    Attributes:
        graftlm: `kind` is a graft's method, `backbone` or `mixture`. `chat` is `template`, `plain` (role names and
            colons) or `none`.
        max_model_len: maximum number of tokens of a prompt and its continuation.
    """

    graftlm: dict[str, str]
    max_model_len: int


class ModelList(BaseModel):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """The response of /health.

    Attributes:
        status: whether the server accepts requests.
        running: number of continuations that are being generated.
        waiting: number of continuations in the queue.
        models: number of names of models.
        broken: names of the grafts whose newest files can't be loaded.
    """

    status: Literal["ready", "closing"]
    running: int
    waiting: int
    models: int
    broken: list[str]


class TextEmbedding(Embedding):
    """The embedding of one text: numbers, or float32 values in base64."""

    embedding: list[float] | str  # OpenAI's type has no base64


class Embeddings(CreateEmbeddingResponse):
    """The response of /v1/embeddings."""

    data: list[TextEmbedding]

    @classmethod
    def joined(cls, responses: list[Embeddings]) -> Embeddings:
        """Join the responses to one or more consecutive parts of a request.

        The embeddings are numbered anew, and the numbers of tokens are added.
        """
        data: list[TextEmbedding] = []
        for response in responses:
            for item in response.data:
                data.append(item.model_copy(update={"index": len(data)}))
        tokens = sum(response.usage.prompt_tokens for response in responses)
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return responses[0].model_copy(update={"data": data, "usage": usage})

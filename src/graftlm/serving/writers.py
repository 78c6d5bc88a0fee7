"""The engine as the language model of pipelines, whose modules are imported with the first request for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.summarize import LanguageModelWriter, PromptLayout, SummaryDecoding
from graftlm.serving.clients import EngineClient
from graftlm.serving.tokenization import ServingTokenizer


class ClarifyWriter:
    """The `ChatModel` of clarifying conversations; prompts are chats if the tokenizer has a template, else texts."""

    def __init__(self, client: EngineClient, tokenizer: ServingTokenizer, max_tokens: int) -> None:
        self.name = client.model
        self._client, self._tokenizer, self._max_tokens = client, tokenizer, max_tokens

    def generate(self, prompt: Any, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt; a failure is a `ServingError`."""
        if self._tokenizer.plain:
            ids = self._tokenizer.encode(prompt.text())
        else:
            ids = self._tokenizer.encode_chat(prompt.messages())
        end = self._client.generate(ids, self._max_tokens, temperature=0.0, stop=(prompt.stop,))
        if on_text is not None:
            on_text(end.text)
        cost = Cost(calls=1, prompt_tokens=end.prompt_tokens, new_tokens=end.completion_tokens)
        return Reply(end.text, cost, end.reason == "length")


class SummaryWriter(LanguageModelWriter):
    """The writer of summaries, without sampling.

    Prompt and summary have at most `context` tokens, the summary `max_tokens`. The graft was trained with `layout`.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ServingTokenizer,
        context: int,
        max_tokens: int,
        layout: PromptLayout | None,
    ) -> None:
        decoding = SummaryDecoding(max_new_tokens=max_tokens)
        super().__init__(None, tokenizer.tokenizer, client.model, layout, decoding)
        self._client, self._context = client, context

    @property
    def window(self) -> int:
        return min(self.layout.window or self._context, self._context)

    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        ends = [self._client.generate(prompt, self.decoding.max_new_tokens) for prompt in prompts]
        return [(end.text, end.reason == "length") for end in ends]

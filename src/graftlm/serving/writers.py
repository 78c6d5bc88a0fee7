"""The engine as the language model of pipelines, whose modules are imported with the first request for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.summarize import Extract, LanguageModelWriter, PromptLayout, SummaryDecoding
from graftlm.pipelines.summarize.writer import WriterOutput
from graftlm.serving.clients import EngineClient, OnEvent, OnText
from graftlm.serving.tokenization import ServingTokenizer


class ClarifyWriter:
    """The `ChatModel` of clarifying conversations; prompts are chats if the tokenizer has a template, else texts."""

    def __init__(self, client: EngineClient, tokenizer: ServingTokenizer, max_tokens: int) -> None:
        self.name = client.model
        self._client, self._tokenizer, self._max_tokens = client, tokenizer, max_tokens

    def generate(self, prompt: Any, *, on_text: OnText = None) -> Reply:
        """Reply to a prompt; a failure is a `ServingError`."""
        if self._tokenizer.plain:
            ids = self._tokenizer.encode(prompt.text())
        else:
            ids = self._tokenizer.encode_chat(prompt.messages())
        end = self._client.generate(ids, self._max_tokens, on_text, temperature=0.0, stop=(prompt.stop,))
        cost = Cost(calls=1, prompt_tokens=end.prompt_tokens, new_tokens=end.completion_tokens)
        return Reply(end.text, cost, end.reason == "length")


class SummaryWriter(LanguageModelWriter):
    """The writer of summaries, without sampling.

    Prompt and summary have at most `context` tokens, the summary `max_tokens`. The graft was trained with `layout`.
    `on_event` is called with {"extract"} before the first token, and with {"text"}, each piece of the summary.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ServingTokenizer,
        context: int,
        max_tokens: int,
        layout: PromptLayout | None,
        on_event: OnEvent,
    ) -> None:
        decoding = SummaryDecoding(max_new_tokens=max_tokens)
        super().__init__(None, tokenizer.tokenizer, client.model, layout, decoding)
        self._client, self._context, self._on_event = client, context, on_event

    @property
    def window(self) -> int:
        return min(self.layout.window or self._context, self._context)

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        self._on_event({"extract": extracts[0].to_json()})
        return super().write_batch(extracts)

    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        limit, on_text = self.decoding.max_new_tokens, lambda text: self._on_event({"text": text})
        ends = [self._client.generate(prompt, limit, on_text) for prompt in prompts]
        return [(end.text, end.reason == "length") for end in ends]

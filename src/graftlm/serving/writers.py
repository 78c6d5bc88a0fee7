"""The engine as the language model of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.summarize import Extract, LanguageModelWriter, PromptLayout, SummaryDecoding
from graftlm.pipelines.summarize.writer import WriterOutput
from graftlm.serving.clients import EngineClient, OnEvent, OnText
from graftlm.serving.tokenization import ServingTokenizer

if TYPE_CHECKING:
    from graftlm.pipelines.clarify.prompts import Prompt


class ClarifyWriter:
    """The `ChatModel` of clarifying conversations. Prompts are chats if the tokenizer has a template, else texts.

    Args:
        client: sends the requests.
        tokenizer: the tokenizer of the model.
        max_tokens: maximum number of tokens of a reply.
    """

    def __init__(self, client: EngineClient, tokenizer: ServingTokenizer, max_tokens: int) -> None:
        self.name = client.model
        self._client = client
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def generate(self, prompt: Prompt, *, on_text: OnText = None) -> Reply:
        """Reply to a prompt with greedy decoding.

        Args:
            prompt: the prompt, with the string before which the reply ends.
            on_text: called with each piece of the reply.

        Returns:
            The reply, its cost, and whether it was cut at the maximum number of tokens.

        Raises:
            ServingError: the generation failed.
        """
        if self._tokenizer.plain:
            ids = self._tokenizer.encode(prompt.text())
            turn_ends: tuple[int, ...] = ()
        else:
            ids = self._tokenizer.encode_chat(prompt.messages())
            turn_ends = self._tokenizer.turn_ends
        finish = self._client.generate(ids, self._max_tokens, on_text, stop=(prompt.stop,), turn_ends=turn_ends)
        cost = Cost(calls=1, prompt_tokens=finish.prompt_tokens, new_tokens=finish.completion_tokens)
        return Reply(finish.text, cost, finish.reason == "length")


class SummaryWriter(LanguageModelWriter):
    """The writer of summaries, which decodes greedily.

    Args:
        client: sends the requests.
        tokenizer: the tokenizer of the model.
        context: maximum number of tokens of a prompt and its summary.
        max_tokens: maximum number of tokens of a summary.
        layout: the prompt layout with which the graft was trained; None uses the default layout.
        on_event: called with {"extract": ...} before the first token, and with {"text": ...} for each piece of text.
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
        no_model: Any = None  # The engine has it.
        super().__init__(no_model, tokenizer.tokenizer, client.model, layout, decoding)
        self._client = client
        self._context = context
        self._on_event = on_event

    @property
    def window(self) -> int:
        """Maximum number of tokens of a prompt and its summary."""
        return min(self.layout.window or self._context, self._context)

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        """Write a summary of each extract, after an event with the first extract."""
        self._on_event({"extract": extracts[0].to_json()})
        return super().write_batch(extracts)

    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        """Generate continuations one after another.

        Args:
            prompts: token ids of each prompt.

        Returns:
            The text of each continuation, and whether it reached the maximum length.

        Raises:
            ServingError: the generation failed.
        """
        completions = []
        for prompt in prompts:
            finish = self._client.generate(
                prompt,
                self.decoding.max_new_tokens,
                self._on_text,
                turn_ends=self.turn_ends,
            )
            completions.append((finish.text, finish.reason == "length"))
        return completions

    def _on_text(self, text: str) -> None:
        self._on_event({"text": text})

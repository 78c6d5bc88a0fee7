"""A model on this machine, with or without a graft, in the place of an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from graftlm.backbone import leading_bos
from graftlm.evaluation.examples import Example, score_answers
from graftlm.generation.generate import Decoding, generate_text
from graftlm.pipelines.clarify.prompts import Prompt
from graftlm.pipelines.clarify.roles import Reply
from graftlm.pipelines.clarify.turns import Cost


class Local:
    """A transformers model or a `GraftedModel`.

    Where the tokenizer has a chat template, prompts are chats; otherwise one text that the model goes on with.

    Args:
        max_new_tokens: of a reply.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, name: str = "local", max_new_tokens: int = 128
    ) -> None:
        self._model, self._tokenizer, self._max_new_tokens = model, tokenizer, max_new_tokens
        self.name = name

    def write(
        self,
        prompt: Prompt,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Reply to a prompt.

        Raises:
            DataError: the prompt does not fit the model.
        """
        text = self.prompt_text(prompt)
        drawn = {"sample": True, "temperature": temperature, "seed": seed} if temperature > 0 else {}
        read = self._tokenizer(text, verbose=False)["input_ids"]
        before = str(self._tokenizer.decode(read, skip_special_tokens=True))
        aloud = None if on_text is None else _Aloud(len(before), prompt.end, on_text)
        decoding = Decoding(max_new_tokens=self._max_new_tokens, **drawn)
        found = generate_text(self._model, self._tokenizer, text, decoding, on_text=aloud)
        reply = found.text.partition(prompt.end)[0]
        if aloud is not None:
            aloud.end(reply)
        cut = reply == found.text and found.tokens >= self._max_new_tokens
        return Reply(reply, Cost(calls=1, prompt_tokens=len(read), new_tokens=found.tokens), cut)

    def score(self, prompt: Prompt, outputs: Sequence[str]) -> list[float]:
        """log p(output | prompt) of each output, in nats."""
        text = self.prompt_text(prompt)
        blank = "" if self._is_chat else " "  # behind the label of a reply
        examples = [Example(text, blank + output) for output in outputs]
        scores = score_answers(self._model, self._tokenizer, examples)
        return [-float(nats) for nats in scores.nats]

    def prompt_text(self, prompt: Prompt) -> str:
        """What the model reads."""
        if not self._is_chat:
            return prompt.text()
        chat = self._tokenizer.apply_chat_template(prompt.messages(), tokenize=False, add_generation_prompt=True)
        # Many templates begin with the BOS that the tokenizer puts before every text.
        return str(chat).removeprefix(str(self._tokenizer.bos_token) if self._adds_bos else "")

    @property
    def _adds_bos(self) -> bool:
        return leading_bos(self._tokenizer) is not None

    @property
    def _is_chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))


class _Aloud:
    """Hands a reply on as it is written: not the prompt before it, nor what follows the end of a reply.

    Args:
        skipped: characters of the prompt.
        end: what stands behind a reply.
    """

    def __init__(self, skipped: int, end: str, on_text: Callable[[str], None]) -> None:
        self._skipped, self._end, self._on_text = skipped, end, on_text
        self._written, self._told = "", 0

    def __call__(self, piece: str) -> None:
        self._written += piece
        written = self._written[self._skipped :]
        reply = written.partition(self._end)[0]
        begun = (n for n in range(len(self._end) - 1, 0, -1) if reply.endswith(self._end[:n]))
        self._tell(reply[: len(reply) - next(begun, 0)])

    def end(self, reply: str) -> None:
        """The rest of it."""
        self._tell(reply)

    def _tell(self, reply: str) -> None:
        if len(reply) > self._told:
            self._on_text(reply[self._told :])
            self._told = len(reply)

"""Models that reply to prompts: their common interface, the streaming of replies, and models on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftlm.backbone import leading_bos, max_sequence_length
from graftlm.data import Document
from graftlm.evaluation.examples import Example, score_answers
from graftlm.evaluation.windows import Window, cut_windows
from graftlm.generation.generate import Decoding, generate_text
from graftlm.pipelines.clarify.conversation import Cost
from graftlm.pipelines.clarify.prompts import Prompt


@dataclass(frozen=True)
class Reply:
    """A model's reply; truncated if the model stopped at its limit of tokens."""

    text: str
    cost: Cost = field(default_factory=lambda: Cost(calls=1))
    truncated: bool = False


class ChatModel(Protocol):
    """A model that replies to prompts, on a server or on this machine."""

    @property
    def name(self) -> str: ...

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt, greedily. `on_text` receives each new part of the reply, if the model can stream."""
        ...


class StreamPrinter:
    """Passes on the part of a growing text that a reader should see; `select` finds it in all text received so far."""

    def __init__(self, select: Callable[[str], str], emit: Callable[[str], None]) -> None:
        self._select, self._emit = select, emit
        self._received = self._shown = ""

    def __call__(self, text: str) -> None:
        self._received += text
        self.end(self._select(self._received))

    def end(self, text: str) -> None:
        """Emit what is still missing of a text."""
        if not text.startswith(self._shown):  # the text is another one now: start a new line
            self._emit("\n")
            self._shown = ""
        if new := text[len(self._shown) :]:
            self._emit(new)
            self._shown = text


class PrefixCache:
    """Keys and values of the last prompt of each instruction, whose beginning the next one does not compute again.

    Only transformers' own models do: grafts may read the whole prompt, and windows and states can't be cropped.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prompts: dict[str, tuple[list[int], DynamicCache]] = {}

    @staticmethod
    def serves(model: Any) -> bool:
        """Whether a model's cache can be cropped, and its states depend on earlier tokens alone."""
        croppable = (type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
        return type(model).__module__.startswith("transformers.") and all(croppable)

    def begin(self, instructions: str, ids: list[int], most: int) -> DynamicCache:
        """A cache with the common beginning of `ids` and the last prompt, at most `most` tokens."""
        held, cache = self._prompts.pop(instructions, ([], DynamicCache(config=self._model.config)))
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids, strict=False)))
        cache.crop(min(common, most) - len(held))
        return cache

    def keep(self, instructions: str, ids: list[int], cache: DynamicCache) -> None:
        """Hold the cache of a prompt, without the tokens after `ids`."""
        cache.crop(len(ids) - cache.get_seq_length())
        self._prompts[instructions] = (ids, cache)


class LocalModel:
    """A transformers model or a `GraftedModel` on this machine, with a limit of new tokens in a reply.

    A tokenizer with a chat template gets chat messages; another one gets a single text to continue. Prompts with the
    same instruction share the computation of their common beginning, unless `reuse` is False (see `PrefixCache`).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "local",
        max_new_tokens: int = 128,
        reuse: bool = True,
    ) -> None:
        self._model, self._tokenizer, self._max_new_tokens = model, tokenizer, max_new_tokens
        self.name, self._prefixes = name, PrefixCache(model) if reuse and PrefixCache.serves(model) else None

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt. Raises DataError if the prompt does not fit the model."""
        text = self.prompt_text(prompt)
        prompt_ids = self._tokenizer(text, verbose=False)["input_ids"]
        echoed = len(str(self._tokenizer.decode(prompt_ids, skip_special_tokens=True)))  # the stream repeats the prompt
        printer = on_text and StreamPrinter(lambda received: before_stop(received[echoed:], prompt.stop), on_text)
        decoding = Decoding(max_new_tokens=self._max_new_tokens)
        cache = self._prefixes and self._prefixes.begin(prompt.instructions, prompt_ids, len(prompt_ids) - 1)
        generation = generate_text(self._model, self._tokenizer, text, decoding, on_text=printer, cache=cache)
        if self._prefixes is not None and cache is not None:
            self._prefixes.keep(prompt.instructions, prompt_ids, cache)
        reply = generation.text.partition(prompt.stop)[0]
        if printer is not None:
            printer.end(reply)
        truncated = reply == generation.text and generation.tokens >= self._max_new_tokens
        return Reply(reply, Cost(calls=1, prompt_tokens=len(prompt_ids), new_tokens=generation.tokens), truncated)

    def score(self, prompt: Prompt, outputs: Sequence[str]) -> list[float]:
        """log p(output | prompt) of each output, in nats."""
        text = self.prompt_text(prompt)
        separator = "" if self._is_chat else " "  # after the label of a reply
        documents = [Document(separator + output, prompt=text) for output in outputs]
        windows = list(cut_windows(self._tokenizer, documents, sys.maxsize))
        longest = max((len(window.ids) for window in windows), default=0)
        if self._prefixes is None or len(windows) < len(outputs) or longest > max_sequence_length(self._model):
            examples = [Example(text, document.text) for document in documents]
            return [-float(nats) for nats in score_answers(self._model, self._tokenizer, examples).nats]
        return [self._score(self._prefixes, prompt.instructions, window) for window in windows]

    @torch.inference_mode()
    def _score(self, prefixes: PrefixCache, instructions: str, window: Window) -> float:
        """The log-probability of a window's scored tokens, in nats; what its beginning shares is not computed again."""
        ids = window.ids.tolist()
        cache = prefixes.begin(instructions, ids, window.first - 1)
        start = cache.get_seq_length()
        new = torch.tensor([ids[start:-1]], device=self._model.device)
        logits = self._model(input_ids=new, past_key_values=cache).logits
        prefixes.keep(instructions, ids[:-1], cache)
        targets = torch.tensor(ids[window.first :], device=logits.device)
        return -float(cross_entropy(logits[0, window.first - 1 - start :].float(), targets, reduction="sum"))

    def prompt_text(self, prompt: Prompt) -> str:
        """The text that the model reads."""
        if not self._is_chat:
            return prompt.text()
        chat = self._tokenizer.apply_chat_template(prompt.messages(), tokenize=False, add_generation_prompt=True)
        # Many chat templates start with the BOS that the tokenizer adds itself.
        adds_bos = leading_bos(self._tokenizer) is not None
        return str(chat).removeprefix(str(self._tokenizer.bos_token) if adds_bos else "")

    @property
    def _is_chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))


def before_stop(text: str, stop: str) -> str:
    """The text before a stop string, without an end that may still become the stop string."""
    reply = text.partition(stop)[0]
    partial = (length for length in range(len(stop) - 1, 0, -1) if reply.endswith(stop[:length]))
    return reply[: len(reply) - next(partial, 0)]

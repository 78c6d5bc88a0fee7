"""Models that reply to prompts: their interface, models on this machine, and the streaming of replies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftlm.backbone import answer_end_ids, common_length, leading_bos, max_sequence_length
from graftlm.backbone.chat_templates import render_messages
from graftlm.data import Document
from graftlm.evaluation.examples import Example, score_answers
from graftlm.evaluation.windows import Window, cut_windows
from graftlm.generation.generate import Decoding, Generation, generate_text
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.prompts import Prompt


@dataclass(frozen=True)
class Reply:
    """A model's reply.

    Args:
        text: the reply, without special tokens and stop strings.
        cost: its cost; one call by default.
        truncated: whether the model stopped at its limit of tokens.
    """

    text: str
    cost: Cost = field(default_factory=lambda: Cost(calls=1))
    truncated: bool = False


class ChatModel(Protocol):
    """A model that replies to prompts, on a server or on this machine."""

    @property
    def name(self) -> str:
        """The name of the model, as conversations record it."""
        ...

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt, greedily.

        Args:
            prompt: the prompt.
            on_text: called with each new piece of the reply, if the model can stream.
        """
        ...


@runtime_checkable
class ScoringModel(ChatModel, Protocol):
    """A model that also computes log-likelihoods, such as `LocalModel`."""

    def score(self, prompt: Prompt, outputs: Sequence[str]) -> list[float]:
        """Compute log p(output | prompt) of each output, in nats."""
        ...


class StreamPrinter:
    """Passes on the visible part of a growing text.

    Args:
        select: returns the visible part of all text received so far.
        emit: receives each new piece of the visible part.
    """

    def __init__(self, select: Callable[[str], str], emit: Callable[[str], None]) -> None:
        self._select = select
        self._emit = emit
        self._received = ""
        self._shown = ""

    def __call__(self, text: str) -> None:
        """Receive a piece of the growing text, and emit what it adds to the visible part."""
        self._received += text
        self.end(self._select(self._received))

    def end(self, text: str) -> None:
        """Emit what a visible text adds to the text shown so far.

        Args:
            text: the whole visible text. If it does not begin with the text shown so far, it is shown on a new line.
        """
        if not text.startswith(self._shown):  # the visible text has changed: show it on a new line
            self._emit("\n")
            self._shown = ""
        new = text[len(self._shown) :]
        if new:
            self._emit(new)
            self._shown = text


class PrefixCache:
    """Keys and values of the last prompt with each instruction, reused by the next prompt with the same beginning.

    Only transformers' own models can use it: grafts may read the whole prompt, and sliding windows and recurrent states
    can't be cropped.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._prompts: dict[str, tuple[list[int], DynamicCache]] = {}

    @staticmethod
    def serves(model: PreTrainedModel) -> bool:
        """Return whether a model's cache can be cropped, and its states depend only on earlier tokens."""
        layers = DynamicCache(config=model.config).layers
        can_be_cropped = all(type(layer) is DynamicLayer for layer in layers)
        return can_be_cropped and type(model).__module__.startswith("transformers.")

    def begin(self, instructions: str, ids: list[int], most: int) -> DynamicCache:
        """Take the cache of the last prompt with the same instructions, cropped to the common prefix.

        The entry is removed until `keep` stores it again.

        Args:
            instructions: the instructions of the prompt, which identify the entry.
            ids: the token ids of the prompt.
            most: maximum number of tokens in the returned cache.

        Returns:
            The keys and values of a beginning of `ids`; an empty cache if there is no entry.
        """
        if instructions in self._prompts:
            cached_ids, cache = self._prompts.pop(instructions)
        else:
            cached_ids = []
            cache = DynamicCache(config=self._model.config)
        common = common_length(cached_ids, ids)
        cache.crop(min(common, most) - len(cached_ids))
        return cache

    def keep(self, instructions: str, ids: list[int], cache: DynamicCache) -> None:
        """Store the cache of a prompt, after removing the tokens after `ids` from it in place.

        Args:
            instructions: the instructions of the prompt, which identify the entry.
            ids: the token ids of the prompt.
            cache: the keys and values of `ids` and of any tokens after them.
        """
        cache.crop(len(ids) - cache.get_seq_length())
        self._prompts[instructions] = (ids, cache)


class LocalModel:
    """A transformers model or a `GraftedModel` on this machine.

    A model with a chat template receives chat messages, any other model a single text to continue.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        name: name of the model in conversations.
        max_new_tokens: maximum number of tokens of a reply.
        reuse: let prompts with the same instruction share the computation of their common beginning (`PrefixCache`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "local",
        max_new_tokens: int = 128,
        reuse: bool = True,
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._ends = answer_end_ids(model, tokenizer)
        self._prefixes = PrefixCache(model) if reuse and PrefixCache.serves(model) else None

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt, greedily.

        Args:
            prompt: the prompt.
            on_text: called with each new piece of the reply.

        Raises:
            DataError: the prompt leaves no room for a reply in the model's positions.
        """
        text = self.prompt_text(prompt)
        prompt_ids = self._tokenizer(text, verbose=False)["input_ids"]
        printer = None
        if on_text is not None:
            printer = self._printer(prompt, prompt_ids, on_text)
        generation = self._generate(prompt.instructions, text, prompt_ids, printer)
        reply = generation.text.partition(prompt.stop)[0]
        if printer is not None:
            printer.end(reply)
        cost = Cost(
            calls=1,
            prompt_tokens=len(prompt_ids),
            new_tokens=generation.tokens,
        )
        is_truncated = reply == generation.text and generation.tokens >= self._max_new_tokens
        return Reply(text=reply, cost=cost, truncated=is_truncated)

    def _printer(self, prompt: Prompt, prompt_ids: list[int], on_text: Callable[[str], None]) -> StreamPrinter:
        """Return a printer of the reply in a stream that begins with the prompt."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        echo = str(self._tokenizer.decode(prompt_ids, **options))

        def select(received: str) -> str:
            return before_stop(received[len(echo) :], prompt.stop)

        return StreamPrinter(select, on_text)

    def _generate(
        self,
        instructions: str,
        text: str,
        prompt_ids: list[int],
        on_text: Callable[[str], None] | None,
    ) -> Generation:
        """Continue a prompt, and reuse the computation of earlier prompts with the same instructions."""
        decoding = Decoding(max_new_tokens=self._max_new_tokens)
        cache = None
        if self._prefixes is not None:
            cache = self._prefixes.begin(instructions, prompt_ids, len(prompt_ids) - 1)
        generation = generate_text(
            self._model,
            self._tokenizer,
            text,
            decoding,
            on_text=on_text,
            cache=cache,
            ends=self._ends,
        )
        if self._prefixes is not None and cache is not None:
            self._prefixes.keep(instructions, prompt_ids, cache)
        return generation

    def score(self, prompt: Prompt, outputs: Sequence[str]) -> list[float]:
        """Compute log p(output | prompt) of each output, in nats.

        Args:
            prompt: the prompt.
            outputs: replies to the prompt, without its label.

        Returns:
            The log-probability of each output, without that of the end of the text.

        Raises:
            DataError: an output has no token.
            EvaluationError: the prompt with an output exceeds the model's positions. Models that can't reuse the
                computation of earlier prompts also raise it if they predict NaN or infinity.
        """
        text = self.prompt_text(prompt)
        separator = "" if self._is_chat else " "  # separates the label of a reply from the reply
        documents = [Document(separator + output, prompt=text) for output in outputs]
        windows = list(cut_windows(self._tokenizer, documents, sys.maxsize))
        longest = max((len(window.ids) for window in windows), default=0)
        is_complete = len(windows) >= len(outputs) and longest <= max_sequence_length(self._model)
        if self._prefixes is not None and is_complete:
            return [self._score(self._prefixes, prompt.instructions, window) for window in windows]
        examples = [Example(text, document.text) for document in documents]
        scores = score_answers(self._model, self._tokenizer, examples)
        return [-float(nats) for nats in scores.nats]

    @torch.inference_mode()
    def _score(self, prefixes: PrefixCache, instructions: str, window: Window) -> float:
        """Return the log-probability of a window's scored tokens, in nats, reusing its known beginning."""
        ids = window.ids.tolist()
        cache = prefixes.begin(instructions, ids, window.first - 1)
        start = cache.get_seq_length()
        new = torch.tensor([ids[start:-1]], device=self._model.device)
        logits = self._model(input_ids=new, past_key_values=cache).logits
        prefixes.keep(instructions, ids[:-1], cache)
        targets = torch.tensor(ids[window.first :], device=logits.device)
        predictions = logits[0, window.first - 1 - start :].float()
        return -float(cross_entropy(predictions, targets, reduction="sum"))

    def prompt_text(self, prompt: Prompt) -> str:
        """Return a prompt as the text that the model reads."""
        if not self._is_chat:
            return prompt.text()
        chat = render_messages(self._tokenizer, prompt.messages(), header=True)
        # Many chat templates start with the BOS token that the tokenizer adds itself.
        if leading_bos(self._tokenizer) is not None:
            return chat.removeprefix(str(self._tokenizer.bos_token))
        return chat

    @property
    def _is_chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))


def before_stop(text: str, stop: str) -> str:
    """Return the part of a growing text that is certainly before the stop string.

    Args:
        text: the text so far. An end of it with which the stop string begins is left out.
        stop: the stop string.
    """
    reply = text.partition(stop)[0]
    for length in range(len(stop) - 1, 0, -1):
        if reply.endswith(stop[:length]):
            return reply.removesuffix(stop[:length])
    return reply

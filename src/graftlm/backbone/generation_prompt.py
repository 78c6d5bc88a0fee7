"""Mark the prompt in the forward passes of a generation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from graftlm.errors import TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class GenerationPrompt:
    """Marks the prompt in the passes of one generation.

    The shapes of a pass don't show where the prompt ends: a pass may read a chunk of the prompt, several drafted
    tokens, or the whole text again when there is no cache.

    Attributes:
        columns: the prompt's number of columns, including padding.
        read: number of columns that have been read, such as those in a cache of the caller.
    """

    columns: int
    read: int = 0

    def mark(self, length: int, device: torch.device, *, cached: bool) -> Tensor | None:
        """Mark the prompt's columns in the next pass.

        Args:
            length: number T of columns of the pass.
            device: device of the result.
            cached: whether the pass has a cache, so that it continues after the columns that have been read.

        Returns:
            (1, T), True at the prompt's columns; None if the pass has none.
        """
        start = self.read if cached else 0
        if start >= self.columns:
            return None  # No state changes here, because compiled code would have to guard on it.
        if cached:
            self.read += length
        positions = torch.arange(start, start + length, device=device)
        return (positions < self.columns)[None]


class PromptMarking:
    """Replaces `generate` of a live model by a function that marks the prompt, until `remove`.

    transformers' continuous batching is refused, because its passes don't separate prompts from new tokens.

    Args:
        model: the live model, which must have the method `generate`.
        generation: opens a context in which the passes of this thread mark a prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation: Callable[[GenerationPrompt | None], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._generation = generation
        live: Any = model  # `generate` comes from a mix-in that not every model has.
        self._original_generate = live.generate
        self._replaced: dict[str, object] = {}
        self._replace("generate", self._generate)
        self._replace("init_continuous_batching", _refuse_continuous_batching)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        self._replaced[name] = vars(self._model).get(name)
        setattr(self._model, name, function)

    def remove(self) -> None:
        """Restore the model's own methods."""
        for name, value in self._replaced.items():
            vars(self._model).pop(name)
            if value is not None:
                setattr(self._model, name, value)
        self._replaced.clear()

    def _generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, and mark the prompt in its passes."""
        ids = kwargs.get("input_ids", inputs)
        cache = kwargs.get("past_key_values")
        prompt = None
        if ids is not None:
            _check_prompt(ids)
            read = 0 if cache is None else int(cache.get_seq_length())
            is_draft = getattr(kwargs.get("generation_config"), "is_assistant", False)
            if not (read and is_draft):  # Drafts after the first continue the text, and don't change its tokens.
                prompt = GenerationPrompt(ids.shape[1], read)
        with self._generation(prompt):
            return self._original_generate(inputs, *args, **kwargs)


def _check_prompt(ids: object) -> None:
    """Raise `TapError` unless these are token ids (B, T) of at least one token."""
    if isinstance(ids, Tensor):
        if ids.dim() == 2 and ids.numel():
            return
        form = f"the shape {tuple(ids.shape)}"
    else:
        form = f"the type {type(ids).__name__}"
    raise TapError(
        f"The prompt has {form}, but token ids of the shape (rows, tokens) are expected: tokenize the text with "
        "return_tensors='pt', and start an empty prompt with a BOS token."
    )


def _refuse_continuous_batching(*_: object, **__: object) -> NoReturn:
    raise TapError(
        "transformers' continuous batching packs all requests into one row, in which grafts can't separate them: use "
        "generate with a batch, or graft serve."
    )

"""Sample tokens from a model's own distribution, with random numbers that depend only on a seed and a text."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graftlm.backbone import Backbone, generate_rows
from graftlm.backbone.decode_steps import COMPILING_DEVICES
from graftlm.backbone.patching import replaced_attributes
from graftlm.backbone.slot_cache import has_slots
from graftlm.data.slot_sampling import SlotSampler
from graftlm.data.token_drawing import Drawing, DrawnTokens, check_drawn, uniform_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_ROWS = 32
_MAX_ROWS = 256
_BATCH_TEXTS = 1024
_MEMORY_SHARE = 0.5
_LOGITS_BYTES = 40  # bytes per row and token of the vocabulary: logits, probabilities, their sum and their order


class TokenSampler:
    """Sample tokens after prompts.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        seed: the seed of all batches.
        model: a model that samples instead of the bare backbone, such as a `GraftedModel` on it.
        rows: number of texts that are sampled at once; None chooses it by `rows_at_once`.

    Attributes:
        batch_texts: maximum number of texts of a batch. It exceeds the number of texts that are sampled at once, so
            that new texts replace those that have ended, and does not depend on the free memory.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(
        self,
        backbone: Backbone,
        seed: int,
        model: PreTrainedModel | None = None,
        rows: int | None = None,
    ) -> None:
        self._tokenizer = backbone.need_tokenizer()
        self._model = backbone.bare_model if model is None else model
        # The module whose generation config `generate` reads.
        self._configured = self._model if model is None else backbone.model
        self._seed = seed
        self._rows = rows
        on_cpu = self._model.device.type == "cpu"
        self.batch_texts = 2 * (rows or _ROWS) if rows or on_cpu else _BATCH_TEXTS
        self._has_slots = model is None and has_slots(self._model)
        self._slots: SlotSampler | None = None
        self._key: tuple[int, ...] = ()
        self._calls = 0

    @contextmanager
    def seeded(self, number: int) -> Iterator[None]:
        """Return a context manager inside which `sample` uses the random numbers of a batch.

        It also replaces the generation config of the checkpoint by the default one, and restores both at its end.

        Args:
            number: the number of the batch, from 0.
        """
        from transformers import GenerationConfig  # imports the models

        self._key = (self._seed, number)
        self._calls = 0
        # The settings of the checkpoint's generation config, such as its penalties, are not used.
        with replaced_attributes(self._configured, generation_config=GenerationConfig()):
            yield

    @torch.no_grad()
    def sample(
        self,
        prompts: list[list[int]],
        ends: Collection[int],
        max_new_tokens: int,
        *,
        temperature: float,
        top_p: float,
    ) -> list[list[int]]:
        """Sample tokens after each prompt, up to and including the first end.

        A text depends on its random numbers alone, and not on how many are sampled at once, except for rounding.

        Args:
            prompts: token ids of each prompt.
            ends: ids of the tokens that end a text.
            max_new_tokens: maximum number of sampled tokens.
            temperature: divides the logits.
            top_p: total probability of the tokens to sample from.

        Returns:
            The new token ids of each prompt. They have no end if `max_new_tokens` is reached first, and are empty if
            `max_new_tokens` is below 1.

        Raises:
            DataError: the model computes NaN or infinite logits.
        """
        if not prompts or max_new_tokens < 1:
            return [[] for _ in prompts]
        keys = [(*self._key, self._calls, index) for index in range(len(prompts))]
        self._calls += 1
        uniform_NS = uniform_numbers(keys, max_new_tokens, self._model.device)
        drawing = Drawing(temperature, top_p)
        if self._rows is None:
            longest = max(len(prompt) for prompt in prompts)
            self._rows = rows_at_once(self._model, longest + max_new_tokens)
        while True:
            try:
                if self._has_slots:
                    return self._slot_sampler(self._rows).sample(prompts, uniform_NS, sorted(ends), drawing)
                return self._generate_all(self._rows, prompts, uniform_NS, ends, drawing)
            except torch.OutOfMemoryError:
                if self._rows == 1:
                    raise
            self._rows //= 2
            self._slots = None
            _LOG.warning("The memory is too small: from now on, %d texts are sampled at once.", self._rows)

    def _slot_sampler(self, rows: int) -> SlotSampler:
        """Return the sampler of all batches, which keeps its cache and its compiled step."""
        if self._slots is None:
            compiled = self._model.device.type in COMPILING_DEVICES
            self._slots = SlotSampler(self._model, rows, compiled=compiled)
        return self._slots

    def _generate_all(
        self,
        rows: int,
        prompts: Sequence[list[int]],
        uniform_NS: Tensor,
        ends: Collection[int],
        drawing: Drawing,
    ) -> list[list[int]]:
        """Sample `rows` texts at a time, for models that have no slots."""
        texts: list[list[int]] = []
        for start in range(0, len(prompts), rows):
            stop = start + rows
            texts += self._generate(prompts[start:stop], uniform_NS[start:stop], ends, drawing)
        return texts

    def _generate(
        self,
        prompts: Sequence[list[int]],
        uniform_BS: Tensor,
        ends: Collection[int],
        drawing: Drawing,
    ) -> list[list[int]]:
        """Sample texts together with `generate`, until the last of them has ended."""
        from transformers import LogitsProcessorList  # imports the models

        prompt_length = max(len(prompt) for prompt in prompts)
        drawn = DrawnTokens(drawing, uniform_BS, prompt_length)
        texts = generate_rows(
            self._model,
            self._tokenizer,
            prompts,
            ends,
            max_new_tokens=uniform_BS.shape[1],
            do_sample=False,
            logits_processor=LogitsProcessorList([drawn]),
        )
        check_drawn(drawn.token_B)
        return texts


def rows_at_once(model: PreTrainedModel, columns: int) -> int:
    """Return how many texts a model samples at once.

    Args:
        model: the model on its device.
        columns: maximum number of tokens of a text, with its prompt.

    Returns:
        With CUDA, the largest power of two of at most 256 whose keys, values and logits fit in half of the free memory;
        elsewhere 32.
    """
    if model.device.type != "cuda":
        return _ROWS
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    rows = _MEMORY_SHARE * free / row_bytes(model, columns)
    return 2 ** max(0, min(math.floor(math.log2(max(rows, 1))), int(math.log2(_MAX_ROWS))))


def row_bytes(model: PreTrainedModel, columns: int) -> int:
    """Return the bytes of the keys, values and logits of one row.

    Args:
        model: the model.
        columns: number of tokens of the row.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * columns * model.dtype.itemsize
    return cache + _LOGITS_BYTES * config.vocab_size

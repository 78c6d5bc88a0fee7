"""Sample many texts in few slots: a text that has ended makes room for the next prompt.

Shape suffixes: B slots, N prompts, S new tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import guard_hooks, left_padded
from graftlm.backbone.compiled_code import many_versions
from graftlm.backbone.slot_cache import SlotCache
from graftlm.data.token_drawing import Drawing, check_drawn
from graftlm.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_UNWATCHED_STEPS = 8
_SHRINK_BELOW = 0.75
_COLUMN_MULTIPLE = 64

DecodeStep = Callable[[SlotCache, Tensor], Tensor]
"""Decodes one token of each slot: from the cache and the tokens (B,) to the logits (B, V) of the next ones."""


class SlotSampler:
    """Sample continuations of prompts with a model whose cache can be a `SlotCache`.

    Args:
        model: the model, see `has_slots`.
        slots: number B of texts that are sampled at once.
        compiled: whether decode steps are compiled, with CUDA graphs on such a device. The number of slots then never
            changes, and slots without a text are computed and ignored.
        backend: backend of `torch.compile`.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, *, compiled: bool = False, backend: str | Callable = "inductor"
    ) -> None:
        self._model = model
        self._slots = slots
        self._compiled = compiled
        self._step: DecodeStep = self._decode
        if compiled:
            guard_hooks()
            mode = "reduce-overhead" if backend == "inductor" else None
            self._step = torch.compile(self._decode, fullgraph=True, dynamic=False, mode=mode, backend=backend)
        self._cache: SlotCache | None = None
        # Whether ended texts are replaced at once. Off the CPU, looking at a token waits for all queued work.
        self._is_watched = model.device.type == "cpu"

    def _decode(self, cache: SlotCache, token_B: Tensor) -> Tensor:
        position_B1 = cache.positions[:, None]
        output = self._model(
            input_ids=token_B[:, None],
            attention_mask=cache.mask(),
            position_ids=position_B1,
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        uniform_NS: Tensor,
        ends: Sequence[int],
        drawing: Drawing,
    ) -> list[list[int]]:
        """Sample at most S tokens after each prompt, up to and including the first end.

        Args:
            prompts: token ids of N prompts, none of them empty.
            uniform_NS: random numbers for the tokens of each text.
            ends: ids of the tokens that end a text.
            drawing: draws the tokens.

        Returns:
            The new token ids of each prompt.

        Raises:
            DataError: the model computes NaN or infinite logits.
        """
        slots = self._slots if self._compiled else min(self._slots, len(prompts))
        texts = _Texts(prompts, uniform_NS, ends, drawing, slots, self._model.device)
        columns = max(len(prompt) for prompt in prompts) + uniform_NS.shape[1]
        cache = self._fill(texts, columns)
        steps = 0
        while True:
            if self._is_watched or steps % _UNWATCHED_STEPS == 0:
                self._replace_ended(texts, columns)
                if not texts.running:
                    return texts.results
            if self._is_watched and not self._compiled:
                cache.shown = int(cache.positions.max()) + 1
            logits_BV = self._next_logits(cache, texts.token_B)
            cache.positions += texts.is_open_B
            texts.draw(logits_BV)
            steps += 1

    def _next_logits(self, cache: SlotCache, token_B: Tensor) -> Tensor:
        """Run a decode step, from now on eagerly if it can't be compiled."""
        if not self._compiled:
            return self._step(cache, token_B)
        try:
            with many_versions():
                return self._step(cache, token_B)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler raises; an error of the model is raised again below
            _LOG.warning("The decode step can't be compiled (%s): sampling is slower without.", first_line(error))
        self._compiled = False
        self._step = self._decode
        return self._step(cache, token_B)

    def _replace_ended(self, texts: _Texts, columns: int) -> None:
        """Take the texts that have ended, and give their slots to the next prompts, or drop many free slots."""
        texts.take_ended()
        while texts.is_waiting:
            self._fill(texts, columns)
            texts.take_ended()  # a text may end with its first token
        if not self._compiled and 0 < len(texts.running) <= _SHRINK_BELOW * texts.slots:
            assert self._cache is not None
            self._cache.shrink(texts.shrink())

    def _fill(self, texts: _Texts, columns: int) -> SlotCache:
        """Read the next prompts, as many as there are free slots, and draw their first tokens."""
        prompts, slots = texts.take_next()
        inputs = left_padded(prompts, 0, self._model.device)
        mask = inputs["attention_mask"]
        filled = DynamicCache(config=self._model.config)
        output = self._model(
            input_ids=inputs["input_ids"],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=filled,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = self._cache
        if cache is None or len(cache.rows) != texts.slots or cache.columns < columns:
            rounded = _rounded(columns, compiled=self._compiled)
            cache = SlotCache(filled, texts.slots, rounded, compiled=self._compiled)
            self._cache = cache
        cache.place(filled, [len(prompt) for prompt in prompts], slots)
        texts.begin(slots, output.logits[:, -1])
        return cache


def _rounded(columns: int, *, compiled: bool) -> int:
    """Return a number of columns that serves similar calls, too: each number needs new tensors and a compiled step."""
    if compiled:
        return 2 ** math.ceil(math.log2(max(columns, _COLUMN_MULTIPLE)))
    return -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


class _Texts:
    """The texts of one call: those that wait, those in slots, and those that have ended.

    Args:
        prompts: token ids of N prompts.
        uniform_NS: random numbers for the tokens of each text.
        ends: ids of the tokens that end a text.
        drawing: draws the tokens.
        slots: number B of slots.
        device: device of the model.

    Attributes:
        results: the new tokens of each prompt, empty until its text has ended.
        running: the number of the text in each slot that has one.
        token_B: the newest token of each slot.
        is_open_B: whether the text of a slot goes on.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        uniform_NS: Tensor,
        ends: Sequence[int],
        drawing: Drawing,
        slots: int,
        device: torch.device,
    ) -> None:
        self.results: list[list[int]] = [[] for _ in prompts]
        self.running: dict[int, int] = {}
        self._prompts = prompts
        self._uniform_NS = uniform_NS
        self._ends = torch.tensor(sorted(ends), dtype=torch.long, device=device)
        self._drawing = drawing
        self._next = 0
        self._limit = uniform_NS.shape[1]
        self.token_B = torch.zeros(slots, dtype=torch.long, device=device)
        self.is_open_B = torch.zeros(slots, dtype=torch.bool, device=device)
        self._count_B = torch.zeros_like(self.token_B)
        self._text_B = torch.zeros_like(self.token_B)
        self._new_BS = torch.zeros(slots, self._limit, dtype=torch.long, device=device)

    @property
    def slots(self) -> int:
        """The number B of slots."""
        return len(self.token_B)

    @property
    def is_waiting(self) -> bool:
        """Whether there are prompts that no slot has had yet, and a free slot for the next of them."""
        return self._next < len(self._prompts) and len(self.running) < self.slots

    def take_next(self) -> tuple[list[Sequence[int]], list[int]]:
        """Give the free slots to the next prompts. Return these prompts and their slots."""
        slots = [slot for slot in range(self.slots) if slot not in self.running]
        numbers = range(self._next, min(self._next + len(slots), len(self._prompts)))
        slots = slots[: len(numbers)]
        self.running.update(zip(slots, numbers, strict=True))
        self._next += len(numbers)
        return [self._prompts[number] for number in numbers], slots

    def begin(self, slots: Sequence[int], logits_nV: Tensor) -> None:
        """Draw the first tokens of the texts in some slots."""
        rows = torch.tensor(slots, device=self.token_B.device)
        self._text_B[rows] = torch.tensor([self.running[slot] for slot in slots], device=rows.device)
        self._count_B[rows] = 0
        self.is_open_B[rows] = True
        self._draw(rows, logits_nV)

    def draw(self, logits_BV: Tensor) -> None:
        """Draw the next token of each slot whose text goes on."""
        self._draw(torch.arange(self.slots, device=logits_BV.device), logits_BV)

    def _draw(self, rows: Tensor, logits_nV: Tensor) -> None:
        """Draw the next token of some slots, without waiting for an accelerator."""
        is_open = self.is_open_B[rows]
        count = self._count_B[rows]
        column = count.clamp(max=self._limit - 1)
        token = self._drawing.tokens(logits_nV, self._uniform_NS[self._text_B[rows], column])
        new = torch.where(is_open, token, self._new_BS[rows, column])
        self._new_BS[rows, column] = new
        count = count + is_open
        self._count_B[rows] = count
        # A token that could not be drawn ends its text, and is reported when the text is taken.
        has_ended = torch.isin(token, self._ends) | (token < 0) | (count >= self._limit)
        self.is_open_B[rows] = is_open & ~has_ended
        self.token_B[rows] = new.clamp(min=0)

    def take_ended(self) -> None:
        """Move the texts that have ended from their slots to the results. The host waits for the latest tokens.

        Raises:
            DataError: the model computes NaN or infinite logits.
        """
        is_open = self.is_open_B.tolist()
        ended = [slot for slot in self.running if not is_open[slot]]
        if not ended:
            return
        rows = torch.tensor(ended, device=self.token_B.device)
        new = self._new_BS[rows].cpu()
        check_drawn(new)
        counts = self._count_B[rows].tolist()
        for slot, tokens, count in zip(ended, new.tolist(), counts, strict=True):
            self.results[self.running.pop(slot)] = tokens[:count]

    def shrink(self) -> list[int]:
        """Drop the slots without a text, and return the indices of the others."""
        kept = sorted(self.running)
        rows = torch.tensor(kept, device=self.token_B.device)
        self.running = {new: self.running[old] for new, old in enumerate(kept)}
        self.token_B = self.token_B[rows]
        self.is_open_B = self.is_open_B[rows]
        self._count_B = self._count_B[rows]
        self._text_B = self._text_B[rows]
        self._new_BS = self._new_BS[rows]
        return kept

"""What a model costs to run: decoding speed and peak memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import psutil
import torch

from graftlm.errors import DataError
from graftlm.evaluation.perplexity import device_of, evaluating


def decode_speed(
    model: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int = 64, *, prompt_tokens: int = 32
) -> float:
    """Tokens per second of greedy decoding with a cache, one sequence at a time, after a warm-up.

    Each prompt is cut to its first `prompt_tokens` tokens, whose prefill is part of the time; an end-of-text token does
    not end the decoding, so every prompt yields `new_tokens` tokens.

    Raises:
        DataError: there is no prompt with text.
    """
    device = device_of(model)
    encoded = [tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens] for text in prompts]
    rows = [ids.to(device) for ids in encoded if ids.numel()]
    if not rows:
        raise DataError("There is no prompt to decode from: give at least one text that is not empty.")
    with evaluating(model), torch.inference_mode():
        _decode(model, tokenizer, rows[0], min(new_tokens, 8))
        start = _now(device)
        for ids in rows:
            _decode(model, tokenizer, ids, new_tokens)
        return new_tokens * len(rows) / (_now(device) - start)


class MemoryWatch:
    """The most memory that a block of work held at once.

    `peak` is in bytes: what CUDA allocated where there is a GPU, else the process' resident set, looked at every few
    milliseconds. A resident set holds what was there before, and what the allocator keeps for later.
    """

    def __init__(self, every: float = 0.02) -> None:
        self.peak = 0
        self._every = every
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, self._process.memory_info().rss)
            if self._done.wait(self._every):
                return


def _decode(model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int) -> None:
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        use_cache=True,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""What a model costs to run: decoding speed and peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

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


def peak_memory() -> int:
    """Bytes: the most that CUDA held at once where there is a GPU, else the largest resident set of this process.

    The resident set's peak never falls while the process lives, so on a CPU only a process that measures one thing
    gives a figure for that thing; on a GPU, `torch.cuda.reset_peak_memory_stats()` starts anew.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


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

"""What running a model costs: decoding speed in tokens per second, and peak memory in bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import compiled_decoding, padding_id
from graftlm.data import Document
from graftlm.errors import DataError
from graftlm.evaluation.inference import LanguageModel, device_of, evaluation_mode
from graftlm.evaluation.scored_text import first_documents

_WARM_UP_TOKENS = 8
_PROMPT_CHARACTERS = 400
_DOCUMENTS = 8
_DOCUMENT_CHARACTERS = 100_000


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Return the total number of elements of the given tensors."""
    return sum(parameter.numel() for parameter in parameters)


def prompts_of(documents: Sequence[Document], count: int) -> list[str]:
    """Return prompts of at most 400 characters, evenly spaced in the text of the first eight documents.

    Args:
        documents: the documents in order; later ones than the eighth are not read. Several sources have equal shares.
        count: number of prompts, at least 1.

    Returns:
        The prompts; fewer than `count` if the text has fewer characters.
    """
    chosen = chain.from_iterable(first_documents(documents, _DOCUMENTS))
    text = "\n".join(document.full_text[:_DOCUMENT_CHARACTERS] for document in chosen)
    step = max(1, len(text) // count)
    prompts = [text[start : start + _PROMPT_CHARACTERS] for start in range(0, len(text), step)]
    return prompts[:count]


def decode_speed(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    new_tokens: int = 64,
    *,
    prompt_tokens: int = 32,
) -> float:
    """Return the tokens per second of greedy decoding with a cache, one sequence at a time, after a warm-up.

    An end-of-text token does not end the decoding, so that every prompt yields `new_tokens` tokens. The time of the
    prefill counts.

    Args:
        model: any model with `generate`.
        tokenizer: the tokenizer of this model.
        prompts: texts to continue; texts without tokens are left out.
        new_tokens: number of tokens to decode for each prompt.
        prompt_tokens: number of leading tokens of a prompt that are read.

    Raises:
        DataError: no prompt has a token.
    """
    device = device_of(model)
    rows = []
    for text in prompts:
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens]
        if ids.numel():
            rows.append(ids.to(device))
    if not rows:
        raise DataError("There is no prompt to decode from: pass at least one text that is not empty.")
    settings: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
        "pad_token_id": padding_id(tokenizer),
    }

    live: Any = model  # `generate` comes from a mix-in.
    longest = max(ids.shape[1] for ids in rows)
    compiled = compiled_decoding(live, settings | {"max_new_tokens": new_tokens}, prompt_tokens=longest)
    settings |= compiled

    def decode(ids: Tensor, count: int) -> None:
        live.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            **settings,
        )

    with evaluation_mode(model), torch.inference_mode():
        # Compiled steps are compiled for the length of a text.
        decode(rows[0], new_tokens if compiled else min(new_tokens, _WARM_UP_TOKENS))
        start = _synchronized_time(device)
        for ids in rows:
            decode(ids, new_tokens)
        seconds = _synchronized_time(device) - start
    return new_tokens * len(rows) / seconds


def _synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class MemoryWatch:
    """Measures the peak memory of a `with` block, in bytes. It can be entered once.

    With CUDA, `peak` is the peak of the memory allocated on the current device, whose statistics are reset at the
    beginning. Otherwise it is the peak of the process's resident set, which includes what the process held before the
    block.

    Args:
        every: seconds between two samples of the resident set.

    Attributes:
        peak: the peak in bytes; with CUDA, 0 until the block ends.
    """

    def __init__(self, every: float = 0.02) -> None:
        self.peak = 0
        self._every = every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

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

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            if self._done.wait(self._every):
                return

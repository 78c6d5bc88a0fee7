"""Count the ATen operations of a decode step: what the host does for each token, whatever the sizes of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel


class _OperationCounter(TorchDispatchMode):
    """Count operations by name. Views count as well, since each of them takes time on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(function: Callable[[], object]) -> Counter[str]:
    """Return the ATen operations that a function runs, by their names.

    Args:
        function: the function, which is called once.
    """
    with _OperationCounter() as counter:
        function()
    return counter.counts


class Decoding:
    """A text that a model reads with a dynamic cache, as `generate` does: the prompt at once, then token by token.

    Args:
        model: the live model.
        prompt: token ids of the prompt, (B, T).
    """

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._read(prompt)

    @torch.no_grad()
    def _read(self, ids: Tensor) -> None:
        rows, new = ids.shape
        past = self._cache.get_seq_length()
        self._model(
            input_ids=ids,
            attention_mask=torch.ones(rows, past + new, dtype=torch.long),
            position_ids=torch.arange(past, past + new)[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def step(self, ids: Tensor) -> None:
        """Read one more token of each row, (B, 1)."""
        self._read(ids)


def decode_operations(models: Sequence[PreTrainedModel], prompt: Tensor, *, steps: int = 2) -> Counter[str]:
    """Return the operations of a decode step in which each of several models reads a token.

    Args:
        models: the live models, on the CPU.
        prompt: token ids of the prompt, (B, T); its last column is read again in each step.
        steps: number of steps, of which that with most operations counts.
    """
    decodings = [Decoding(model, prompt) for model in models]

    def step() -> None:
        for decoding in decodings:
            decoding.step(prompt[:, -1:])

    step()  # what only the first step builds does not count
    counts = [count_operations(step) for _ in range(steps)]
    return max(counts, key=Counter.total)

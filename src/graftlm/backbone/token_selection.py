"""Logits of some tokens only, because the output layer is much of the work and of the memory of a training step.

Shape suffixes: B rows, T tokens, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenSelection:
    """The tokens of one pass whose logits are needed.

    A hook on the output layer passes only their hidden states on. What models do with logits after the output layer,
    such as scaling and soft caps, acts on each logit alone, so this works for every family. The option
    `logits_to_keep` of transformers would select the same columns in every row.

    Args:
        is_selected: bool (B, T).

    Attributes:
        positions: (N,) indices of the selected tokens in the flattened (B * T), in order.
        is_applied: whether the output layer has received the selected tokens only.
    """

    def __init__(self, is_selected: Tensor) -> None:
        self._shape = is_selected.shape
        self.positions = is_selected.flatten().nonzero().squeeze(-1)
        self.is_applied = False

    @contextmanager
    def before_head(self, model: PreTrainedModel | Callable[..., object]) -> Iterator[None]:
        """Select before the model's output layer in one pass.

        Args:
            model: the model. If it has no output layer that is called with the states of all tokens, nothing is
                selected.
        """
        find_head = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        if head is None:
            yield
            return
        handle = head.register_forward_pre_hook(self._select)
        try:
            yield
        finally:
            handle.remove()

    def _select(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not args or args[0].shape[:-1] != self._shape:
            return None
        self.is_applied = True
        return (self.take(args[0])[None], *args[1:])

    def take(self, values: Tensor) -> Tensor:
        """Return the values of the selected tokens, (N, ...), from those of all tokens, (B, T, ...)."""
        return values.flatten(0, 1).index_select(0, self.positions.to(values.device))

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the selected tokens, (N, V), from the output of the pass, (1, N, V) or (B, T, V)."""
        return logits.squeeze(0) if self.is_applied else self.take(logits)

"""A pretended accelerator, which finds out where a pass waits for a real one; none is needed.

Tensors have its device and no values. Code that reads a value fails: `.item()`, `.tolist()`, `bool(tensor)`, a boolean
index, `nonzero` and the like. Copies between host and device wait as well, and are recorded.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from graftlm.backbone.taps import COUNT_KEY

DEVICE = torch.device("cuda", 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@contextmanager
def pretended_accelerator(model: nn.Module, cache: Cache) -> Iterator[Callable[[Tensor], Tensor]]:
    """Move a model and a cache to the pretended accelerator, for good; yields what moves a tensor there."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():

        def move(tensor: Tensor) -> Tensor:
            return (tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)).to(DEVICE)

        model._apply(move)
        tokens = int(cache.get_seq_length())
        for layer in cache.layers:
            for name, value in list(vars(layer).items()):
                if isinstance(value, Tensor | torch.device):
                    setattr(layer, name, move(value) if isinstance(value, Tensor) else DEVICE)
        if isinstance(count := cache.get_seq_length(), Tensor):
            setattr(cache, COUNT_KEY, (tokens, count._version))  # as a prompt that was read on the device leaves it
        yield move


class _CopyRecorder(TorchDispatchMode):
    """Records the lines of code that wait for a copy between devices, without those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func in _COPIES:
            source = args[func is _COPIES[1]]
            blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if blocks and source.device.type != result.device.type:
                self.lines += _line(traceback.extract_stack()[:-1])
        return result


def _line(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The innermost line outside torch; none if it is transformers' own."""
    frame = [frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__][-1]
    is_own = "/transformers/" in frame.filename
    return [] if is_own else [f"{frame.filename}:{frame.lineno}: {frame.line}"]


def waits(function: Callable[[], Any]) -> list[str]:
    """The lines of code at which a function waits for the pretended accelerator; it ends at the first value read."""
    with _CopyRecorder() as recorder:
        try:
            function()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            recorder.lines += _line(traceback.extract_tb(error.__traceback__)) or [str(error)]
    return recorder.lines

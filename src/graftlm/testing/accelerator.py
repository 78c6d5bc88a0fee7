"""A simulated accelerator, which shows where the host would wait for a real one."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from graftlm.backbone import GenerationPrompt
from graftlm.backbone.token_count import COUNT_KEY
from graftlm.grafted.model import GraftedModel
from graftlm.models.state_layer import RecurrentCacheLayer
from graftlm.testing.passes import pad_rows, positions_of, rows_of

DEVICE = torch.device("cuda", 0)
"""The device of the simulated accelerator."""
_TO_COPY = torch.ops.aten._to_copy.default
_COPY_INTO = torch.ops.aten.copy_.default


@torch.no_grad()
def decode_step_waits(model: GraftedModel, *, static: bool, rows: int = 20) -> list[str]:
    """Return the lines of code at which the second decode step of a padded batch waits for a simulated accelerator.

    The prompt is read on the CPU. The first step may wait, because it copies constants to the device.

    Args:
        model: the grafted model on the CPU, which is moved to the simulated accelerator for good.
        static: whether to decode with a static cache instead of a dynamic one.
        rows: number of rows of the batch.

    Returns:
        "FILE:LINE: CODE" for each place, without places in torch and transformers; empty if the step never waits.
    """
    ids, mask = pad_rows(rows_of(*range(5, 5 + rows)), "left")
    columns = ids.shape[1]
    cache: Cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=columns + 4)
    lines: list[str] = []
    with model._tap_hooks.generation(GenerationPrompt(columns)):
        model(ids, mask, positions_of(mask), past_key_values=cache, use_cache=True)
        with pretended_accelerator(model, cache) as move:
            new = move(ids[:, :1])
            full_mask = move(mask)
            for _ in range(2):
                full_mask = torch.cat([full_mask, torch.ones_like(new)], 1)
                positions = positions_of(full_mask)[:, -1:]
                given: object = full_mask
                if static:  # `generate` prepares the masks of a static cache.
                    embedded = torch.empty(rows, 1, 1, device=DEVICE)
                    given = create_masks_for_generate(model.config, embedded, full_mask, cache, positions)
                step = functools.partial(model, new, given, positions, past_key_values=cache, use_cache=True)
                lines = waits(step)
    return lines


@contextmanager
def pretended_accelerator(model: nn.Module, cache: Cache) -> Iterator[Callable[[Tensor], Tensor]]:
    """Move a model and a cache to a simulated accelerator, for good.

    Tensors get its device and lose their values. Code that reads a value fails: `.item()`, `.tolist()`, `bool(tensor)`,
    a boolean index, `nonzero` and the like. Copies between host and device wait as well, and are recorded by `waits`.

    Args:
        model: the model on the CPU.
        cache: the cache of a generation with this model.

    Yields:
        A function that moves a tensor.
    """
    tokens = int(cache.get_seq_length())
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():

        def move(tensor: Tensor) -> Tensor:
            fake = tensor if isinstance(tensor, fake_tensor.FakeTensor) else mode.from_tensor(tensor)
            return fake.to(DEVICE)

        model._apply(move)
        _move_cache(cache, move, tokens)
        yield move


def _move_cache(cache: Cache, move: Callable[[Tensor], Tensor], tokens: int) -> None:
    for layer in cache.layers:
        if isinstance(layer, RecurrentCacheLayer):
            layer._apply(move)
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor):
                setattr(layer, name, move(value))
            elif isinstance(value, torch.device):
                setattr(layer, name, DEVICE)
    count = cache.get_seq_length()
    if isinstance(count, Tensor):
        # The number of tokens is known on the host, as after a prompt that was read on the device.
        setattr(cache, COUNT_KEY, (tokens, count._version))


class _CopyRecorder(TorchDispatchMode):
    """Record the lines of code that wait for a copy between devices, without those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is _TO_COPY:
            self._record(args[0], result, args, kwargs)
        elif func is _COPY_INTO:
            self._record(args[1], result, args, kwargs)
        return result

    def _record(self, source: Tensor, result: Tensor, args: Any, kwargs: Any) -> None:
        positional = args[2] if len(args) > 2 else False
        is_blocking = not kwargs.get("non_blocking", positional)
        if is_blocking and source.device.type != result.device.type:
            self.lines += _line(traceback.extract_stack()[:-2])


def _line(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """Return the innermost line outside torch and this file; none if it is a line of transformers."""
    outside = [frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__]
    innermost = outside[-1]
    if "/transformers/" in innermost.filename:
        return []
    return [f"{innermost.filename}:{innermost.lineno}: {innermost.line}"]


def waits(function: Callable[[], object]) -> list[str]:
    """Return the lines of code at which a function waits for the simulated accelerator.

    The function is stopped at the first value that it reads.

    Args:
        function: the function, which is called inside `pretended_accelerator`.
    """
    with _CopyRecorder() as recorder:
        try:
            function()
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            recorder.lines += _line(traceback.extract_tb(error.__traceback__)) or [str(error)]
    return recorder.lines

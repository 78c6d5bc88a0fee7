"""The convolution of S4D: chunks connected by a scan, over chunks connected by a loop and over one Fourier transform.

    python benchmarks/state_space.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

All forms compute the same outputs of one model and take turns in one process. The loop is the form before the scan: it
connects the states of chunks one after the other, over the whole text, and cuts chunks from a tensor of three
dimensions. Operations are ATen operations of a forward pass, which run one after the other on an accelerator.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor
from turns import AT_MOST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.evaluation import Interval, Metric, Results, Row
from graftlm.models.block_state import convolution
from graftlm.models.block_state.state_space import S4DKernel
from graftlm.testing.operations import count_operations

NAME = "bench-state-space"
AIM = 0.5
NAMES = ("4k", "16k", "65k")


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of the measurements.

    Args:
        channels: channels E of the state-space model.
        state: real numbers in the state of a channel.
        lengths: numbers of tokens, one for each of `NAMES`; the aim applies to the last.
        rounds: rounds of forward passes.
        training_rounds: rounds of training.
    """

    channels: int = 128
    state: int = 16
    lengths: tuple[int, int, int] = (4096, 16_384, 65_536)
    rounds: int = 11
    training_rounds: int = 5


SIZE = Size()
QUICK = replace(SIZE, channels=8, state=4, lengths=(64, 128, 256), rounds=3, training_rounds=3)


def looped_scan(
    states_EBnQ: Tensor,
    factor_EQ: Tensor,
    initial_EBQ: Tensor | None,
) -> Tensor:
    """Compute the same as `convolution.scan_chunks`, one chunk after the other."""
    factor = factor_EQ[:, None]
    state = initial_EBQ
    if state is None:
        state = torch.zeros_like(states_EBnQ[:, :, 0])
    before = []
    for within_chunk in states_EBnQ.unbind(2):
        before.append(state)
        state = factor * state + within_chunk
    return torch.stack(before, dim=2)


def permuted_chunks(u_BTE: Tensor, chunk: int) -> Tensor:
    """Compute the same as `convolution.chunks_channels_first` by a permutation of three dimensions."""
    chunks_NcE = u_BTE.reshape(-1, chunk, u_BTE.shape[-1])
    return chunks_NcE.permute(2, 0, 1).contiguous()


@contextmanager
def unsegmented() -> Iterator[None]:
    """Compute the whole text at once, as on an accelerator."""
    segment = convolution.SEGMENT
    convolution.SEGMENT = sys.maxsize
    try:
        yield
    finally:
        convolution.SEGMENT = segment


@contextmanager
def looped() -> Iterator[None]:
    """Use the loop instead of the scan."""
    scan = convolution.scan_chunks
    convolution.scan_chunks = looped_scan
    try:
        yield
    finally:
        convolution.scan_chunks = scan


@contextmanager
def as_before() -> Iterator[None]:
    """Use the form before the scan: a loop over the whole text, and chunks cut from a tensor of three dimensions."""
    chunks = convolution.chunks_channels_first
    convolution.chunks_channels_first = permuted_chunks
    try:
        with looped(), unsegmented():
            yield
    finally:
        convolution.chunks_channels_first = chunks


def transformed(kernel: S4DKernel, u_BTE: Tensor) -> Tensor:
    """Compute the outputs (B, T, E, 1) by Fourier transforms over the whole length, as published (eq. 5.3)."""
    kernel_CET = whole_kernel(kernel, u_BTE.shape[1])
    return convolution.fft_convolution(u_BTE, kernel_CET) + u_BTE[..., None] * kernel.d[:, 0].T


def whole_kernel(kernel: S4DKernel, length: int) -> Tensor:
    """Compute the kernel (1, E, length), 2 Re(sum over p of c a^(m i) a^j) at m i + j, as one product of matrices."""
    log_a, c = kernel.discretize()
    log_a_EP = log_a[0]
    fine = math.isqrt(length - 1) + 1
    coarse = -(-length // fine)
    coarse_EPi = torch.exp(log_a_EP[..., None] * (fine * torch.arange(coarse, device=log_a.device)))
    fine_EPj = convolution.powers(log_a_EP, fine)
    coarse_EiP = (c[0, 0, ..., None] * coarse_EPi).transpose(1, 2)
    products = torch.bmm(coarse_EiP, fine_EPj)
    return 2 * products.real.flatten(1)[None, :, :length]


class Forms:
    """The compared forms of one convolution.

    Args:
        size: sizes of the model.
        length: number of tokens.
        device: device of the measurement.
        clock: clock of the measurement.
    """

    def __init__(self, size: Size, length: int, device: torch.device, clock: Clock) -> None:
        torch.manual_seed(0)
        self.kernel = S4DKernel(size.channels, outputs=1, systems=1, state_size=size.state)
        self.kernel.reset_parameters()
        self.kernel.to(device)
        self.u = torch.randn(1, length, size.channels, device=device)
        self.device = device
        self.clock: Clock = clock

    def scan(self, u: Tensor) -> Tensor:
        """Compute the outputs with chunks connected by the scan."""
        return self.kernel.outputs(u, None)

    def loop(self, u: Tensor) -> Tensor:
        """Compute the outputs in the form before the scan."""
        with as_before():
            return self.kernel.outputs(u, None)

    def segmented_loop(self, u: Tensor) -> Tensor:
        """Compute the outputs with chunks connected by the loop, in the segments and with the copies of the scan."""
        with looped():
            return self.kernel.outputs(u, None)

    def transform(self, u: Tensor) -> Tensor:
        """Compute the outputs by Fourier transforms."""
        return transformed(self.kernel, u)

    def measured(self, count: int, *, with_gradients: bool) -> Turns:
        """Measure the seconds of all forms.

        Args:
            count: number of rounds.
            with_gradients: whether a turn also runs the backward pass.
        """
        forms = {
            "scan": self.scan,
            "loop": self.loop,
            "segmented_loop": self.segmented_loop,
            "transform": self.transform,
        }
        turns = {name: partial(self._seconds, form, with_gradients) for name, form in forms.items()}
        return rounds(turns, count)

    def _seconds(self, form: Callable[[Tensor], Tensor], with_gradients: bool) -> float:
        work = partial(self._train if with_gradients else self._run, form)
        return seconds(work, self.device, self.clock)

    @torch.no_grad()
    def _run(self, form: Callable[[Tensor], Tensor]) -> None:
        form(self.u)

    def _train(self, form: Callable[[Tensor], Tensor]) -> None:
        u = self.u.clone().requires_grad_()
        form(u).square().mean().backward()
        self.kernel.zero_grad()

    def operations(self, *, with_loop: bool) -> int:
        """Count the operations of a forward pass by the scan or by the loop."""
        with looped() if with_loop else nullcontext(), unsegmented(), torch.no_grad():
            return count_operations(partial(self.kernel.outputs, self.u, None)).total()


def ratios(turns: Turns, under: str) -> Interval:
    """Return the scan's time over that of another form, in each round."""
    return interval([a / b for a, b in zip(turns["scan"], turns[under], strict=True)])


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Measure all lengths."""
    size = QUICK if quick else SIZE
    rows = []
    timed: dict[str, dict[str, Turns]] = {}
    for name, length in zip(NAMES, size.lengths, strict=True):
        forms = Forms(size, length, device, clock)
        forward = forms.measured(size.rounds, with_gradients=False)
        training = forms.measured(size.training_rounds, with_gradients=True)
        timed[name] = {"forward": forward, "training": training}
        metrics: dict[str, Metric] = {
            "ratio": ratios(forward, "loop"),
            "ratio_training": ratios(training, "loop"),
            "over_segmented_loop": ratios(forward, "segmented_loop"),
            "over_transform": ratios(forward, "transform"),
            "operations": forms.operations(with_loop=False),
            "operations_loop": forms.operations(with_loop=True),
        }
        print(name, {key: str(value) for key, value in metrics.items()}, flush=True)
        rows.append(Row(id=f"tokens_{name}", label=f"{length:,} tokens", metrics=metrics))
    longest = ratios(timed[NAMES[-1]]["forward"], "loop")
    aim = made_aim(f"{rows[-1].label}, over the loop", "ratio", (AT_MOST, AIM), None if quick else longest.mean)
    details = {
        "size": {**asdict(size), "lengths": list(size.lengths)},
        "threads": torch.get_num_threads(),
        "clock": clock,
        "seconds": timed,
    }
    return Results.here(NAME, rows, aims=[aim], details=details)


if __name__ == "__main__":
    about = "The convolution of S4D by a scan of chunks, over a loop and over Fourier transforms."
    command(NAME, about, benchmark, {"tokens_4k": None, "tokens_16k": None, "tokens_65k": AIM})

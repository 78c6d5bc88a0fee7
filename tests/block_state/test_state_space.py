"""The same sum in several forms: Fourier transforms, chunks, single steps, window ends."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from block_state import reference
from graftlm.errors import GraftError
from graftlm.models.block_state import convolution
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel
from graftlm.testing.operations import count_operations


def s4d(outputs: int = 1, systems: int = 1, dtype: torch.dtype = torch.double) -> S4DKernel:
    torch.manual_seed(0)
    kernel = S4DKernel(3, outputs, systems, 8)
    kernel.reset_parameters()
    return kernel.to(dtype)


def inputs(length: int, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(2, length, 3, dtype=dtype, generator=torch.Generator().manual_seed(length))


def recurrence(kernel: S4DKernel, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, E, C) and the final state, token by token."""
    outputs = []
    for token in u.unbind(1):
        y, state = kernel.step(token, state)
        outputs.append(y[:, 0])
    return torch.stack(outputs, dim=1), state


def transform(kernel: S4DKernel, u: Tensor) -> Tensor:
    """Outputs (B, T, E, C) by one Fourier transform over all tokens, as published (eq. 5.3)."""
    log_a, c = kernel.discretize()
    weights = 2 * torch.einsum("cep,ept->cet", c[:, 0], convolution.powers(log_a[0], u.shape[1])).real
    return convolution.fft_convolution(u, weights) + u[..., None] * kernel.d[:, 0].T


@given(length=st.integers(1, 200), outputs=st.integers(1, 3), with_state=st.booleans())
def test_transform_chunks_and_recurrence_agree(length: int, outputs: int, with_state: bool) -> None:
    kernel = s4d(outputs)
    u = inputs(length)
    state = torch.randn(2, 1, 3, 4, dtype=torch.cdouble) * (1.0 if with_state else 0.0)
    expected, final = recurrence(kernel, u, state)
    actual = kernel.outputs(u, state[:, 0] if with_state else None)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    if not with_state:
        torch.testing.assert_close(transform(kernel, u), expected, rtol=1e-9, atol=1e-9)
    steps = torch.full((2,), length)
    torch.testing.assert_close(kernel.final_state(u, state, steps), final, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [100, 1000, 5000])
def test_in_float32_they_agree_to_four_digits(length: int) -> None:
    kernel = s4d(dtype=torch.float32)
    u = inputs(length, torch.float32)
    expected, _ = recurrence(kernel, u, torch.zeros(2, 1, 3, 4, dtype=torch.cfloat))
    for actual in (kernel.outputs(u, None), transform(kernel, u)):
        assert float((actual - expected).detach().abs().max()) < 1e-4 * float(expected.detach().abs().max())


def test_forms_have_the_same_gradients() -> None:
    gradients = {}
    for form in (lambda kernel, u: kernel.outputs(u, None), transform):
        kernel = s4d(2)
        u = inputs(150).requires_grad_()
        form(kernel, u).pow(2).sum().backward()
        gradients[form] = [u.grad, *(weight.grad for weight in kernel.parameters())]
    torch.testing.assert_close(*gradients.values(), rtol=1e-8, atol=1e-8)


def chunk_states(chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """States (E, B, n, Q) of chunks from zero, log a (E, Q), and an initial state (E, B, Q)."""
    generator = torch.Generator().manual_seed(chunks)
    states = torch.randn(3, 2, chunks, 4, dtype=torch.cdouble, generator=generator)
    initial = torch.randn(3, 2, 4, dtype=torch.cdouble, generator=generator)
    decay = torch.rand(3, 4, dtype=torch.double, generator=generator)
    angle = torch.randn(3, 4, dtype=torch.double, generator=generator)
    return states, torch.complex(-0.1 * decay, angle), initial


def loop(states: Tensor, factor: Tensor, initial: Tensor | None) -> Tensor:
    """The states before all chunks, one chunk after the other."""
    state = torch.zeros_like(states[:, :, 0]) if initial is None else initial
    before = []
    for within_chunk in states.unbind(2):
        before.append(state)
        state = factor[:, None] * state + within_chunk
    return torch.stack(before, dim=2)


@given(chunks=st.integers(2, 40), with_state=st.booleans())
def test_the_scan_of_chunks_equals_a_loop(chunks: int, with_state: bool) -> None:
    results = []
    for form in (convolution.scan_chunks, loop):
        leaves = [tensor.requires_grad_() for tensor in chunk_states(chunks)]
        states, log_a, initial = leaves
        before = form(states, torch.exp(3 * log_a), initial if with_state else None)
        weights = torch.arange(1, before.numel() + 1).reshape(before.shape) * (1 + 2j) / before.numel()
        (before * weights).sum().real.backward()
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
        results.append([before, *gradients])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_twice_the_chunks_take_the_same_number_of_further_operations() -> None:
    """The number of dependent steps grows with the logarithm of the number of chunks."""
    counts = []
    for chunks in (64, 128, 256, 512):
        states, log_a, _ = chunk_states(chunks)
        factor = torch.exp(32 * log_a)
        operations = count_operations(lambda s=states, f=factor: convolution.scan_chunks(s, f, None))
        counts.append(operations.total())
    further = [after - before for before, after in pairwise(counts)]
    assert further[0] == further[1] == further[2] <= 20


@pytest.mark.parametrize("splits", [(), (1,), (70,), (32, 33, 128)])
def test_pieces_of_many_chunks_equal_the_reference(splits: tuple[int, ...]) -> None:
    """Outputs and gradients of a text read in pieces, each of which continues the state of the one before."""
    length = 150
    results = []
    for in_pieces in (True, False):
        kernel = s4d(2)
        u = inputs(length)[:1].requires_grad_()
        outputs = piecewise(kernel, u, splits) if in_pieces else reference.recurrence(kernel, u[0])[None, :, :, 0]
        weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.double).reshape(outputs.shape)
        (outputs * weights).sum().backward()
        results.append([outputs, u.grad, *(parameter.grad for parameter in kernel.parameters())])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length", [31, 64, 300])
@pytest.mark.parametrize("with_state", [False, True])
def test_segments_without_gradients_equal_the_recurrence(
    length: int,
    with_state: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows in segments of two chunks each, the last of which is cut, and two outputs of a channel."""
    monkeypatch.setattr(convolution, "SEGMENT", 128)
    kernel = s4d(2)
    u = inputs(length)
    state = torch.zeros(2, 1, 3, 4, dtype=torch.cdouble)
    if with_state:
        state = torch.randn(state.shape, dtype=torch.cdouble)
    with torch.no_grad():
        expected, _ = recurrence(kernel, u, state)
        actual = kernel.outputs(u, state[:, 0] if with_state else None)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def piecewise(kernel: S4DKernel, u: Tensor, splits: tuple[int, ...]) -> Tensor:
    """Outputs (1, T, E, C) of one text that is read in pieces."""
    state = None
    outputs = []
    for start, stop in pairwise([0, *splits, u.shape[1]]):
        piece = u[:, start:stop]
        outputs.append(kernel.outputs(piece, None if state is None else state[:, 0]))
        state = kernel.final_state(piece, state, torch.tensor([stop - start]))
    return torch.cat(outputs, dim=1)


@given(windows=st.integers(1, 9), window=st.integers(1, 7), outputs=st.integers(1, 3))
def test_window_end_outputs_equal_the_convolution(windows: int, window: int, outputs: int) -> None:
    u = inputs(windows * window)
    kernel = torch.randn(outputs, 3, windows * window, dtype=torch.double)
    expected = convolution.fft_convolution(u, kernel)
    actual = convolution.window_end_outputs(u, kernel, window)
    torch.testing.assert_close(actual, expected[:, window - 1 :: window], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(convolution.last_output(u, kernel), expected[:, -1], rtol=1e-9, atol=1e-9)


def test_a_convolution_equals_its_sum() -> None:
    u = inputs(6)
    kernel = torch.randn(2, 3, 6, dtype=torch.double)
    actual = convolution.fft_convolution(u, kernel)
    for t in range(6):
        expected = sum(u[:, t - j, :, None] * kernel[:, :, j].T for j in range(t + 1))
        torch.testing.assert_close(actual[:, t], expected, rtol=1e-10, atol=1e-10)


def unstructured(length: int = 64, limit: int = 256) -> UnstructuredKernel:
    torch.manual_seed(0)
    kernel = UnstructuredKernel(3, 2, length, limit)
    kernel.reset_parameters()
    return kernel


def test_a_longer_unstructured_kernel_begins_with_the_shorter_one() -> None:
    kernel = unstructured()
    torch.testing.assert_close(kernel.kernel(256)[..., :64], kernel.kernel(64))


def test_an_unstructured_kernel_has_about_unit_energy() -> None:
    energy = unstructured(512, 512).kernel(512).pow(2).sum(-1)
    assert 0.2 < float(energy.detach().mean()) < 5


def test_an_unstructured_kernel_beyond_its_limit_is_an_error_with_a_remedy() -> None:
    with pytest.raises(GraftError) as error:
        unstructured().kernel(257)
    for part in ("257 tokens", "kernel_limit", "256", "kernel s4d"):
        assert part in str(error.value)


def test_s4d_starts_as_published() -> None:
    """S4D-Lin: a = -1/2 + i pi n, step sizes log-uniform from 0.001 to 0.1, outputs of variance 1 in all."""
    torch.manual_seed(0)
    kernel = S4DKernel(2000, 1, 1, 8)
    kernel.reset_parameters()
    torch.testing.assert_close(kernel.log_decay.detach().exp(), torch.full((1, 2000, 4), 0.5))
    torch.testing.assert_close(kernel.frequency.detach(), (torch.pi * torch.arange(4.0)).expand(1, 2000, 4))
    log10_dt = kernel.log_dt.detach() / math.log(10)
    assert float(log10_dt.min()) == pytest.approx(-3, abs=0.05)
    assert float(log10_dt.max()) == pytest.approx(-1, abs=0.05)
    assert float(log10_dt.mean()) == pytest.approx(-2, abs=0.1)
    assert float(kernel.c.detach().std()) == pytest.approx(math.sqrt(0.5), rel=0.05)
    assert float(kernel.d.detach().std()) == pytest.approx(1, rel=0.1)


def test_dss_starts_with_the_eigenvalues_of_hippo() -> None:
    """Those with positive imaginary parts of A + P P^T, for HiPPO-LegS A and P = sqrt(n + 1/2)."""
    size = 8
    normal = torch.zeros(size, size, dtype=torch.double)
    for n in range(size):
        for k in range(size):
            hippo = -(n + 1) if n == k else 0
            if n > k:
                hippo = -math.sqrt((2 * n + 1) * (2 * k + 1))
            normal[n, k] = hippo + math.sqrt((n + 0.5) * (k + 0.5))
    values = torch.linalg.eigvals(normal)
    torch.testing.assert_close(values.real, torch.full_like(values.real, -0.5))
    kernel = S4DKernel(2, 1, 3, size, hippo=True).double()
    kernel.reset_parameters()
    expected = values.imag[values.imag > 0].sort().values
    torch.testing.assert_close(kernel.frequency.detach(), expected.expand(3, 2, size // 2))
    torch.testing.assert_close(kernel.log_decay.detach().exp(), torch.full((3, 2, size // 2), 0.5).double())


def test_unstructured_kernels_have_the_energy_of_their_network() -> None:
    """A network that is 1 at all times gives exp(-alpha t) over the root of its energy: unit energy in all."""
    torch.manual_seed(0)
    kernel = UnstructuredKernel(64, 2, 4096, 4096)
    kernel.reset_parameters()
    inner = kernel.outer.in_features
    assert float(kernel.outer.weight.detach().std()) == pytest.approx(inner**-0.5, rel=0.05)
    with torch.no_grad():
        kernel.inner.weight.zero_()
        kernel.inner.bias.fill_(math.pi / 2)
        kernel.outer.weight.fill_(1 / inner)
        energy = kernel.kernel(4096).square().sum(-1)
    torch.testing.assert_close(energy, torch.ones_like(energy), rtol=0.02, atol=0)

"""The same sum in several forms: Fourier transforms, chunks, single steps, window ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graftlm.errors import GraftError
from graftlm.models.block_state import convolution
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel


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

"""One sum in several forms: Fourier transforms, chunks, one token after another, window ends alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graftlm.errors import GraftError
from graftlm.models.block_state import convolution, state_space
from graftlm.models.block_state.state_space import Structured, Unstructured


def kernels(outputs: int = 1, systems: int = 1, dtype: torch.dtype = torch.double) -> Structured:
    torch.manual_seed(0)
    found = Structured(3, outputs, systems, 8)
    found.reset_parameters()
    return found.to(dtype)


def inputs(length: int, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(2, length, 3, dtype=dtype, generator=torch.Generator().manual_seed(length))


def literal(own: Structured, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for one in u.unbind(1):
        y, state = state_space.step_structured(own, one, state)
        rows.append(y[:, 0])
    return torch.stack(rows, dim=1), state


@given(length=st.integers(1, 200), outputs=st.integers(1, 3), begun=st.booleans())
def test_transform_chunks_and_recurrence_agree(length: int, outputs: int, begun: bool) -> None:
    own, u = kernels(outputs), inputs(length)
    state = torch.randn(2, 1, 3, 4, dtype=torch.cdouble) * (1.0 if begun else 0.0)
    wanted, after = literal(own, u, state)
    first = state[:, 0] if begun else None
    for form in ("transform", "chunks"):
        found = state_space.run_structured(own, u, first, form)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    steps = torch.full((2,), length)
    torch.testing.assert_close(state_space.final_state(own, u, state, steps), after, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [100, 1000, 5000])
def test_in_float32_they_agree_to_four_digits(length: int) -> None:
    own, u = kernels(dtype=torch.float32), inputs(length, torch.float32)
    state = torch.zeros(2, 1, 3, 4, dtype=torch.cfloat)
    wanted, _ = literal(own, u, state)
    for form in ("transform", "chunks"):
        found = state_space.run_structured(own, u, None, form)
        assert float((found - wanted).detach().abs().max()) < 1e-4 * float(wanted.detach().abs().max())


def test_forms_have_the_same_gradients() -> None:
    found = {}
    for form in ("transform", "chunks"):
        own, u = kernels(2), inputs(150).requires_grad_()
        state_space.run_structured(own, u, None, form).pow(2).sum().backward()
        found[form] = [u.grad, *(weight.grad for weight in own.parameters())]
    for one, other in zip(found["transform"], found["chunks"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@given(windows=st.integers(1, 9), window=st.integers(1, 7), outputs=st.integers(1, 3))
def test_window_ends_are_the_convolutions_last_tokens(windows: int, window: int, outputs: int) -> None:
    u, kernel = inputs(windows * window), torch.randn(outputs, 3, windows * window, dtype=torch.double)
    wanted = convolution.convolve(u, kernel)
    found = convolution.window_ends(u, kernel, window)
    torch.testing.assert_close(found, wanted[:, window - 1 :: window], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(convolution.last_output(u, kernel), wanted[:, -1], rtol=1e-9, atol=1e-9)


def test_a_convolution_is_its_sum() -> None:
    u, kernel = inputs(6), torch.randn(2, 3, 6, dtype=torch.double)
    found = convolution.convolve(u, kernel)
    for t in range(6):
        wanted = sum(u[:, t - j, :, None] * kernel[:, :, j].T for j in range(t + 1))
        torch.testing.assert_close(found[:, t], wanted, rtol=1e-10, atol=1e-10)


def unstructured(length: int = 64, limit: int = 256) -> Unstructured:
    torch.manual_seed(0)
    own = Unstructured(3, 2, length, limit)
    own.reset_parameters()
    return own


def test_an_unstructured_kernel_extends_what_it_was() -> None:
    own = unstructured()
    torch.testing.assert_close(own.kernel(256)[..., :64], own.kernel(64))


def test_an_unstructured_kernel_has_about_unit_energy() -> None:
    energy = unstructured(512, 512).kernel(512).pow(2).sum(-1)
    assert 0.2 < float(energy.detach().mean()) < 5


def test_past_its_limit_an_unstructured_kernel_says_what_to_do() -> None:
    with pytest.raises(
        GraftError, match=r"257 tokens is longer than kernel_limit, the 256 .* train with kernel: s4d, which has none"
    ):
        unstructured().kernel(257)

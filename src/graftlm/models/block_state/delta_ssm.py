"""The gated delta rule as the recurrent state of a block-state layer.

Shape suffixes: B rows, G slots of the grid, T aligned tokens, E channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state.cache import LayerCache
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.grid import Grid, StepGrid, slice_rows
from graftlm.models.block_state.sequence_ssm import without_autocast
from graftlm.models.block_state.state_space import at_least_float32
from graftlm.models.delta_rule import delta_rule, mixed_tokens, unit_length

_MIXED = 4  # number of last tokens from which queries, keys and values are mixed


class DeltaSSM(nn.Module):
    """The gated delta rule (`models/delta_rule.py`): a state that maps keys to values, at rates computed from the text.

        z_t = sum over j < 4 of m_j * (u_{t-j} W)    z = [q, k, v]; q and k become q / sqrt(|q|^2 + 0.01)
        log a_t = -softplus(u_t w_a + c_a)           b_t = sigmoid(u_t w_b + c_b)

    Initially a key is the query of the token before, so a query retrieves what followed its token. Queries and keys
    have `state_size` elements, values `state_width`. The cache holds the state, and u W of the last tokens.

    Args:
        config: config of the model.
        name: name of the state in the cache.
    """

    def __init__(self, config: BlockStateConfig, name: str) -> None:
        super().__init__()
        self.name = name
        self.kernel_length = config.kernel_length
        self.resets = config.reset_states
        self.sizes = (config.state_size, config.state_size, config.state_width)
        self.qkv = nn.Linear(config.state_width, sum(self.sizes), bias=False)
        self.mix = nn.Parameter(torch.empty(_MIXED, sum(self.sizes)))
        # Rows for a, then for b.
        self.rate_weight = nn.Parameter(torch.empty(2, config.state_width))
        self.rate_bias = nn.Parameter(torch.empty(2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters but the values' projection.

        Keys are the queries of the token before, a state decays to 1/e in `kernel_length` tokens, and b = 1/2.
        """
        self.mix.zero_()
        query_mix, key_mix, value_mix = self.mix.split(self.sizes, dim=1)
        query_mix[0] = 1
        key_mix[1] = 1
        value_mix[0] = 1
        queries, keys, _ = self.qkv.weight.split(self.sizes)
        keys.copy_(queries)
        self.rate_weight.zero_()
        decay_bias = math.log(math.expm1(1 / self.kernel_length))
        self.rate_bias.copy_(torch.tensor([decay_bias, 0.0]))

    def forward(self, u_BGE: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Compute the state's output for each token.

        Args:
            u_BGE: inputs (B, G, E).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            Outputs (B, G, E, 1), at least in float32; values of empty slots are arbitrary.
        """
        aligned = grid.aligned(at_least_float32(u_BGE))
        with without_autocast(u_BGE.device):
            y_BTE = self._outputs(aligned, grid, cache)
        return grid.unaligned(y_BTE)[..., None]

    def _outputs(self, u_BTE: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Compute the outputs (B, T, E) for left-aligned inputs."""
        inputs_name = f"{self.name} inputs"
        z = functional.linear(u_BTE, self.qkv.weight.to(u_BTE.dtype))
        cached = {} if cache is None else cache.tensors
        before = cached.get(inputs_name)
        if before is None:
            before = z.new_zeros(len(z), _MIXED - 1, z.shape[-1])
        mixed, _ = mixed_tokens(
            z,
            self.mix.to(z.dtype),
            document_BT=None,
            before=before,
        )
        # The only head is the second dimension.
        q, k, v = mixed[:, None].split(self.sizes, dim=-1)
        log_a, b = self._rates(u_BTE, grid)
        state = cached.get(self.name)
        window = None
        if self.resets:
            window, continues = self._windows(u_BTE.shape[1], grid)
            if state is not None:
                state = state * continues[..., None, None]
        y, state = delta_rule(
            q_BHTK=unit_length(q),
            k_BHTK=unit_length(k),
            v_BHTV=v,
            log_a_BHT=log_a,
            b_BHT=b,
            state_BHKV=state,
            document_BT=window,
        )
        if cache is not None:
            cache.store(self.name, state)
            inputs = torch.cat([before, z], dim=1)
            if isinstance(grid, StepGrid):
                last_inputs = grid.kept(inputs[:, 1:], before)
            else:
                last_inputs = slice_rows(inputs, grid.new_lengths, _MIXED - 1)
            cache.store(inputs_name, last_inputs)
        return y[:, 0]

    def _rates(self, u_BTE: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Compute log a and b, both (B, 1, T); they are zero in columns without a token, which keep the state."""
        weight = self.rate_weight.to(u_BTE.dtype)
        bias = self.rate_bias.to(u_BTE.dtype)
        rates_BT2 = functional.linear(u_BTE, weight, bias)
        rates_B2T = rates_BT2.transpose(1, 2)
        column = torch.arange(u_BTE.shape[1], device=u_BTE.device)
        inside_B1T = (column < grid.new_counts[:, None])[:, None]
        log_a = -functional.softplus(rates_B2T[:, :1]) * inside_B1T
        b = rates_B2T[:, 1:].sigmoid() * inside_B1T
        return log_a, b

    def _windows(self, length: int, grid: Grid) -> tuple[Tensor, Tensor]:
        """Number the windows, at whose boundaries states are reset.

        Returns:
            The window (B, T) of each column; and whether the first one continues a window of the previous pass (B, 1).
        """
        past = grid.past_counts[:, None]
        last = grid.new_counts[:, None] - 1
        column = torch.arange(length, device=past.device)
        window = (past + torch.minimum(column, last)) // grid.window
        continues = past % grid.window > 0
        return window, continues

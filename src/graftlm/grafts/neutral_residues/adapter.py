"""The gated adapter of one layer.

Shape suffixes: N tokens, O open tokens, D the backbone's width, F the adapter's width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.grafts.neutral_residues.config import NeutralResiduesConfig

# Up to this number of tokens, as in decoding, the time is that of reading the weights, and a selection of the open
# tokens saves nothing.
_FEW_TOKENS = 16


class GatedAdapter(nn.Module):
    """A gated adapter in parallel to an FFN, whose input it reads.

    The adapter adds to the output of the FFN that reads x, or to that of the norm which follows the FFN,

        r(x) = g(x) * A(x),    g(x) = act_g(w . x + b),    A(x) = W_o (act(W_g x) * W_i x)

    Args:
        width: D.
        inner: F.
        activation: the name of `act` in transformers' ACT2FN.
        gated_ffn: whether A is a gated linear unit; otherwise A(x) = W_o act(W_i x).
        config: kind and initialization of the gate, and initialization of the matrices.
        layers: number of layers of the backbone.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        activation: str,
        gated_ffn: bool,
        config: NeutralResiduesConfig,
        layers: int,
    ) -> None:
        super().__init__()
        self.kind = config.gate
        self.w_i = nn.Linear(width, inner, bias=False)
        self.w_g = nn.Linear(width, inner, bias=False) if gated_ffn else None
        self.w_o = nn.Linear(inner, width, bias=False)
        self.gate = None
        if config.gate != "none":
            self.gate = nn.Linear(width, 1, bias=config.gate_init == "open")
        # Imported here because it imports transformers' models, which takes seconds.
        from transformers.activations import ACT2FN

        self.activation = ACT2FN[activation]
        variance = 2 / width if config.init == "he" else 1 / (width * layers)
        self._initialize(width, math.sqrt(variance))

    @torch.no_grad()
    def _initialize(self, width: int, deviation: float) -> None:
        self.w_i.weight.normal_(0, deviation)
        if self.w_g is not None:
            self.w_g.weight.normal_(0, deviation)
        self.w_o.weight.zero_()
        if self.gate is None:
            return
        if self.gate.bias is None:
            self.gate.weight.normal_(0, 1 / math.sqrt(width))
        else:
            self.gate.weight.zero_()
            self.gate.bias.fill_(1)

    def scores(self, x_ND: Tensor) -> Tensor | None:
        """Compute w . x + b, the input of the gate's activation, (N, 1), from the inputs of the FFN, (N, D).

        Without a gate, the result is None.
        """
        gate = self.gate
        if gate is None:
            return None
        return functional.linear(x_ND, gate.weight, gate.bias)

    # Each layer computes this for each decoded token. So the matrices are applied without the Linears' own calls, and
    # to tensors of two dimensions, which torch would otherwise make of others and back again.

    def adapt(self, x_ND: Tensor) -> Tensor:
        """Compute A(x), (N, D), from the inputs of the FFN, (N, D)."""
        inner = functional.linear(x_ND, self.w_i.weight)
        if self.w_g is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(functional.linear(x_ND, self.w_g.weight)) * inner
        return functional.linear(inner, self.w_o.weight)

    def residue(self, x_ND: Tensor, scores_N1: Tensor | None, *, select: bool = True) -> Tensor:
        """Compute r(x), (N, D).

        Args:
            x_ND: (N, D), inputs of the FFN.
            scores_N1: (N, 1), the output of `scores`; None without a gate.
            select: whether the adapter of a ReLU gate runs on open tokens only, if there are many tokens; this
                synchronizes with a GPU.
        """
        if scores_N1 is None:
            return self.adapt(x_ND)
        if self.kind == "sigmoid":
            return torch.sigmoid(scores_N1) * self.adapt(x_ND)
        if not select or len(scores_N1) <= _FEW_TOKENS:
            return scores_N1.relu() * self.adapt(x_ND)
        return self._residue_of_open_tokens(x_ND, scores_N1)

    def _residue_of_open_tokens(self, x_ND: Tensor, scores_N1: Tensor) -> Tensor:
        """Compute r(x), (N, D), with the adapter on open tokens only."""
        open_O = (scores_N1.squeeze(-1) > 0).nonzero().squeeze(-1)
        if len(open_O) == len(scores_N1):
            return scores_N1 * self.adapt(x_ND)
        x_OD = x_ND.index_select(0, open_O)
        out_OD = scores_N1.index_select(0, open_O) * self.adapt(x_OD)
        out_ND = out_OD.new_zeros(x_ND.shape)
        return out_ND.index_copy(0, open_O, out_OD)

    def is_closed(self, scores_N1: Tensor | None) -> bool:
        """Return whether r(x) is zero for every token, which only a ReLU gate makes possible.

        This synchronizes with a GPU.

        Args:
            scores_N1: (N, 1) for at least one token, the output of `scores`; None without a gate.
        """
        if scores_N1 is None or self.kind != "relu":
            return False
        highest = scores_N1 if len(scores_N1) == 1 else scores_N1.max()
        return not highest.item() > 0

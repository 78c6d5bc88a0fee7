"""The blank adapters of a carrier: the template of their code, which must not import graftlm."""

from torch import nn
from transformers.activations import ACT2FN

CONSTANTS = 8
"""Number of ones behind each input, so that a weight can act as a bias. A full vector register is fastest."""
BLANKS = (("silu", "relu"),)
"""The activations of the adapter and of the gate of each blank adapter."""


class BlankAdapter(nn.Module):
    """gate(w . z) W_o (act(W_g z) * W_i z), where z is the FFN's input and ones. Its weights are zero.

    A LoRA adapter fills the weights: its update of each matrix is the matrix.
    """

    def __init__(self, config, activation, gate):
        super().__init__()
        width = config.get_text_config().hidden_size
        inner = config.adapter_width
        self.w_i = nn.Linear(width + CONSTANTS, inner, bias=False)
        self.w_g = nn.Linear(width + CONSTANTS, inner, bias=False)
        self.w_o = nn.Linear(inner, width, bias=False)
        # No name is the beginning of another one: vLLM's tensor parallelism would take one for the other.
        self.adapter_gate = nn.Linear(width + CONSTANTS, 1, bias=False)
        self.act = ACT2FN[activation]
        self.gate_act = ACT2FN[gate]

    def forward(self, x):
        """Return the adapter's output for the FFN's input."""
        # vLLM would pack matrices that read an argument of this function, or act(W_g z) * W_i z in one expression.
        z = nn.functional.pad(x.to(self.w_o.weight.dtype), (0, CONSTANTS), value=1.0)
        hidden = self.act(self.w_g(z))
        adapted = self.w_o(hidden * self.w_i(z))
        return self.gate_act(self.adapter_gate(z)) * adapted


class Adapter(nn.Module):
    """The sum of the blank adapters."""

    def __init__(self, config):
        super().__init__()
        self.blanks = nn.ModuleList(BlankAdapter(config, *functions) for functions in BLANKS)

    def forward(self, hidden_states):
        """Return the sum of the adapters' outputs for the FFN's input."""
        adapted = self.blanks[0](hidden_states)
        for blank in self.blanks[1:]:
            adapted = adapted + blank(hidden_states)
        return adapted.to(hidden_states.dtype)

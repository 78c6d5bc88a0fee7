"""The gated adapter in an exported model: the template of its code, which must not import graftlm."""

from torch import nn
from transformers.activations import ACT2FN


class Adapter(nn.Module):
    """relu(w . x + b) W_o (act(W_g x) * W_i x), where x is the FFN's input (Neutral Residues, ICML 2025)."""

    def __init__(self, config):
        super().__init__()
        width = config.get_text_config().hidden_size
        inner = config.adapter_width
        self.w_i = nn.Linear(width, inner, bias=False)
        self.w_g = nn.Linear(width, inner, bias=False)
        self.w_o = nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, 1, bias=True)
        self.activation = ACT2FN["silu"]

    def forward(self, hidden_states):
        """Return the adapter's output for the FFN's input."""
        x = hidden_states.to(self.w_o.weight.dtype)
        # Apart from the product, or vLLM would pack these matrices like those of the FFN.
        hidden = self.activation(self.w_g(x))
        adapted = self.w_o(hidden * self.w_i(x))
        adapted = self.gate(x).relu() * adapted
        return adapted.to(hidden_states.dtype)

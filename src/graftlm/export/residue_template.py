"""Modules of exported models whose FFNs are followed by a norm: a template, which must not import graftlm.

`norm(FFN(x))` of the original architecture becomes `norm(FFN(x)) + adapter(x)`. The FFN passes the adapter's output to
its norm, so the code of the layers stays that of the original model.
"""

from torch import nn

from graftlm.export.model_template import Adapter


class FFNWithAdapter(nn.Module):
    """An FFN and an adapter that read the same input. The norm after the FFN adds their outputs."""

    def __init__(self, ffn, config):
        super().__init__()
        self.ffn = ffn
        self.adapter = Adapter(config)

    def forward(self, hidden_states, *args, **kwargs):
        """Return the FFN's and the adapter's output, a pair."""
        return self.ffn(hidden_states, *args, **kwargs), self.adapter(hidden_states)


class NormWithAdapter(nn.Module):
    """The norm after an FFN: norm(FFN(x)) + adapter(x)."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states):
        """Return the sum for a pair of the FFN's and the adapter's output."""
        output, adapted = hidden_states
        return self.norm(output) + adapted

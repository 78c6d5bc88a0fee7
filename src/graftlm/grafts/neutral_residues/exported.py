"""The gated adapter as code of an exported model. It computes all tokens alike, so that it compiles as a whole."""

from __future__ import annotations

_SOURCE = '''class Adapter(nn.Module):
    """{equation}, where x is the FFN's input (Neutral Residues, ICML 2025)."""

    def __init__(self, config):
        super().__init__()
        width, inner = config.get_text_config().hidden_size, config.adapter_width
        {modules}
        self.act = ACT2FN["{activation}"]

    def forward(self, hidden_states):
        x = hidden_states.to(self.w_o.weight.dtype)
        adapted = {gate}self.w_o({inner})
        return adapted.to(hidden_states.dtype)
'''


def adapter_source(activation: str, is_gated: bool, gate: str, has_bias: bool) -> str:
    """The code of `Adapter`.

    Args:
        activation: of the FFN, by its name in ACT2FN.
        is_gated: whether the adapter is a gated linear unit.
        gate: relu, sigmoid or none.
        has_bias: whether the gate has a bias.
    """
    w_g, inner, equation = [], "self.act(self.w_i(x))", "W_o act(W_i x)"
    if is_gated:
        w_g = ["self.w_g = nn.Linear(width, inner, bias=False)"]
        inner, equation = "self.act(self.w_g(x)) * self.w_i(x)", "W_o (act(W_g x) * W_i x)"
    lines = ["self.w_i = nn.Linear(width, inner, bias=False)", *w_g, "self.w_o = nn.Linear(inner, width, bias=False)"]
    if gate != "none":
        lines.append(f"self.gate = nn.Linear(width, 1, bias={has_bias})")
        equation = f"{gate}(w . x{' + b' if has_bias else ''}) {equation}"
    return _SOURCE.format(
        equation=equation,
        modules="\n        ".join(lines),
        activation=activation,
        gate="" if gate == "none" else f"self.gate(x).{gate}() * ",
        inner=inner,
    )

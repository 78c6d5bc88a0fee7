"""The source code of gated adapters for an exported model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from graftlm.grafts.exports import AdapterForm, ExportedAdapter
from graftlm.grafts.neutral_residues.adapter import GatedAdapter

_TEMPLATE = Path(__file__).with_name("exported_template.py")
_EQUATION = "relu(w . x + b) W_o (act(W_g x) * W_i x)"
_WIDTH_MULTIPLE = 64
"""Inner widths are padded to a multiple of it, so that tensor parallelism over up to 64 devices can split them."""


def exported_blocks(blocks: Sequence[GatedAdapter], activation: str) -> ExportedAdapter:
    """Return the code and the tensors of gated adapters for an exported model.

    The code runs the adapter on all tokens, including those whose gate is closed, because a model that selects tokens
    by their values can't be compiled as a whole. Its inner width is padded with zeros, which change no output.

    Args:
        blocks: the adapter of each layer, at least one; all have the same form.
        activation: the name of the adapters' activation in transformers' ACT2FN.
    """
    first = blocks[0]
    width = _WIDTH_MULTIPLE * math.ceil(first.w_i.out_features / _WIDTH_MULTIPLE)
    return ExportedAdapter(
        source=_source(first, activation),
        width=width,
        tensors=[_padded(block, width) for block in blocks],
        parallel=_parallel_plan(first),
        form=AdapterForm(activation=activation, gate="" if first.gate is None else first.kind),
    )


def _padded(block: GatedAdapter, width: int) -> dict[str, Tensor]:
    """Return the tensors of an adapter whose inner width is padded with zeros: act(0) has the weight 0 in W_o."""
    missing = width - block.w_i.out_features
    padding = {"w_i.weight": (0, 0, 0, missing), "w_g.weight": (0, 0, 0, missing), "w_o.weight": (0, missing)}
    tensors = {}
    for name, tensor in block.state_dict().items():
        tensors[name] = functional.pad(tensor, padding[name]) if name in padding else tensor
    return tensors


def _parallel_plan(block: GatedAdapter) -> dict[str, str]:
    """Return how tensor parallelism splits each matrix."""
    plan = {"w_i": "colwise"}
    if block.w_g is not None:
        plan["w_g"] = "colwise"
    plan["w_o"] = "rowwise"
    return plan


def _source(block: GatedAdapter, activation: str) -> str:
    """Return the code of the template's class without the modules that the block lacks."""
    _, _, body = _TEMPLATE.read_text(encoding="utf-8").partition("class Adapter")
    code = f"class Adapter{body}"
    code = code.replace(_EQUATION, _equation(block))
    code = code.replace('ACT2FN["silu"]', f'ACT2FN["{activation}"]')
    if block.w_g is None:
        code = _without_line(code, "self.w_g = ")
        code = code.replace("self.activation(self.w_g(x))", "self.activation(self.w_i(x))")
        code = code.replace("hidden * self.w_i(x)", "hidden")
    if block.gate is None:
        code = _without_line(code, "self.gate = ")
        code = _without_line(code, "self.gate(x)")
    else:
        code = code.replace("bias=True", f"bias={block.gate.bias is not None}")
        code = code.replace("self.gate(x).relu()", f"self.gate(x).{block.kind}()")
    return code


def _without_line(code: str, text: str) -> str:
    """Remove the line that contains a text."""
    lines = code.splitlines(keepends=True)
    return "".join(line for line in lines if text not in line)


def _equation(block: GatedAdapter) -> str:
    """Return the equation for the docstring."""
    equation = "W_o act(W_i x)" if block.w_g is None else "W_o (act(W_g x) * W_i x)"
    if block.gate is None:
        return equation
    bias = "" if block.gate.bias is None else " + b"
    return f"{block.kind}(w . x{bias}) {equation}"

"""The source code of gated adapters for an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from graftlm.grafts.base import ExportedAdapter
from graftlm.grafts.neutral_residues.adapter import GatedAdapter

_TEMPLATE = Path(__file__).with_name("exported.txt")


def exported_blocks(blocks: Sequence[GatedAdapter], activation: str) -> ExportedAdapter:
    """Return the blocks as code that computes all tokens in the same way, so that it compiles as a whole.

    Args:
        blocks: the adapter of each layer; all have the same form.
        activation: the name of the activation in transformers' ACT2FN.
    """
    block = blocks[0]
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    source = template.substitute(
        activation=activation,
        equation=_equation(block),
        gate=_gate_factor(block),
        inner=_inner(block),
        modules="\n        ".join(_modules(block)),
    )
    return ExportedAdapter(
        source=source,
        width=block.w_i.out_features,
        tensors=[own.state_dict() for own in blocks],
        parallel=_parallel_plan(block),
    )


def _parallel_plan(block: GatedAdapter) -> dict[str, str]:
    """Return how tensor parallelism splits each matrix."""
    plan = {"w_i": "colwise"}
    if block.w_g is not None:
        plan["w_g"] = "colwise"
    plan["w_o"] = "rowwise"
    return plan


def _modules(block: GatedAdapter) -> list[str]:
    """Return a line of code for each module of the adapter."""
    lines = ["self.w_i = nn.Linear(width, inner, bias=False)"]
    if block.w_g is not None:
        lines.append("self.w_g = nn.Linear(width, inner, bias=False)")
    lines.append("self.w_o = nn.Linear(inner, width, bias=False)")
    if block.gate is not None:
        lines.append(f"self.gate = nn.Linear(width, 1, bias={block.gate.bias is not None})")
    return lines


def _inner(block: GatedAdapter) -> str:
    """Return the code of the inner activations."""
    if block.w_g is None:
        return "self.act(self.w_i(x))"
    return "self.act(self.w_g(x)) * self.w_i(x)"


def _gate_factor(block: GatedAdapter) -> str:
    """Return the code of the factor g(x)."""
    if block.gate is None:
        return ""
    return f"self.gate(x).{block.kind}() * "


def _equation(block: GatedAdapter) -> str:
    """Return the equation for the docstring."""
    equation = "W_o act(W_i x)" if block.w_g is None else "W_o (act(W_g x) * W_i x)"
    if block.gate is None:
        return equation
    bias = "" if block.gate.bias is None else " + b"
    return f"{block.kind}(w . x{bias}) {equation}"

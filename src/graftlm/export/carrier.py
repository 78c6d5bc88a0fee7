"""A carrier: a backbone with blank adapters next to its FFNs, which LoRA adapters fill.

A server of LoRA adapters, such as vLLM, can add B A x to the output W x of a linear module, and nothing else. The
weights of a blank adapter are zero, so its output is zero. A LoRA adapter whose update B A of each matrix is the matrix
of a graft makes the blank adapter that of the graft:

    W_g, W_i, w    A is the matrix, B the identity
    W_o            A is the identity, B the matrix

The inputs of a blank adapter end with ones. A weight of such an input is the bias of the gate, and makes the factors
constant that a graft lacks: W_i z = 1 for an adapter without gated linear unit, and an open gate for one without gate.

Shape suffixes: D the backbone's width, F a blank adapter's width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone
from graftlm.export.carrier_template import CONSTANTS
from graftlm.grafts import AdapterForm, ExportedAdapter, LowRankUpdate

MAX_RANK = 512
"""The largest rank of a LoRA adapter in vLLM. A wider adapter fills several blanks."""
_WIDTH_MULTIPLE = 64
"""Tensor parallelism over up to 64 devices can split such a width."""
_OPEN = {"relu": 1.0, "sigmoid": 100.0}
"""The input at which a gate is 1 in float32."""
_DEFAULT_GATE = "relu"
_TEMPLATE = Path(__file__).with_name("carrier_template.py")
_BLANKS_OF_TEMPLATE = 'BLANKS = (("silu", "relu"),)'


@dataclass(frozen=True)
class Piece:
    """An adapter, or a part of its inner units, that fills one blank.

    Attributes:
        form: the form of the blank. An adapter without a gate fills one with a ReLU gate.
        has_gate: whether the adapter has a gate.
        layers: the tensors of each layer, see `AdapterForm`.
    """

    form: AdapterForm
    has_gate: bool
    layers: Sequence[Mapping[str, Tensor]]

    @property
    def width(self) -> int:
        """The number of inner units."""
        return len(self.layers[0]["w_i.weight"])


@dataclass(frozen=True)
class Carrier:
    """The blank adapters of a carrier.

    Attributes:
        blanks: the form of each blank adapter of a layer.
        width: F, their width.
    """

    blanks: Sequence[AdapterForm]
    width: int

    @classmethod
    def of(cls, entries: Sequence[Sequence[Piece]]) -> Carrier:
        """Return the smallest carrier that each entry can fill.

        Args:
            entries: for each entry, the pieces that act at the same time; at least one entry has pieces.
        """
        needed: Counter[AdapterForm] = Counter()
        for pieces in entries:
            needed |= Counter(piece.form for piece in pieces)  # the larger number for each form
        widths = [piece.width for pieces in entries for piece in pieces]
        return cls(blanks=list(needed.elements()), width=_rounded(max(widths)))

    def fits(self, pieces: Sequence[Piece]) -> bool:
        """Return whether the carrier has a blank for each piece."""
        needed = Counter(piece.form for piece in pieces)
        is_narrow = all(piece.width <= self.width for piece in pieces)
        return is_narrow and needed <= Counter(self.blanks)

    def exported(self, backbone: Backbone) -> ExportedAdapter:
        """Return the module with the blank adapters of a layer, for an exported model."""
        parallel = {"blanks.*.w_i": "colwise", "blanks.*.w_g": "colwise", "blanks.*.w_o": "rowwise"}
        return ExportedAdapter(
            source=self._source(),
            width=self.width,
            tensors=[self._zeros(backbone.sites.width) for _ in range(backbone.sites.n_layers)],
            parallel=parallel,
        )

    def _zeros(self, width: int) -> dict[str, Tensor]:
        """Return the weights of the blank adapters of a layer of a backbone of some width."""
        tensors = {}
        for number in range(len(self.blanks)):
            prefix = f"blanks.{number}"
            tensors[f"{prefix}.w_i.weight"] = torch.zeros(self.width, width + CONSTANTS)
            tensors[f"{prefix}.w_g.weight"] = torch.zeros(self.width, width + CONSTANTS)
            tensors[f"{prefix}.w_o.weight"] = torch.zeros(width, self.width)
            tensors[f"{prefix}.adapter_gate.weight"] = torch.zeros(1, width + CONSTANTS)
        return tensors

    def _source(self) -> str:
        _, _, code = _TEMPLATE.read_text(encoding="utf-8").partition("CONSTANTS = ")
        pairs = "".join(f'    ("{form.activation}", "{form.gate}"),\n' for form in self.blanks)
        assert _BLANKS_OF_TEMPLATE in code, "the template names the blanks"
        code = code.replace(_BLANKS_OF_TEMPLATE, f"BLANKS = (\n{pairs})")
        return f"CONSTANTS = {code}"

    def filled(self, pieces: Sequence[Piece], backbone: Backbone) -> dict[str, LowRankUpdate]:
        """Return the updates that make blank adapters compute the sum of some pieces.

        Args:
            pieces: pieces for which the carrier has blanks.
            backbone: the backbone of the carrier.

        Returns:
            The update of each matrix, by its path in the carrier.
        """
        free = list(enumerate(self.blanks))
        updates = {}
        for piece in pieces:
            number = next(number for number, form in free if form == piece.form)
            free.remove((number, piece.form))
            for layer, tensors in enumerate(piece.layers):
                prefix = f"{adapter_path(layer, backbone)}.blanks.{number}"
                for name, update in self._layer_updates(piece, tensors).items():
                    updates[f"{prefix}.{name}"] = update
        return updates

    def _layer_updates(self, piece: Piece, tensors: Mapping[str, Tensor]) -> dict[str, LowRankUpdate]:
        """Return the updates of the matrices of one blank adapter."""
        inner = tensors["w_i.weight"]
        identity_Ff = torch.eye(self.width, len(inner), dtype=inner.dtype, device=inner.device)
        updates = {
            "adapter_gate": LowRankUpdate(a=_gate_row(piece, tensors), b=inner.new_ones(1, 1)),
            "w_o": LowRankUpdate(a=identity_Ff.T, b=tensors["w_o.weight"]),
        }
        if "w_g.weight" in tensors:
            updates["w_g"] = LowRankUpdate(a=_with_constants(tensors["w_g.weight"]), b=identity_Ff)
            updates["w_i"] = LowRankUpdate(a=_with_constants(inner), b=identity_Ff)
        else:
            one = _with_constants(inner.new_zeros(1, inner.shape[1]), constant=1.0)
            updates["w_g"] = LowRankUpdate(a=_with_constants(inner), b=identity_Ff)
            updates["w_i"] = LowRankUpdate(a=one, b=inner.new_ones(self.width, 1))
        return updates


def pieces_of(adapter: ExportedAdapter, weight: float = 1.0) -> list[Piece]:
    """Return an adapter as pieces of at most `MAX_RANK` inner units.

    Args:
        adapter: an adapter with a form.
        weight: a factor of the adapter's output.
    """
    assert adapter.form is not None, "the exporter checks it"
    form = AdapterForm(adapter.form.activation, adapter.form.gate or _DEFAULT_GATE)
    parts = math.ceil(adapter.width / MAX_RANK)
    size = _rounded(math.ceil(adapter.width / parts))
    pieces = []
    for start in range(0, adapter.width, size):
        layers = [_units(tensors, slice(start, start + size), weight) for tensors in adapter.tensors]
        pieces.append(Piece(form=form, has_gate=bool(adapter.form.gate), layers=layers))
    return pieces


def adapter_path(layer: int, backbone: Backbone) -> str:
    """Return the path of the adapter of a layer in an exported model with adapters."""
    family = backbone.sites.family
    return f"{backbone.model.base_model_prefix}.{family.layers}.{layer}.{family.ffn.entry}.adapter"


def _units(tensors: Mapping[str, Tensor], units: slice, weight: float) -> dict[str, Tensor]:
    """Return some inner units of an adapter, whose output is multiplied by a weight."""
    chosen = dict(tensors)
    for name in ("w_i.weight", "w_g.weight"):
        if name in tensors:
            chosen[name] = tensors[name][units]
    chosen["w_o.weight"] = weight * tensors["w_o.weight"][:, units]
    return chosen


def _gate_row(piece: Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weights of the gate, (1, D + constants)."""
    if not piece.has_gate:
        width = tensors["w_o.weight"].shape[0]
        closed = tensors["w_o.weight"].new_zeros(1, width)
        return _with_constants(closed, constant=_OPEN[piece.form.gate])
    bias = tensors.get("gate.bias")
    return _with_constants(tensors["gate.weight"], constant=0.0 if bias is None else float(bias))


def _with_constants(matrix: Tensor, constant: float = 0.0) -> Tensor:
    """Return a matrix with further columns for the ones behind each input: the first has a value, the others zero."""
    padded = functional.pad(matrix, (0, CONSTANTS))
    padded[:, matrix.shape[1]] = constant
    return padded


def _rounded(width: int) -> int:
    return _WIDTH_MULTIPLE * math.ceil(width / _WIDTH_MULTIPLE)

"""Grafts that share one backbone: each one as the updates that a LoRA adapter adds to a carrier or to the backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graftlm.backbone import Backbone
from graftlm.backbone.modules import linear_sizes
from graftlm.errors import ArtifactError
from graftlm.export.adapters import moved_path
from graftlm.export.carrier import MAX_RANK, Carrier, Piece, adapter_path, pieces_of
from graftlm.export.low_rank import joined, largest_rank, weighted
from graftlm.grafts import ExportedAdapter, ExportsAdapter, ExportsLowRank, Graft, LowRankUpdate


@dataclass(frozen=True)
class SharedGraft:
    """What a graft adds to a shared backbone.

    Attributes:
        name: its name.
        adapter: the adapter that it puts next to each FFN, if it does so.
        updates: the updates of the backbone's modules, by their paths in the backbone.
    """

    name: str
    adapter: ExportedAdapter | None = None
    updates: Mapping[str, LowRankUpdate] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, graft: Graft, backbone: Backbone) -> SharedGraft:
        """Return what a graft adds.

        Args:
            name: its name, for messages.
            graft: the graft, detached.
            backbone: the backbone that it was built for.

        Raises:
            ArtifactError: the graft does something else than to add adapters or updates of low rank.
            WrongBackboneError: it was built for another backbone.
        """
        backbone.check_graft(graft.config.kind, graft._fingerprint)
        if isinstance(graft, ExportsAdapter):
            adapter = graft.exported_adapter(backbone)
            if adapter.form is not None:
                return cls(name, adapter=adapter)
        elif isinstance(graft, ExportsLowRank):
            try:
                return cls(name, updates=checked_updates(graft.low_rank_updates(backbone), backbone))
            except ArtifactError as error:
                raise ArtifactError(f"The graft {name} can't share a backbone. {error}") from None
        raise ArtifactError(
            f"The graft {name} is of the kind {graft.config.kind}, but only gated adapters and LoRA can share a "
            "backbone: serve it with graft serve, or export it alone if graft export can."
        )


def checked_updates(updates: Mapping[str, LowRankUpdate], backbone: Backbone) -> Mapping[str, LowRankUpdate]:
    """Return updates after a check that servers of LoRA can apply them.

    Raises:
        ArtifactError: a module is not linear, or has other sizes than its update.
    """
    for path, update in updates.items():
        try:
            sizes = linear_sizes(backbone.model.get_submodule(path))
        except AttributeError:
            sizes = None
        if sizes != (update.a.shape[1], update.b.shape[0]):
            raise ArtifactError(
                f"It changes {path}, which is not one linear module of the backbone, as the experts of a mixture are "
                "not: export the graft alone (graft export GRAFT --to FOLDER)."
            )
    return updates


def carrier_for(entries: Sequence[Mapping[str, float]], grafts: Mapping[str, SharedGraft]) -> Carrier | None:
    """Return the smallest carrier for some mixtures; None if no graft has adapters.

    Args:
        entries: mixtures: the weight of each graft by name. A graft alone is a mixture, too.
        grafts: the grafts by name.
    """
    pieces = [_pieces(weights, grafts) for weights in entries]
    if not any(pieces):
        return None
    return Carrier.of(pieces)


def updates_of(
    weights: Mapping[str, float],
    grafts: Mapping[str, SharedGraft],
    carrier: Carrier | None,
    backbone: Backbone,
) -> dict[str, LowRankUpdate]:
    """Return the updates of a mixture.

    Args:
        weights: the weight of each graft by name.
        grafts: the grafts by name.
        carrier: the carrier; None for a backbone without blank adapters.
        backbone: the backbone.

    Raises:
        ArtifactError: the carrier has too few blanks, or they are too narrow; or an update has a rank that no server
            takes.
    """
    name = "+".join(weights)
    parts: list[Mapping[str, LowRankUpdate]] = []
    for member, weight in weights.items():
        updates = weighted(grafts[member].updates, weight)
        if carrier is not None:
            updates = {moved_path(path, backbone): update for path, update in updates.items()}
        parts.append(updates)
    pieces = _pieces(weights, grafts)
    if pieces:
        if carrier is None or not carrier.fits(pieces):
            raise ArtifactError(
                f"The adapters of {name} don't fit into the blank adapters of the carrier: export all grafts together, "
                "or restart the server with them."
            )
        parts.append(carrier.filled(pieces, backbone))
    result = joined(parts)
    if not result:
        raise ArtifactError(f"The graft {name} changes no module, but at least one is expected: leave it out.")
    if not all(update.a.isfinite().all() and update.b.isfinite().all() for update in result.values()):
        raise ArtifactError(
            f"The updates of {name} have values that are not finite: give its grafts smaller weights, or train again."
        )
    if largest_rank(result) > MAX_RANK:
        raise ArtifactError(
            f"The updates of {name} have the rank {largest_rank(result)}, but vLLM takes at most {MAX_RANK}: export "
            "the graft alone (graft export GRAFT --to FOLDER), or train it with a lower rank."
        )
    return result


def summed_adapters(grafts: Mapping[str, Graft], backbone: Backbone) -> ExportedAdapter:
    """Return one module that computes the sum of the adapters of several grafts: a carrier that is filled.

    Args:
        grafts: the grafts by name.
        backbone: the backbone.

    Raises:
        ArtifactError: a graft is no adapter with a gate or without.
    """
    pieces: list[Piece] = []
    for name, graft in grafts.items():
        adapter = graft.exported_adapter(backbone) if isinstance(graft, ExportsAdapter) else None
        if adapter is None or adapter.form is None:
            raise ArtifactError(
                f"The stage {name} has a graft of the kind {graft.config.kind}, but only stages of adapters can be "
                "written as one model: use generate, or serve them with graft serve."
            )
        pieces += pieces_of(adapter)
    carrier = Carrier.of([pieces])
    blank = carrier.exported(backbone)
    tensors = [dict(layer) for layer in blank.tensors]
    for path, update in carrier.filled(pieces, backbone).items():
        layer = next(number for number in range(len(tensors)) if path.startswith(f"{adapter_path(number, backbone)}."))
        name = f"{path.removeprefix(f'{adapter_path(layer, backbone)}.')}.weight"
        tensors[layer][name] = (update.b @ update.a).detach().cpu().contiguous()
    return replace(blank, tensors=tensors)


def _pieces(weights: Mapping[str, float], grafts: Mapping[str, SharedGraft]) -> list[Piece]:
    pieces = []
    for name, weight in weights.items():
        adapter = grafts[name].adapter
        if adapter is not None:
            pieces += pieces_of(adapter, weight)
    return pieces

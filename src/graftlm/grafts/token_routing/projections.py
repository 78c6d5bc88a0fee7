"""The projections of a routing: one for each module of the backbone that experts change, with all of its experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafts.exports import LowRankUpdate
from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.expert_sources import placed, read_expert
from graftlm.grafts.token_routing.expert_store import ExpertStore, StoredExpert, StoredProjection
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors
from graftlm.grafts.token_routing.mixture import AdapterLayout, MixedProjection, Projection


def projections_in_memory(
    config: TokenRoutingConfig,
    backbone: Backbone,
    factors: Mapping[str, Mapping[str, Factors]],
) -> dict[str, Projection]:
    """Build the projections of experts that stay in memory.

    Args:
        config: configuration of the routing.
        backbone: the backbone.
        factors: factors by expert and module path.

    Returns:
        The projections by module path, in the order of the backbone's modules.

    Raises:
        RecipeError: factors of different ranks are to be combined with `combination: linear`.
        GraftError: an expert changes a module that is neither linear nor an embedding, or reads relative positions.
    """
    trained = frozenset(number for number, expert in enumerate(config.experts.values()) if expert.is_new)
    projections: dict[str, Projection] = {}
    for path, module in backbone.model.named_modules():
        own: dict[int, Factors] = {}
        for number, name in enumerate(config.experts):
            if path in factors[name]:
                own[number] = placed(factors[name][path], backbone)
        if not own:
            continue
        _check_experts(config, backbone, path, [len(expert.a) for expert in own.values()])
        projections[path] = MixedProjection(
            factors=own,
            target=ExpertTarget.of(module, path),
            combination=config.combination,
            trained=trained,
        )
    return projections


def stored_experts(config: TokenRoutingConfig, backbone: Backbone) -> dict[int, StoredExpert]:
    """Read and check each adapter once, without keeping its factors.

    Returns:
        The adapters by the number of the expert.

    Raises:
        ArtifactError: an adapter is damaged, pickled, not plain LoRA, or has changed since the graft was saved.
        WrongBackboneError: an adapter belongs to another backbone.
    """
    stored = {}
    for number, (name, expert) in enumerate(config.experts.items()):
        if expert.bare:
            continue
        factors, digest = read_expert(name, expert, backbone, is_bundled=False)
        stored[number] = StoredExpert.of(name, expert.model_copy(update={"sha256": digest}), factors)
    return stored


def stored_projections(config: TokenRoutingConfig, backbone: Backbone, store: ExpertStore) -> dict[str, Projection]:
    """Build the projections of experts that are read when a route needs them.

    Args:
        config: configuration of the routing.
        backbone: the backbone.
        store: the experts.

    Returns:
        The projections by module path, in the order of the backbone's modules.

    Raises:
        RecipeError, GraftError: as `projections_in_memory` raises them.
    """
    projections: dict[str, Projection] = {}
    for path, module in backbone.model.named_modules():
        own = {number: expert for number, expert in store.experts.items() if path in expert.ranks}
        if not own:
            continue
        ranks = tuple(expert.ranks[path] for expert in own.values())
        _check_experts(config, backbone, path, ranks)
        scales = tuple(expert.scales[path] for expert in own.values())
        projections[path] = StoredProjection(
            path=path,
            store=store,
            layout=AdapterLayout.of(tuple(own), ranks, scales),
            target=ExpertTarget.of(module, path),
            combination=config.combination,
            device=backbone.device,
        )
    return projections


def _check_experts(config: TokenRoutingConfig, backbone: Backbone, path: str, ranks: Iterable[int]) -> None:
    """Raise an error if the experts of a module can't be combined, or can't be routed there."""
    different = sorted(set(ranks))
    if config.combination == "linear" and len(different) > 1:
        raise RecipeError(
            f"combination is linear, which sums factors of one rank, but at {path} they have the ranks "
            f"{', '.join(str(rank) for rank in different)}: use experts of one rank, or set combination to exact."
        )
    if backbone.sites.reads_positions(path):
        raise GraftError(
            f"An expert changes {path}, but in a {backbone.sites.model_type} model this module also reads relative "
            "positions, which have no route: use experts of other modules, such as the target ffn."
        )


def count_stored(projections: Iterable[tuple[str, Projection]]) -> int:
    """Return the number of parameters of all experts at the projections."""
    return sum(
        sum(projection.layout.ranks) * (projection.target.inputs + projection.target.outputs)
        for _, projection in projections
    )


def low_rank_updates(
    projections: Iterable[tuple[str, Projection]],
    weights: Sequence[float],
) -> dict[str, LowRankUpdate]:
    """Return the updates of the experts, by module path, with the same weights for all texts.

    Args:
        projections: module paths and projections.
        weights: weight of each expert.

    Raises:
        ArtifactError: an expert changes an embedding.
    """
    updates = {}
    for path, projection in projections:
        if projection.target.is_embedding:
            raise ArtifactError(
                f"An expert changes the embedding {path}, but updates of linear modules are expected: export the "
                "graft alone (graft export GRAFT --to FOLDER)."
            )
        update = projection.low_rank_update(weights)
        if update is not None:
            updates[path] = update
    return updates

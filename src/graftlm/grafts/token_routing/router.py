"""The tensors that routes are computed from: centroids, whitening, and a probe of the embedder.

Shape suffixes: E experts, M centroids, d embedding width, K directions that the examples span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graftlm.errors import ArtifactError, GraftError
from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.policy import cluster, fit_whitener

ROUTER_TENSORS = ("centroids", "probe", "whitener", "variance", "owners")
"""Names of the tensors: centroids (M, d), probe (d,), whitener (K, d), variance (), and the centroids' experts (M,)."""


def needed_tensors(config: TokenRoutingConfig) -> list[str]:
    """Return which of `ROUTER_TENSORS` the routes of a config need."""
    names = ["centroids", "probe"]
    if config.whitens:
        names.append("whitener")
    if config.policy == "discriminant":
        names.append("variance")
    if config.embedder.centroids != 1:
        names.append("owners")
    return names


def fit_router(config: TokenRoutingConfig, groups: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute centroids and whitening.

    Args:
        config: configuration of the routing.
        groups: embeddings (n, d) of the examples of each expert, in the order of the config; n is at least 1.

    Returns:
        All of `ROUTER_TENSORS` by name except the probe. The whitener has no rows if vectors are not whitened.

    Raises:
        GraftError: an expert has a single example although the policy is `discriminant`, or the examples of each
            expert are equal although they are to be whitened.
    """
    whitener_Kd, variance = _fit_whitening(config, groups)
    clusters = [cluster(group, config.embedder.centroids) for group in groups]
    owners: list[int] = []
    for number, own_centroids in enumerate(clusters):
        owners += [number] * len(own_centroids)
    return {
        "centroids": torch.cat(clusters),
        "owners": torch.tensor(owners),
        "whitener": whitener_Kd,
        "variance": variance,
    }


def _fit_whitening(config: TokenRoutingConfig, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return V (K, d) and the number a t; V has no rows, so that it changes no vector, if vectors are not whitened."""
    if config.policy == "discriminant":
        for name, group in zip(config.experts, groups, strict=True):
            if len(group) < 2:
                raise GraftError(
                    f"The expert {name} has one example, but the policy discriminant needs several examples of each "
                    "expert: give it more, or set policy to softmax."
                )
    largest = max(len(group) for group in groups)
    is_impossible = config.embedder.whiten is None and largest < 2
    if not config.whitens or is_impossible:
        no_rows = groups[0].new_zeros(0, groups[0].shape[1])
        return no_rows, groups[0].new_ones(())
    return fit_whitener(groups)


def centre_of(config: TokenRoutingConfig, centroids_Md: Tensor, owners_M: Tensor) -> Tensor:
    """Compute the vector that is subtracted from all vectors before they are compared.

    Args:
        config: configuration of the routing.
        centroids_Md: the centroids.
        owners_M: number of the expert of each centroid.

    Returns:
        (d,) the mean over the experts of the means of their centroids; zero if the config does not centre vectors.
    """
    embedder = config.embedder
    experts = len(config.experts)
    is_centred = embedder.name == "backbone" if embedder.centre is None else embedder.centre
    if not is_centred or experts < 2:
        return torch.zeros_like(centroids_Md[0])
    if embedder.centroids == 1:
        return centroids_Md.mean(0)
    is_own_EM = nn.functional.one_hot(owners_M, experts).T.to(centroids_Md.dtype)
    means_Ed = is_own_EM @ centroids_Md / is_own_EM.sum(1, keepdim=True)
    return means_Ed.mean(0)


def direction_problem(config: TokenRoutingConfig, centroids_Md: Tensor, owners_M: Tensor) -> str:
    """Return why a centroid equals the centre, so that no vector is similar to it; empty if none does.

    Args:
        config: configuration of the routing.
        centroids_Md: the centroids, of which there may be none.
        owners_M: number of the expert of each centroid.
    """
    if not len(centroids_Md):
        return ""
    names = list(config.experts)
    norms = (centroids_Md - centre_of(config, centroids_Md, owners_M)).norm(dim=-1)
    for number, norm in zip(owners_M.tolist(), norms.tolist(), strict=True):
        if not norm > 1e-6:
            return (
                f"A centroid of the expert {names[number]} has no direction (its norm is {norm:.1g}), so no text can "
                "be similar to it: give the expert examples that are not empty and differ from those of the other "
                "experts."
            )
    return ""


def check_router(config: TokenRoutingConfig, router: Mapping[str, Tensor]) -> None:
    """Check that saved tensors belong to a config.

    Args:
        config: configuration of the routing.
        router: saved tensors by name.

    Raises:
        ArtifactError: tensors are missing or not needed, the centroids do not fit the experts, or other tensors do
            not fit the centroids.
    """
    problem = _problem(config, router)
    if problem:
        raise ArtifactError(
            f"The graft's tensor file {problem}: the file is damaged or belongs to another config; copy or build the "
            "graft again."
        )


def _problem(config: TokenRoutingConfig, router: Mapping[str, Tensor]) -> str:
    """Return why saved tensors do not belong to a config, as the end of a sentence; an empty string if they do."""
    needed = needed_tensors(config)
    if router.keys() != set(needed):
        found = ", ".join(router) or "none"
        return f"should have the routing tensors {', '.join(needed)}, but has {found}"
    experts = range(len(config.experts))
    centroids = router["centroids"]
    if len(centroids) == 0:  # no centroids are needed where the weights are fixed
        return ""
    owners = router.get("owners", torch.arange(len(experts)))
    if len(centroids) != len(owners) or set(owners.tolist()) != set(experts):
        return f"has a number of centroids ({len(centroids)}) that does not fit the experts of the config"
    widths = {router[name].shape[-1] for name in ("centroids", "probe", "whitener") if name in router}
    if len(widths) != 1:
        return f"has routing tensors of the widths {', '.join(str(width) for width in sorted(widths))}"
    return ""

"""Pairs of layers: a layer of an augmenting model, and the layer of the anchor after which it is read."""

from __future__ import annotations

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafts.composition.config import CompositionConfig, Pair


def resolve_pairs(
    config: CompositionConfig,
    name: str,
    augmenting: Backbone,
    anchor: Backbone,
) -> list[Pair]:
    """Return the pairs of an augmenting model: those that its config lists, or those that result from the stride.

    Args:
        config: configuration of the composition.
        name: name of the augmenting model in the config.
        augmenting: the augmenting model.
        anchor: the backbone of the composition.

    Returns:
        Pairs (augmenting layer, anchor layer), counted from 0.

    Raises:
        GraftError: a model does not have the listed layers, a pair is listed more than once, or the stride gives no
            pair, or more pairs than the anchor has layers.
    """
    pairs = config.augmenting[name].pairs
    if not pairs:
        pairs = pairs_of(config, name, augmenting, anchor)
    _check_pairs(name, pairs, augmenting, anchor)
    return pairs


def pairs_of(
    config: CompositionConfig,
    name: str,
    augmenting: Backbone,
    anchor: Backbone,
) -> list[Pair]:
    """Pair every `stride`-th layer of the augmenting model with evenly spaced layers of the anchor.

    The last layers of both models are a pair.

    Args:
        config: configuration of the composition.
        name: name of the augmenting model in the config.
        augmenting: the augmenting model.
        anchor: the backbone of the composition.

    Returns:
        Pairs (augmenting layer, anchor layer), counted from 0.

    Raises:
        GraftError: the stride gives no pair, or more pairs than the anchor has layers.
    """
    stride = config.augmenting[name].stride or config.stride
    n_A = augmenting.sites.n_layers
    n_B = anchor.sites.n_layers
    count = n_A // stride
    if count == 0:
        raise GraftError(
            f"A stride of {stride} skips every layer of {name} (number of layers: {n_A}): set stride to {n_A} or less, "
            "or list pairs."
        )
    if count > n_B:
        smallest_stride = -(-n_A // n_B)
        raise GraftError(
            f"A stride of {stride} gives {count} pairs with layers of {name}, but at most {n_B} is possible, the "
            f"number of layers of the anchor: set stride to {smallest_stride} or more, or list pairs."
        )
    pairs = []
    for k in range(count):
        following = count - 1 - k  # number of pairs after this one
        layer_A = n_A - 1 - stride * following
        layer_B = (k + 1) * n_B // count - 1
        pairs.append((layer_A, layer_B))
    return pairs


def _check_pairs(name: str, pairs: list[Pair], augmenting: Backbone, anchor: Backbone) -> None:
    for pair in pairs:
        layer_A, layer_B = pair
        _check_layer(name, pair, layer_A, owner=name, count=augmenting.sites.n_layers)
        _check_layer(name, pair, layer_B, owner="the anchor", count=anchor.sites.n_layers)
    for pair in pairs:
        if pairs.count(pair) > 1:
            raise GraftError(f"The pair {list(pair)} of {name} is listed more than once: list each pair once.")


def _check_layer(name: str, pair: Pair, layer: int, *, owner: str, count: int) -> None:
    if not 0 <= layer < count:
        raise GraftError(
            f"The pair {list(pair)} of {name} names layer {layer} of {owner}, which has layers 0 to {count - 1}: name "
            "existing layers in pairs, that of the augmenting model first."
        )


def check_heads(heads: int, width: int, *, even: bool) -> None:
    """Check that a number of heads divides the anchor's width.

    Args:
        heads: number of heads of the cross-attentions.
        width: width of the anchor.
        even: whether the width of a head must be even, which rotary positions require.

    Raises:
        GraftError: the width can't be split into that many heads; the message names numbers that are possible, if any.
    """
    step = 2 if even else 1
    if width % (heads * step) == 0:
        return
    candidates = range(1, 2 * heads + 1)
    fitting = [n for n in candidates if width % (n * step) == 0]
    if not fitting:
        raise GraftError(
            f"The anchor's width {width} is odd, but rotary positions need heads of even width: set positions to none."
        )
    nearest = ", ".join(str(n) for n in fitting[-4:])
    parts = "equal parts of even width" if even else "equal parts"
    raise GraftError(
        f"heads is {heads}, but the anchor's width {width} can't be split into that many {parts}: set heads to one of "
        f"{nearest}."
    )

"""Training each new expert on its own named set of new text."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.grafts.token_routing.config import TokenRoutingConfig


def experts_of_sets(config: TokenRoutingConfig, sets: Sequence[str]) -> list[int]:
    """Return the number of the expert that each set trains; empty if the nearest centroid of a document decides.

    Args:
        config: configuration of the routing.
        sets: names of the sets of new text.

    Raises:
        RecipeError: the sets and the experts don't belong together.
    """
    set_of = config.set_of_parts(sets)
    if not set_of:
        return []
    expert_of = {own: name for name, own in set_of.items()}
    names = list(config.experts)
    return [names.index(expert_of[own]) for own in sets]


def notes_on_training(config: TokenRoutingConfig, sets: Sequence[str]) -> list[str]:
    """Return what the user should know about which expert trains on what, as sentences; the arguments are the same."""
    set_of = config.set_of_parts(sets)
    if set_of:
        pairs = ", ".join(f"{name} on {own}" for name, own in set_of.items())
        return [f"Each new expert trains on its own set of data.new: {pairs}."]
    new = [name for name, expert in config.experts.items() if expert.is_new]
    if len(config.experts) > 1 and new:
        return [
            f"Each training document trains the expert of the nearest centroid, so that {', '.join(new)} may train on "
            "text of other experts; name the set of data.new that each trains on (set) to avoid that."
        ]
    return []

"""Grafts that get the trainable parameters of another one: `capacity: match` in the methods of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Self, cast

from pydantic import BeforeValidator, SerializeAsAny, model_serializer

from graftlm.backbone import Backbone
from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.evaluation.cost import count_parameters
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import GraftConfig, HasSizes, graft_class, graft_config

CAPACITY = "capacity"
MATCH = "match"


class MatchedGraft(Config):
    """A graft whose size is to be chosen. In a recipe it is the graft's section with `capacity: match`.

    Args:
        graft: the graft's config, whose size does not count.
    """

    graft: SerializeAsAny[GraftConfig]

    @classmethod
    def of(cls, section: Mapping[str, object]) -> Self:
        """Return the graft of a section with `capacity: match`.

        Args:
            section: the section, with its kind.

        Raises:
            RecipeError: grafts of this kind have no size, the section sets the size as well, or a value does not fit.
            GraftError: the registered class of the kind can't be imported.
        """
        values = {key: value for key, value in section.items() if key != CAPACITY}
        size_keys = _size_keys(str(values.get("kind", "")))
        for key in size_keys:
            if values.get(key) is not None:
                raise RecipeError(f"graft: capacity is match, but {key} sets the size, too: leave one of them out.")
        return cls(graft=graft_config({**values, **size_keys}))

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the section of a recipe."""
        values = cast("dict[str, object]", serialize(self)["graft"])
        for key in _size_keys(self.graft.kind):
            values.pop(key, None)
        return values | {CAPACITY: MATCH}

    def resolved(self, aim: int, backbone: Backbone) -> tuple[GraftConfig, MatchedSize]:
        """Return the config with the size whose number of trainable parameters is nearest to an aim.

        Args:
            aim: the number of trainable parameters.
            backbone: the backbone, which does not change.

        Raises:
            GraftError: the graft does not fit the backbone, or its size can't be chosen with this config.
        """
        sized = cast("type[HasSizes]", self.graft.graft_class)
        sizes = sized.sizes(self.graft, backbone)
        value = sizes.nearest(aim)
        found = MatchedSize(key=sizes.key, value=value, parameters=sizes.parameters(value), aim=aim)
        return sizes.config(value), found


class MatchedSize(Config):
    """The size that was chosen for a graft.

    Args:
        key: the key that sets the size, such as rank.
        value: its value.
        parameters: the number of trainable parameters with it.
        aim: the number that it should be nearest to.
    """

    key: str
    value: int
    parameters: int
    aim: int


def _size_keys(kind: str) -> Mapping[str, int]:
    """Return the keys that set the size of a kind of graft; raise `RecipeError` if it has no size."""
    found = graft_class(kind)
    if not issubclass(found, HasSizes):
        raise RecipeError(
            f"graft: capacity is match, but a graft of the kind {kind} has no size that can be chosen: leave capacity "
            "out, or choose another kind."
        )
    return found.size_keys


def _parse(section: object) -> object:
    """Return the graft of a section, or the graft itself."""
    if isinstance(section, GraftConfig | MatchedGraft):
        return section
    if isinstance(section, dict) and section.get(CAPACITY) == MATCH and isinstance(section.get("kind"), str):
        return MatchedGraft.of(section)
    return graft_config(section)  # type: ignore[arg-type]  # it refuses what is not a section


MethodGraft = Annotated[SerializeAsAny[GraftConfig | MatchedGraft], BeforeValidator(_parse)]
"""The graft of a method: of any kind, or with `capacity: match`."""


def trained_parameters(config: GraftConfig, backbone: Backbone) -> int:
    """Return the number of parameters of a graft that train, counted in an untrained one on the backbone.

    Args:
        config: the graft's config.
        backbone: the backbone, without grafts.

    Raises:
        GraftError: the graft does not fit the backbone.
    """
    graft = config.graft_class(config, backbone)
    with GraftedModel(backbone, {"graft": graft}) as model:
        return count_parameters(model.trainable_parameters().values())

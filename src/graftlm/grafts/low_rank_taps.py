"""LoRA by taps: updates of low rank that are added to the outputs of the backbone's modules, which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import ArtifactError
from graftlm.grafts.base import Graft, ReplacesModel
from graftlm.grafts.exports import ExportsLowRank, LowRankUpdate


class LowRankTaps(Graft):
    """The updates B A x of another graft. Unlike the modules of PEFT, they can be attached together with others.

    Args:
        graft: the other graft, detached.
        backbone: the backbone that it was built for.

    Raises:
        ArtifactError: the other graft has another effect than such updates.
    """

    takes_weight = True

    def __init__(self, graft: Graft, backbone: Backbone) -> None:
        super().__init__()
        assert isinstance(graft, ExportsLowRank), "only these grafts have updates of low rank"
        self.config = graft.config
        self._fingerprint = graft._fingerprint
        updates: Mapping[str, LowRankUpdate] = graft.low_rank_updates(backbone)
        self._paths = list(updates)
        self.a = nn.ParameterList(update.a for update in updates.values()).to(backbone.device)
        self.b = nn.ParameterList(update.b for update in updates.values()).to(backbone.device)
        self.requires_grad_(False)

    @classmethod
    def of(cls, graft: Graft, backbone: Backbone) -> LowRankTaps | None:
        """Return the updates of a graft that changes the backbone's modules; None if it has another effect.

        Args:
            graft: the graft, detached.
            backbone: the backbone that it was built for.
        """
        if not (isinstance(graft, ReplacesModel) and isinstance(graft, ExportsLowRank)):
            return None
        try:
            return cls(graft, backbone).eval()
        except ArtifactError:
            return None

    @property
    def decodes_in_one_graph(self) -> bool:
        return True

    def taps(self) -> list[Tap]:
        return [
            Tap(
                site=Site("module", path=path),
                when="after",
                act="add",
                function=partial(self._add, number),
                takes_selection=True,
            )
            for number, path in enumerate(self._paths)
        ]

    def _add(self, number: int, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return B A x of one module, in the dtype of its outputs."""
        factor = self.a[number]
        updated = functional.linear(functional.linear(inputs.to(factor.dtype), factor), self.b[number])
        return updated.to(outputs.dtype)

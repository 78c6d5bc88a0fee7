"""Mix-ins of grafts that can be exported.

Shared code checks for them with `isinstance`, as for those of `graftlm.grafts.base`:

    Exportable       can be merged into the backbone's architecture
    ExportsAdapter   can be exported as a module in parallel to each FFN
    ExportsLowRank   can be exported as LoRA factors of the backbone's modules
    ChoosesByPrompt  acts as one of several LoRA adapters, which the prompt determines
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from graftlm.backbone import Backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Exportable(ABC):
    """A graft whose effect can be merged into the weights of the backbone's own architecture."""

    @abstractmethod
    def merged(self, backbone: Backbone) -> PreTrainedModel:
        """Return a new model of the backbone's class that has the logits of the grafted model up to rounding.

        The graft must be detached. The new model is in evaluation mode, and shares no weights with the backbone.

        Args:
            backbone: the backbone, which does not change.

        Raises:
            ArtifactError: the graft can't be merged.
        """


@dataclass(frozen=True)
class AdapterForm:
    """A function of an FFN's input x that several kinds of adapters have in common.

        gate(w . x + b) W_o (act(W_g x) * W_i x)

    The tensors are named `gate.weight` (w), `gate.bias` (b, or absent), `w_g.weight`, `w_i.weight` and `w_o.weight`.
    Without `w_g.weight` the function is gate(w . x + b) W_o act(W_i x).

    Attributes:
        activation: the name of `act` in transformers' ACT2FN.
        gate: the name of `gate` in ACT2FN; empty for an adapter without a gate.
    """

    activation: str
    gate: str


@dataclass(frozen=True)
class ExportedAdapter:
    """A module in parallel to each FFN of an exported model.

    adapter(x) is added to the output of the FFN that reads x, or to that of the norm which follows the FFN.

    Attributes:
        source: the code of `class Adapter(nn.Module)`, which is built from a config with `adapter_width`. The names nn
            and ACT2FN are imported.
        width: the value of `adapter_width`.
        tensors: the `state_dict` of the module in each layer, in the order of the layers.
        parallel: how tensor parallelism splits the Linears: `colwise` or `rowwise`, by the name of the Linear.
        form: the function that the tensors compute; None if it is not one of the `AdapterForm`s.
    """

    source: str
    width: int
    tensors: Sequence[Mapping[str, Tensor]]
    parallel: Mapping[str, str] = field(default_factory=dict)
    form: AdapterForm | None = None


class ExportsAdapter(ABC):
    """A graft whose effect is a function of each FFN's input that is added where the FFN's output is."""

    @abstractmethod
    def exported_adapter(self, backbone: Backbone) -> ExportedAdapter:
        """Return the modules that are parallel to the FFNs of an exported model.

        The graft must be detached.

        Args:
            backbone: the backbone that the graft was built for.
        """


@dataclass(frozen=True)
class LowRankUpdate:
    """The factors of an update B A x of the output W x of a linear module.

    Attributes:
        a: A, (rank, inputs).
        b: B, (outputs, rank).
    """

    a: Tensor
    b: Tensor


class ExportsLowRank(ABC):
    """A graft whose effect is an update of low rank of linear modules of the backbone, the same for all tokens."""

    @abstractmethod
    def low_rank_updates(self, backbone: Backbone) -> dict[str, LowRankUpdate]:
        """Return the update of each module, by the path of the module in the backbone's model.

        The graft must be detached.

        Args:
            backbone: the backbone that the graft was built for.

        Raises:
            ArtifactError: with its config, the graft has another effect.
        """


class ChoosesByPrompt(ABC):
    """A graft that may act, for each prompt, as one of several updates of low rank, or not at all."""

    @property
    @abstractmethod
    def is_fixed(self) -> bool:
        """Whether it acts in the same way on all prompts, so that there is no choice."""

    @abstractmethod
    def choices(self, backbone: Backbone) -> dict[str, dict[str, LowRankUpdate]]:
        """Return the updates by the name of the choice, each as `ExportsLowRank.low_rank_updates` returns them.

        The graft must be detached.

        Args:
            backbone: the backbone that the graft was built for.

        Raises:
            ArtifactError: with its config, the graft acts in other ways as well, or needs the backbone for its choice.
        """

    @abstractmethod
    def choose(self, prompt: Sequence[int]) -> str | None:
        """Return the name of the choice for a prompt; None if the bare backbone answers it.

        Args:
            prompt: the token ids of the prompt, at least one.
        """

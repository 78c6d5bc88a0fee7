"""The contract of every graft: what it adds to a frozen backbone, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Tap
from graftlm.config import Config
from graftlm.errors import ArtifactError
from graftlm.grafts.heads import TaskSpec


class GraftConfig(Config):
    """The base of a graft's config; `kind` names its room in the registry."""

    kind: str
    needs_tasks: ClassVar[bool] = False
    """Whether it is built for tasks, which a run's rows tell."""


@dataclass(frozen=True)
class Trace:
    """What a graft did at each token of a generation.

    Attributes:
        labels: what is told of each token, such as the names of experts.
        values: (B, S, labels), for every token that the model has read.
    """

    labels: list[str]
    values: Tensor


class Graft(nn.Module):
    """Trainable capacity attached to a frozen backbone; owns only its own parameters.

    A room overrides `taps`, and what else it needs of: `prepare`, `auxiliary_loss`, `observe`, `describe`. Constructing
    a graft touches nothing of the backbone.
    """

    Config: ClassVar[type[GraftConfig]]
    label: ClassVar[str] = ""
    """What tables and plots call it."""
    config: GraftConfig

    def taps(self) -> list[Tap]:
        """Where the graft reads and writes."""
        return []

    def prepare(self, call: Call) -> None:
        """Runs before each forward pass: run an augmenting model, compute routes."""

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """What the graft adds to the language-modelling loss of this pass, already weighted; None for nothing.

        Means are taken over `call.totals`, so that losses of micro-batches and ranks add up.
        """
        return None

    def observe(self, call: Call) -> dict[str, Tensor]:
        """What this pass showed, as means over its tokens, one value a layer."""
        return {}

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """What the parameters show beside the backbone's, without any text; plain numbers and lists."""
        return {}

    def augmenting(self) -> Mapping[str, Backbone]:
        """The other frozen models that this graft reads, by name; an artefact remembers what they were."""
        return {}

    def sources(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Texts that the graft learns from without gradients, by a name of its own: sources as a recipe's data has."""
        return {}

    def fit(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Learn from the texts of `sources`, before training."""

    def trace(self, cache: Cache) -> Trace | None:
        """What the graft did at each token of a generation, from what it left in the cache."""
        return None

    def traced(self, call: Call) -> Trace | None:
        """What the graft did at each token of a pass, values (B, T, labels); by default, as its cache tells."""
        found = None if call.cache is None else self.trace(call.cache)
        if found is None or call.input_ids is None:
            return None
        return Trace(found.labels, found.values[:, -call.input_ids.shape[1] :])

    def tasks(self) -> dict[str, TaskSpec]:
        """What the graft predicts by heads of its own; a row's task, `extras["task"]` (B,), is an index into this."""
        return {}

    def predict(self, call: Call, hidden: Tensor) -> list[Tensor] | None:
        """Each row's prediction from the last hidden states (B, T, d), see `grafts.heads`; None without heads."""
        return None

    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor | None:
        """The loss of the predictions: the sum over rows by `call.totals[0]`, or else their mean; None without heads.

        Args:
            call: the pass.
            hidden: (B, T, d), the last hidden states.
            targets: one a row, see `grafts.heads`.
        """
        return None

    def start_tasks(self, model: Any, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Give tasks that the graft has just got a start, before training; gives what was chosen, as plain values.

        Args:
            model: the `GraftedModel` that carries this graft.
            rows: some rows of each task, as `GraftedModel.forward` takes them, with `targets`.
        """
        return {}

    def still(self) -> Iterable[nn.Module]:
        """Modules of the model that `attach` gave which stay in evaluation mode while it trains."""
        return ()

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model to run with this graft: the backbone itself, but for baselines that need their own."""
        return model

    def detach(self, model: PreTrainedModel) -> None:
        """Undo `attach`."""

    def taps_alone(self) -> bool:
        """Whether the graft acts through its taps alone, so that others may act on other rows of a batch."""
        return type(self).attach is Graft.attach

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that this graft trains, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """The graft's own tensors, as an artefact keeps them."""
        return dict(self.state_dict())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave.

        Raises:
            ArtifactError: names or shapes differ.
        """
        own = self.tensors()
        check_tensors(own, tensors)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[name])


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise `ArtifactError` unless both have the same names and shapes."""
    missing, foreign = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which this graft does not know"
        raise ArtifactError(
            f"The graft's tensor file {what} ({len(missing)} missing, {len(foreign)} foreign): it is damaged or of "
            "another config; train or copy the graft again."
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ArtifactError(
                f"The tensor {name} has the shape {tuple(found[name].shape)}, but {tuple(tensor.shape)} is expected: "
                "the graft's files do not belong together; train or copy the graft again."
            )


def working_dtype(graft: Graft, call: Call) -> torch.dtype:
    """What a graft computes in: its weights' dtype, or autocast's.

    Inputs are cast to it once, rather than by each Linear under autocast.
    """
    key = (graft, "dtype")
    if key not in call.scratch:
        weight = next(graft.parameters())
        autocast = torch.is_autocast_enabled(weight.device.type)
        call.scratch[key] = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
    return call.scratch[key]

"""The contract of a graft.

A method subclasses `Graft`. What only some methods do is a mix-in beside it, which shared code asks for by
`isinstance`: `HasHeads`, `FitsOnText`, `ReadsModels`, `Traceable`, `ReplacesModel`, `Exportable`, `ExportsAdapter`,
`HasTensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Fingerprint, Sites, Tap
from graftlm.config import Config
from graftlm.errors import ArtifactError, RecipeError
from graftlm.grafts.heads import TaskSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GraftConfig(Config):
    """The base of a graft's config.

    Attributes:
        kind: the name of the method in recipes and in the registry.
        needs_tasks: whether the graft is built for labelled tasks, which a run adds to the config.
        saved_keys: keys that a saved config must have; without them its tensors were written for another computation.
        graft_class: the class that the config builds; set by `Graft.__init_subclass__`.
        label: the method's name in tables and plots; set with it, unless the config has one of its own.
    """

    kind: str
    needs_tasks: ClassVar[bool] = False
    saved_keys: ClassVar[frozenset[str]] = frozenset()
    graft_class: ClassVar[type[Graft]]
    label: ClassVar[str]

    def check_saved(self, values: Mapping[str, Any]) -> Self:
        """The config that was saved as `values`, from which this one was read; RecipeError if it lacks a saved key."""
        if missing := sorted(self.saved_keys - values.keys()):
            raise RecipeError(
                f"a graft of the kind {self.kind} has the key {missing[0]} in its config; this one was saved before "
                "there was one, and would predict something else: train it again."
            )
        return self

    def check_rows(self, length: int) -> None:
        """Raise RecipeError if training rows of `length` tokens, each read by itself, are too short to learn from."""

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the graft, as configured, has an auxiliary loss."""
        return self.graft_class.auxiliary_loss is not Graft.auxiliary_loss


class Graft(nn.Module):
    """Trainable capacity attached to a frozen backbone; owns only its own parameters.

    A subclass defines `Config` and `__init__(self, config, backbone)`, which keeps `config` and builds the parameters.
    Construction reads the backbone's shapes and changes nothing of it. All methods below have defaults.

    Attributes:
        label: the method's name in tables and plots; by default the kind.
        served_in_bfloat16: whether a server casts it on a bfloat16 backbone, which halves the reading of its weights.
    """

    Config: ClassVar[type[GraftConfig]]
    label: ClassVar[str] = ""
    served_in_bfloat16: ClassVar[bool] = False
    config: GraftConfig
    _fingerprint: Fingerprint | None = None  # of the backbone that `build_graft` had

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config.graft_class = cls
            if "label" not in vars(cls.Config):
                cls.Config.label = cls.label or cls.Config.model_fields["kind"].default

    def taps(self) -> list[Tap]:
        """The places where the graft reads and writes activations."""
        return []

    def prepare(self, call: Call) -> None:
        """Run before each forward pass, for example to compute routes or to run another model."""

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """The weighted loss that the graft adds to the training loss of this pass, a scalar; None adds nothing.

        A mean divides by `call.totals`, so that the losses of micro-batches and processes add up.
        """
        return None

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Statistics of this pass, as means over its tokens: name -> (layers,)."""
        return {}

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """Statistics of the parameters, without any text: plain numbers and lists."""
        return {}


class HasHeads(ABC):
    """A graft that predicts the labels of tasks, see `grafts.heads`."""

    @abstractmethod
    def tasks(self) -> dict[str, TaskSpec]:
        """The tasks by name, in order. `extras["task"]` (B,) holds each row's index into them."""

    @abstractmethod
    def predict(self, call: Call, hidden: Tensor) -> list[Tensor]:
        """The prediction of each row from the last hidden states (B, T, d)."""

    @abstractmethod
    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor:
        """The loss of the predictions: the sum over rows divided by `call.totals[0]`, or the mean without totals."""

    def start_tasks(self, model: Any, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Choose the initial values of tasks that were added to a trained graft; returns the choices as plain values.

        `model` is the `GraftedModel`; `rows` has some rows of each task, as its `forward` takes them, with `targets`.
        """
        return {}


class FitsOnText(ABC):
    """A graft that learns from texts without gradients, before training."""

    @abstractmethod
    def sources(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The sources of the texts by a name of the graft's own, in the form of a recipe's data."""

    @abstractmethod
    def fit(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Learn from the texts of `sources`."""


class ReadsModels(ABC):
    """A graft that reads the activations of other frozen models."""

    @abstractmethod
    def frozen_models(self) -> Mapping[str, Backbone]:
        """The other models by name. An artefact stores their fingerprints."""


@dataclass(frozen=True)
class Trace:
    """What a graft did at each token: values (B, tokens, labels), whose labels may be the names of experts."""

    labels: list[str]
    values: Tensor


class Traceable:
    """A graft that tells what it did at each token, from the cache or from a forward pass."""

    def cache_trace(self, cache: Cache) -> Trace | None:
        """The trace of all tokens that `cache` holds; None where the cache keeps none."""
        return None

    def forward_trace(self, call: Call) -> Trace | None:
        """The trace of the tokens of one pass, values (B, T, labels); by default the last T of `cache_trace`."""
        trace = None if call.cache is None else self.cache_trace(call.cache)
        if trace is None or call.input_ids is None:
            return None
        return Trace(trace.labels, trace.values[:, -call.input_ids.shape[1] :])


class ReplacesModel(ABC):
    """A graft that taps alone can't express: it runs a copy of the backbone, or adds modules to it."""

    @abstractmethod
    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model to run instead of `model`."""

    @abstractmethod
    def detach(self, model: PreTrainedModel) -> None:
        """Undo `attach`; the graft keeps its tensors."""

    def sites(self, model: PreTrainedModel) -> Sites:
        """Where taps find the backbone's parts in the model from `attach`."""
        return Sites(model)

    def eval_only_modules(self) -> Iterable[nn.Module]:
        """Modules of the model from `attach` that stay in evaluation mode during training."""
        return ()

    def changes_all_rows(self) -> bool:
        """Whether the graft, as configured, acts on every row of a batch, so that it can't share a batch."""
        return True


class Exportable(ABC):
    """A graft whose effect fits into the weights of the backbone's own architecture."""

    @abstractmethod
    def merged(self, backbone: Backbone) -> PreTrainedModel:
        """A new model of the backbone's class with the same logits as the grafted one; the graft is detached.

        It is in evaluation mode and shares no weights with the backbone.
        """


class ReadsPeft(ABC):
    """A graft that takes PEFT adapters as they are."""

    @classmethod
    @abstractmethod
    def adapter_section(cls, name: str, folder: Path) -> dict[str, Any]:
        """A recipe's `graft` section with the adapter of a folder; no backbone is loaded.

        Raises ArtifactError if the graft can't take the adapter; the message says what to do instead.
        """


@dataclass(frozen=True)
class ExportedAdapter:
    """A module that an exported model has beside each FFN: adapter(x) is added to the output of the FFN that reads x.

    `source` is the code of `class Adapter(nn.Module)`, built from a config with `adapter_width`; nn and ACT2FN are
    imported. `tensors` has the state of each layer's. `parallel` says how its Linears are split: colwise or rowwise.
    """

    source: str
    width: int
    tensors: Sequence[Mapping[str, Tensor]]
    parallel: Mapping[str, str] = field(default_factory=dict)


class ExportsAdapter(ABC):
    """A graft whose effect is a function of each FFN's input that is added to the FFN's output."""

    @abstractmethod
    def exported_adapter(self, backbone: Backbone) -> ExportedAdapter:
        """The modules that stand beside the FFNs of an exported model; the graft is detached."""


class HasTensors(ABC):
    """A graft whose artefact holds other tensors than its `state_dict`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that an artefact holds, by name."""

    @abstractmethod
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over tensors of the form that `tensors` returns. Raises ArtifactError if names or shapes differ."""


def check_tensors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Raise `ArtifactError` unless both have the same names and shapes."""
    missing, foreign = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or foreign:
        problem = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which this graft does not know"
        raise ArtifactError(
            f"The graft's tensor file {problem} ({len(missing)} missing, {len(foreign)} foreign): it is damaged or of "
            "another config; train or copy the graft again."
        )
    for name, tensor in expected.items():
        if tensor.shape != actual[name].shape:
            raise ArtifactError(
                f"The tensor {name} has the shape {tuple(actual[name].shape)}, but {tuple(tensor.shape)} is expected: "
                "the graft's files do not belong together; train or copy the graft again."
            )

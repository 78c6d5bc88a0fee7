"""The contract of a graft.

A method subclasses `Graft`. Abilities that only some methods have are mix-ins, for which shared code checks with
`isinstance`:

    HasHeads         predicts the labels of tasks
    FitsOnText       learns from texts before training
    TrainsOnSets     trains a part of itself on each named set of new text
    ReadsModels      reads the activations of other frozen models
    Traceable        records a value per token
    ReplacesModel    runs a changed or copied model
    ReadsPeft        accepts PEFT adapters without conversion
    HasTensors       saves tensors that differ from its `state_dict`
    ChangesAtEnd     changes its weights once, after training

Those of other modules:

    HasSizes         has a size that can be chosen by a number of parameters (`graftlm.grafts.sizes`)
    Exportable, ExportsAdapter, ExportsLowRank, ChoosesByPrompt    can be exported (`graftlm.grafts.exports`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Fingerprint, Sites, Tap, TokenRows
from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafts.heads import TaskSpec
from graftlm.grafts.presets import PresetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_NAME = "added_tokens"
"""Name of the submodule of a graft that has the rows of added tokens."""


class GraftConfig(PresetConfig):
    """The base class of a graft's config.

    Attributes:
        kind: the name of the method in recipes and in the registry; a subclass gives it one value, which is its
            default.
        needs_tasks: whether the graft is built for labeled tasks, which a run adds to the config.
        saved_keys: keys that a saved config must have; the tensors of a config without them were trained with another
            computation.
        graft_class: the class that is built from the config; set by `Graft.__init_subclass__`.
        label: the method's name in tables and plots; set by `Graft.__init_subclass__` unless the config defines it.
    """

    kind: str
    needs_tasks: ClassVar[bool] = False
    saved_keys: ClassVar[frozenset[str]] = frozenset()
    graft_class: ClassVar[type[Graft]]
    label: ClassVar[str]

    @property
    def changes_at_end(self) -> bool:
        """Whether the graft's `finish` changes its weights; see `ChangesAtEnd`."""
        return False

    def check_saved(self, values: Mapping[str, object]) -> Self:
        """Return the config to use for a graft whose config was saved.

        Args:
            values: the saved values, from which this config was parsed.

        Raises:
            RecipeError: one of `saved_keys` is missing.
        """
        missing = sorted(self.saved_keys - values.keys())
        if missing:
            raise RecipeError(
                f"The saved config of a graft of the kind {self.kind} has no key {missing[0]}: it was written by an "
                "older version, whose grafts would predict something else now. Train the graft again."
            )
        return self

    def set_of_parts(self, sets: Sequence[str]) -> dict[str, str]:
        """Return the named set of new text on which each part of the graft trains alone, by the name of the part.

        By default there are no such parts.

        Args:
            sets: names of the sets of new text; none for text without named sets.

        Raises:
            RecipeError: the sets and the parts don't belong together.
        """
        return {}

    def check_new(self) -> None:
        """Check what is asked of a graft that a recipe trains, but not of a saved one. By default, that is nothing.

        Raises:
            RecipeError: keys do not fit each other.
        """

    def check_rows(self, length: int) -> None:
        """Check that training rows are long enough for the graft to learn. By default, every length is.

        Args:
            length: number of tokens of each row; rows are independent texts.

        Raises:
            RecipeError: the rows are too short.
        """

    def check_prompts(self, missing: Sequence[str]) -> None:
        """Check that the graft can learn from new text whose prompts are not marked. By default, it can.

        Args:
            missing: titles of the sources of new text without prompts.

        Raises:
            RecipeError: the graft needs prompts.
        """

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the graft has an auxiliary loss with this config."""
        return self.graft_class.auxiliary_loss is not Graft.auxiliary_loss


class Graft(nn.Module):
    """Base class of grafts: trainable modules attached to a frozen backbone.

    A graft never registers the backbone's parameters.

    A subclass defines `Config` and `__init__(self, config, backbone)`, which sets `self.config` and builds the
    parameters. The constructor reads the backbone's shapes and changes nothing in the backbone. All methods have
    defaults.

    Attributes:
        label: the method's name in tables and plots; by default the kind.
        observed_place: what the values of `observe` belong to, one each: by default layers of the backbone.
        has_decode_state: whether a decode step reads tensors of the graft from the step before, other than keys and
            values of the backbone.
        served_in_bfloat16: whether a server casts the graft to bfloat16 when the backbone is in bfloat16, which halves
            the memory traffic of the graft's weights.
        accepts_added_tokens: whether the graft works on a backbone with added tokens: it looks up no ids in tables of
            the backbone's or another model's vocabulary.
        takes_weight: whether its effect is what its taps add, so that a weight can multiply it; see `grafts.sums`.
    """

    Config: ClassVar[type[GraftConfig]]
    label: ClassVar[str] = ""
    observed_place: ClassVar[str] = "layer"
    has_decode_state: ClassVar[bool] = False
    served_in_bfloat16: ClassVar[bool] = False
    accepts_added_tokens: ClassVar[bool] = True
    takes_weight: bool = False
    config: GraftConfig
    _fingerprint: Fingerprint | None = None  # fingerprint of the backbone that was passed to `build_graft`

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in cls.__dict__:
            return
        cls.Config.graft_class = cls
        if "label" not in vars(cls.Config):
            cls.Config.label = cls.label or cls.Config.model_fields["kind"].default

    @property
    def token_rows(self) -> TokenRows | None:
        """The rows of the tokens that were added to the backbone; None without such tokens."""
        return cast("TokenRows | None", self._modules.get(ROWS_NAME))

    def add_token_rows(self, backbone: Backbone) -> None:
        """Give the graft rows of the backbone's added tokens, if there are any. `build_graft` calls this.

        Raises:
            GraftError: the graft does not accept added tokens.
        """
        if backbone.extended is None:
            return
        if not self.accepts_added_tokens:
            raise GraftError(
                f"The backbone {backbone.name} has added tokens, but a graft of the kind {self.config.kind} looks up "
                "the ids of tokens in the backbone's own vocabulary: leave out add_tokens, or train another kind."
            )
        self.add_module(ROWS_NAME, TokenRows(backbone.model, backbone.sites, backbone.extended))

    @property
    def decodes_in_one_graph(self) -> bool:
        """Whether a decode step with a static cache is one graph of torch.compile that reads no value on the host."""
        return False

    @property
    def max_static_columns(self) -> int | None:
        """The largest number of columns of a static cache for which `decodes_in_one_graph` holds; None for any."""
        return None

    @property
    def stored_parameters(self) -> int:
        """Number of parameters that are read when a pass needs them, and are not parameters of the module."""
        return 0

    def taps(self) -> list[Tap]:
        """Return the places where the graft reads and writes activations."""
        return []

    def prepare(self, call: Call) -> None:
        """Prepare a forward pass, for example by computing routes or running another model.

        Args:
            call: the pass, whose `scratch` keeps values for the taps.

        Raises:
            GraftError: the graft does not accept the inputs of the pass.
        """

    def auxiliary_loss(self, call: Call) -> Tensor | None:
        """Compute the weighted loss that the graft adds to the training loss of a pass.

        A mean must divide by `call.totals`, so that the losses of micro-batches and processes add up.

        Returns:
            A scalar, or None to add nothing.
        """
        return None

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Return statistics of a pass, averaged over its tokens.

        Args:
            call: the pass, after it has run with `observing` set.

        Returns:
            By name, one value per layer or other place where the graft acts, or one for the whole graft: (places,) or
            (1,).
        """
        return {}

    def describe(self, backbone: Backbone) -> dict[str, object]:
        """Return statistics of the graft's parameters by name, as JSON values.

        Args:
            backbone: the backbone, whose parameters may be described for comparison.
        """
        return {}


class HasHeads(ABC):
    """A graft that predicts the labels of tasks. `grafts.heads` lists the types of tasks."""

    @abstractmethod
    def tasks(self) -> dict[str, TaskSpec]:
        """Return the tasks by name, in the order of the indices in a batch's `extras["task"]`."""

    @abstractmethod
    def predict(self, call: Call, hidden: Tensor) -> list[Tensor]:
        """Predict each row.

        Args:
            call: the pass, whose `extras["task"]` has each sequence's task.
            hidden: (B, T, D), the backbone's last hidden states.

        Returns:
            A prediction per row, with the shapes of the table in `grafts.heads`.
        """

    @abstractmethod
    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor:
        """Compute the loss of the predictions.

        Args:
            call: the pass.
            hidden: (B, T, D), the backbone's last hidden states.
            targets: a target per row.

        Returns:
            The sum over rows divided by `call.totals[0]`, or the mean over rows without totals.
        """

    def start_tasks(self, model: nn.Module, rows: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
        """Choose the initial values of tasks that were added to a trained graft.

        Args:
            model: the `GraftedModel` that this graft is attached to.
            rows: some rows of each task, as the model's `forward` takes them, with `targets`.

        Returns:
            The choices as plain values.
        """
        return {}


class FitsOnText(ABC):
    """A graft that learns from texts without gradients, before training."""

    @property
    def learns_from_prompts(self) -> bool:
        """Whether it learns from prompts alone where texts have prompts; by default it learns from whole texts."""
        return False

    @abstractmethod
    def sources(self) -> Mapping[str, Sequence[Mapping[str, object]]]:
        """Return the sources of the texts, as lists of sources of a recipe's data, by names that the graft chooses.

        A name without sources takes the new text of the run, or of the set in `GraftConfig.set_of_parts`.
        """

    @abstractmethod
    def check_examples(self, names: Collection[str]) -> None:
        """Check that the graft will have all texts that it needs, before any is read or sampled.

        Args:
            names: the names of `sources` that have texts.

        Raises:
            RecipeError: `fit` would lack texts.
        """

    @abstractmethod
    def fit(self, texts: Mapping[str, Sequence[str]]) -> list[str]:
        """Learn from texts.

        Args:
            texts: the texts that were read from `sources`, by the same names.

        Returns:
            Sentences that warn the user of problems of the texts; an empty list without problems.
        """


class TrainsOnSets(ABC):
    """A graft whose parts can train on one named set of new text each; see `GraftConfig.set_of_parts`."""

    @abstractmethod
    def train_on_sets(self, sets: Sequence[str]) -> list[str]:
        """Let each row train the part that its set belongs to.

        The passes of training then have the numbers of their rows' sets, (B,) long, as `extras["text_set"]`; old text
        has -1.

        Args:
            sets: names of the sets of new text, in the order of their numbers; none for text without named sets.

        Returns:
            Sentences that tell the user which part trains on what.
        """


class ChangesAtEnd(ABC):
    """A graft that may change its weights once, after training and before it is measured and saved."""

    @abstractmethod
    def finish(self) -> dict[str, float]:
        """Change the weights of the attached graft, as its config says.

        Returns:
            What was changed, as metrics by name; empty if the config changes nothing.

        Raises:
            GraftError: the weights can't be changed.
        """


class ReadsModels(ABC):
    """A graft that reads the activations of other frozen models."""

    @abstractmethod
    def frozen_models(self) -> Mapping[str, Backbone]:
        """Return the other models by name. An artifact stores their fingerprints."""


@dataclass(frozen=True)
class Trace:
    """Values of a graft at each token.

    Attributes:
        labels: the names of the values, for example of experts.
        values: (B, tokens, labels), with the values of a token in the order of `labels`.
    """

    labels: list[str]
    values: Tensor


class Traceable:
    """A graft that records values at each token, available from the cache or from a forward pass."""

    def cache_trace(self, cache: Cache) -> Trace | None:
        """Return the trace of all tokens in a cache, or None if the cache does not store it.

        Args:
            cache: the cache of a generation with this graft.
        """
        return None

    def forward_trace(self, call: Call) -> Trace | None:
        """Return the trace of the T tokens of a pass, by default the last T tokens of `cache_trace`.

        Args:
            call: the pass, after it has run.

        Returns:
            The trace; None if it can't be determined, by default without a cache or token ids.
        """
        if call.cache is None or call.input_ids is None:
            return None
        trace = self.cache_trace(call.cache)
        if trace is None:
            return None
        length = call.input_ids.shape[1]
        return Trace(trace.labels, trace.values[:, -length:])


class ReplacesModel(ABC):
    """A graft that can't be expressed by taps alone: it runs a copy of the backbone, or adds modules to it."""

    @abstractmethod
    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model to run instead of `model`, which is a copy of it or `model` itself with added modules.

        Args:
            model: the backbone's model, or what the grafts before this one made of it.

        Raises:
            BackboneError: the graft can't change or copy this model.
            TapConflictError: another adapter in the model prevents it.
        """

    @abstractmethod
    def detach(self, model: PreTrainedModel) -> None:
        """Undo `attach`. The graft keeps its tensors.

        Args:
            model: the backbone's model.
        """

    def sites(self, model: PreTrainedModel) -> Sites:
        """Return the sites of the backbone's own parts, at which taps act, in an attached model.

        Args:
            model: the model that `attach` returned.
        """
        return Sites(model)

    def eval_only_modules(self) -> Iterable[nn.Module]:
        """Return the modules of the attached model that stay in evaluation mode during training."""
        return ()

    def changes_all_rows(self) -> bool:
        """Return whether the graft, as configured, acts on every row of a batch, and so can't share a batch."""
        return True


class ReadsPeft(ABC):
    """A graft that accepts PEFT adapters without conversion.

    Attributes:
        several_adapters: what a recipe with several adapters needs in addition to their sections; empty for nothing.
    """

    several_adapters: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def adapter_section(cls, name: str, folder: Path) -> dict[str, object]:
        """Return a recipe's `graft` section with the adapter of a folder. No backbone is loaded.

        Args:
            name: the name of the adapter in the graft.
            folder: the folder that PEFT wrote.

        Raises:
            ArtifactError: the graft can't use the adapter; the message states an alternative.
        """


class HasTensors(ABC):
    """A graft whose artifact contains tensors that differ from its `state_dict`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the artifact by name."""

    @abstractmethod
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors of the form that `tensors` returns.

        Args:
            tensors: the tensors by name, with the names and shapes of those of `tensors`.

        Raises:
            ArtifactError: names or shapes differ.
        """


def check_tensors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Check the names and shapes of a graft's tensors before they are loaded.

    Args:
        expected: the graft's own tensors by name.
        actual: the tensors that are to be loaded.

    Raises:
        ArtifactError: names or shapes differ.
    """
    _check_names(expected, actual)
    for name, tensor in expected.items():
        shape = tuple(actual[name].shape)
        expected_shape = tuple(tensor.shape)
        if shape != expected_shape:
            raise ArtifactError(
                f"The tensor {name} has the shape {shape}, but {expected_shape} is expected: the graft's files do not "
                "belong together; train or copy the graft again."
            )


def _check_names(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(actual))
    foreign = sorted(set(actual) - set(expected))
    if not missing and not foreign:
        return
    problem = f"lacks the tensor {missing[0]}" if missing else f"has the unexpected tensor {foreign[0]}"
    raise ArtifactError(
        f"The graft's tensor file {problem} ({len(missing)} missing, {len(foreign)} unexpected): the file is damaged "
        "or belongs to another config; train or copy the graft again."
    )

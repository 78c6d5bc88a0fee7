"""Config of block-state transformers and of the baselines they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Literal

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from graftlm.errors import RecipeError, did_you_mean
from graftlm.models.block_state.presets import preset_values

_CHOICES = {
    "mixer": ("block-state", "state-space", "recurrent", "memory", "slide"),
    "context": ("sh", "mh", "mf"),
    "kernel": ("s4d", "dss", "unstructured", "delta"),
}
_STRUCTURED = ("s4d", "dss")
_LAYERS = ("state_space_layers", "mixer_layers")
_FLAGS = ("bidirectional", "positional_ssm", "reset_states")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "window",
    "state_size",
    "state_width",
    "filters",
    "recurrent_states",
    "memory_windows",
    "kernel_length",
    "kernel_limit",
    "relative_buckets",
    "relative_distance",
)
_OF_STRUCTURED_KERNELS: dict[str, float] = {
    "dt_min": 1e-3,
    "dt_max": 1e-1,
    "a_rate": 1.0,
    "c_rate": 1.0,
    "dt_rate": 1.0,
}
"""Keys that only structured kernels read, with their defaults."""


def _with_presets(config_class: type[BlockStateConfig]) -> type[BlockStateConfig]:
    """Let a config class take a preset, whose values are defaults of the keys that are not given."""
    plain_init: Callable[..., None] = config_class.__init__

    @wraps(plain_init)
    def init(self: BlockStateConfig, *, preset: str | None = None, **values: object) -> None:
        plain_init(self, **(preset_values(preset) | values))

    config_class.__init__ = init  # type: ignore[method-assign]
    return config_class


@_with_presets
class BlockStateConfig(PreTrainedConfig):
    """Config of all block-state models.

    Keys that are not described have their usual meaning in transformers.

    Args:
        preset: a published model, such as `bst-sh-s`, whose sizes are the defaults of all keys that are not given. The
            saved config has the sizes instead of the name.
        window: window length W; a token attends to the last W tokens, including itself.
        mixer: the addition to window attention. `block-state`: cross-attention to the states of a state-space model.
            `recurrent`: cross-attention to state vectors that are updated window by window (Block-Recurrent
            Transformer, fixed gate, skip). `slide`: no addition. `memory`: Transformer-XL, whose layers all read keys
            and values of earlier windows without gradients. `state-space`: a gated state-space layer instead of window
            attention (GSS; a hybrid if `mixer_layers` are some of the layers).
        mixer_layers: indices of the layers with context states (`block-state`, `recurrent`), or without attention
            (`state-space`).
        state_space_layers: indices of further layers without attention, like those of `state-space`, for any mixer.
        context: the states that `block-state` attends to. `sh`: one state-space output for each token of the window.
            `mh`: one for each token and head. `mf`: the outputs of `filters` models at the end of the window before.
        kernel: the state-space model. `s4d`: structured. `dss`: the same with the first frequencies of diagonal state
            spaces, those of HiPPO-LegS. `unstructured`: computed from the time by a small network,
            with decay, as in Hyena. `delta`, for `sh` only: the gated delta rule, whose states depend on the text; the
            positional state-space model remains `s4d`.
        state_size: real numbers N in the state of each channel; for `delta`, the width of its keys.
        state_width: channels of the state-space model; by default hidden_size / 4, or hidden_size / 8 for `mf`.
        filters: number of state-space models S of `mf`.
        dt_min: smallest initial step size of structured kernels.
        dt_max: largest initial step size of structured kernels.
        a_rate: learning rate of A in structured kernels, as a factor on `training.learning_rate`.
        c_rate: learning rate of C, which includes B, as such a factor.
        dt_rate: learning rate of the step sizes, as such a factor.
        reset_states: whether the states of `delta` are reset at the beginning of every window of W tokens, so that they
            carry no information over; used as a control.
        positional_ssm: whether `block-state` models have a state-space model after the embeddings, which encodes
            positions; it reads the whole text before a token.
        recurrent_states: number of state vectors of a recurrent layer; W by default.
        memory_windows: number of windows that `memory` reads.
        kernel_length: number of tokens of a training text, to which unstructured kernels are scaled.
        kernel_limit: maximum number of tokens of a text with unstructured kernels.
        relative_buckets: buckets of the relative position bias (T5).
        head_dim: width of an attention head; hidden_size / num_attention_heads by default.
        relative_distance: distance from which all tokens share the last bucket.
        bidirectional: whether tokens attend to later ones, for classifiers.

    Raises:
        RecipeError: a value is out of range or conflicts with another.
    """

    model_type = "block-state"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    head_dim: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    intermediate_size: int = 1024
    hidden_act: str = "relu"
    window: int = 128
    mixer: Literal["block-state", "state-space", "recurrent", "memory", "slide"] = "block-state"
    mixer_layers: list[int] | tuple[int, ...] = (0, 3)
    state_space_layers: list[int] | tuple[int, ...] = ()
    context: Literal["sh", "mh", "mf"] = "sh"
    kernel: Literal["s4d", "dss", "unstructured", "delta"] = "s4d"
    state_size: int = 16
    state_width: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    filters: int = 32
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    a_rate: float = 1.0
    c_rate: float = 1.0
    dt_rate: float = 1.0
    reset_states: bool = False
    positional_ssm: bool = True
    recurrent_states: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    memory_windows: int = 1
    kernel_length: int = 4096
    kernel_limit: int = 131_072
    relative_buckets: int = 32
    relative_distance: int = 128
    bidirectional: bool = False
    dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    preset: str | None = None

    def __post_init__(self, **kwargs: object) -> None:
        for name in _LAYERS:
            layers = getattr(self, name)
            if isinstance(layers, tuple | range):
                setattr(self, name, list(layers))
        if self.state_width is None and isinstance(self.hidden_size, int):
            divisor = 8 if self.context == "mf" else 4
            self.state_width = max(1, self.hidden_size // divisor)
        if self.recurrent_states is None:
            self.recurrent_states = self.window
        if self.head_dim is None:
            self.head_dim = self._divided_width()
        for problem in self._problems():
            raise RecipeError(f"block-state: {problem}")
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, object]:
        """Return the keys and their values, without later keys that have their defaults.

        So a config that sets none of them is the same as before they existed, and so is the fingerprint of its model.
        """
        values = super().to_dict()
        later = {**_OF_STRUCTURED_KERNELS, "preset": None, "head_dim": self._divided_width()}
        for name, default in later.items():
            if values.get(name) == default:
                values.pop(name, None)
        return values

    def _divided_width(self) -> int:
        """Return the width of a head if all heads share the hidden size; 0 for sizes that are invalid."""
        sizes = (self.hidden_size, self.num_attention_heads)
        if any(type(size) is not int or size < 1 for size in sizes):
            return 0
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """The width of queries, keys and values of all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def span(self) -> int:
        """The number of tokens that attention reads, including the query's own."""
        if self.mixer == "memory":
            return self.window * self.memory_windows
        return self.window

    def has_context(self, layer: int) -> bool:
        """Return whether a layer has context states."""
        return self.mixer in ("block-state", "recurrent") and layer in self.mixer_layers

    def is_state_space(self, layer: int) -> bool:
        """Return whether a layer has a state-space model instead of attention."""
        if self.mixer == "state-space" and layer in self.mixer_layers:
            return True
        return layer in self.state_space_layers

    def _problems(self) -> Iterator[str]:
        yield from self._invalid_values()
        yield from self._invalid_layers()
        yield from self._invalid_sizes()
        yield from self._conflicts()

    @property
    def has_unstructured_kernels(self) -> bool:
        """Whether the model has state-space models, and their kernels are unstructured."""
        has_kernels = bool(self.state_space_layers) or self.mixer in ("block-state", "state-space")
        return has_kernels and self.kernel == "unstructured"

    @property
    def has_structured_kernels(self) -> bool:
        """Whether the model has state-space models with structured kernels."""
        if self.mixer == "block-state" and self.positional_ssm:
            return self.kernel != "unstructured"
        mixes_states = self.mixer in ("block-state", "state-space") and bool(self.mixer_layers)
        return self.kernel in _STRUCTURED and (mixes_states or bool(self.state_space_layers))

    def _invalid_values(self) -> Iterator[str]:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                yield f"{name} is {value!r}, but a positive integer is expected."
        for name in _FLAGS:
            value = getattr(self, name)
            if type(value) is not bool:
                yield f"{name} is {value!r}, but true or false is expected."
        if not 0 <= self.dropout < 1:
            yield f"dropout is {self.dropout}, but a number from 0 to below 1 is expected."
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                yield f"{name} is {value!r}, but one of {', '.join(choices)} is expected."
        if self.hidden_act not in ACT2FN:
            suggestion = did_you_mean(str(self.hidden_act), ACT2FN)
            yield f"hidden_act is {self.hidden_act!r}, which is not an activation of transformers{suggestion}."

    def _invalid_layers(self) -> Iterator[str]:
        for name in _LAYERS:
            layers = getattr(self, name)
            if not isinstance(layers, list):
                yield f"{name} is {layers!r}, but a list of layers is expected, such as [0, 3]."
        for name in _LAYERS:
            for layer in getattr(self, name):
                yield from self._layer_problems(name, layer)

    def _layer_problems(self, name: str, layer: int) -> Iterator[str]:
        if type(layer) is not int:
            yield f"{name} contains {layer!r}, but integers are expected, such as [0, 3]."
        has_context = self.has_context(layer)
        is_state_space = self.is_state_space(layer)
        count = self.num_hidden_layers
        if (has_context or is_state_space) and not 0 <= layer < count:
            yield f"{name} contains layer {layer}, but the model has layers 0 to {count - 1}."
        if has_context and is_state_space:
            yield f"layer {layer} is in mixer_layers and in state_space_layers: remove it from one of them."

    def _invalid_sizes(self) -> Iterator[str]:
        if self.hidden_size % self.num_attention_heads and self.head_dim == self._divided_width():
            yield (
                f"hidden_size is {self.hidden_size}, which is not a multiple of num_attention_heads, "
                f"{self.num_attention_heads}: change one of them, or set head_dim."
            )
        if self.state_size % 2:
            yield f"state_size is {self.state_size}, but states are conjugate pairs: set an even number."
        if self.relative_buckets < 4 or self.relative_distance <= self.relative_buckets // 2:
            yield (
                f"relative_buckets is {self.relative_buckets} and relative_distance is {self.relative_distance}, which "
                "leaves no bucket for long distances: set at least 4 buckets, and a distance above half of them."
            )
        yield from self._invalid_rates()
        if self.kernel_limit < self.kernel_length:
            yield f"kernel_limit is {self.kernel_limit}, below kernel_length, {self.kernel_length}: raise it."

    def _invalid_rates(self) -> Iterator[str]:
        for name in _OF_STRUCTURED_KERNELS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                yield f"{name} is {value!r}, but a positive number is expected."
        if self.dt_min > self.dt_max:
            yield f"dt_min is {self.dt_min}, above dt_max, {self.dt_max}: lower dt_min, or raise dt_max."

    def _conflicts(self) -> Iterator[str]:
        if self.kernel == "delta" and self.mixer == "block-state" and self.context != "sh":
            yield (
                f"kernel is delta, which has one state for each token, but context is {self.context}: set context to "
                "sh."
            )
        for name, default in _OF_STRUCTURED_KERNELS.items():
            if getattr(self, name) != default and not self.has_structured_kernels:
                yield (
                    f"{name} is {getattr(self, name)}, but the model has no structured kernels, to which it applies: "
                    f"set kernel to s4d, or leave {name} out."
                )
        if self.reset_states:
            yield from self._reset_problems()
        if self.bidirectional and self.mixer in ("recurrent", "memory"):
            yield f"bidirectional is true, but mixer {self.mixer} reads from left to right: choose another mixer."

    def _reset_problems(self) -> Iterator[str]:
        """Yield what conflicts with `reset_states`."""
        mixes_states = self.mixer in ("block-state", "state-space") and bool(self.mixer_layers)
        if self.kernel != "delta":
            yield f"reset_states is true, but kernel is {self.kernel}: set kernel to delta."
        if not mixes_states and not self.state_space_layers:
            yield (
                "reset_states is true, but no layer has a state-space model: set mixer to block-state, or name layers "
                "in state_space_layers."
            )
        if self.mixer == "block-state" and self.positional_ssm:
            yield (
                "reset_states is true, but the positional state-space model reads the whole text: set positional_ssm "
                "to false."
            )

"""The shape of a block-state transformer, and of the models it is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from graftlm.errors import RecipeError, did_you_mean

Mixer = Literal["block-state", "recurrent", "memory", "slide"]
_CHOICES = {
    "mixer": ("block-state", "recurrent", "memory", "slide"),
    "context": ("sh", "mh", "mf"),
    "kernel": ("s4d", "unstructured"),
}
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "window"),
    *("state_size", "state_width", "filters", "recurrent_states", "memory_windows", "kernel_length", "kernel_limit"),
    *("relative_buckets", "relative_distance"),
)


class BlockStateConfig(PreTrainedConfig):
    """Config of `BlockStateForCausalLM`.

    Args:
        vocab_size: number of tokens.
        hidden_size: width d of the residual stream.
        num_hidden_layers: number of layers.
        num_attention_heads: number H of heads; H divides d.
        intermediate_size: inner width of the FFN.
        hidden_act: its activation.
        window: W; a token attends to the last W tokens, itself among them.
        mixer: what the layers in `mixer_layers` have besides: `block-state`, cross-attention to the states of a
            state-space model; `recurrent`, to state vectors that are updated window by window (Block-Recurrent
            Transformer, fixed gate, no FFN); `slide`, nothing. `memory` is Transformer-XL in every layer: keys and
            values of earlier windows are read without gradients.
        mixer_layers: which layers, counted from zero.
        context: `sh`, one output of the state space for each token of the window; `mh`, one for each head too; `mf`,
            those of `filters` state spaces at the end of the window before.
        kernel: `s4d`, structured; or `unstructured`, a small network of the time under a decay, as in Hyena.
        state_size: N, real numbers in the state of each channel.
        state_width: channels of the state space; by default d / 4, and d / 8 for `mf`.
        filters: S, state spaces of `mf`.
        positional_ssm: whether a state space stands right behind the embeddings, which tells where a token stands.
        recurrent_states: state vectors of a recurrent layer; by default W.
        memory_windows: how many earlier windows `memory` reads.
        kernel_length: the length that unstructured kernels are made for: that of training.
        kernel_limit: the longest text that they may be extended to by their formula.
        relative_buckets: of the relative position bias (T5).
        relative_distance: from which distance on all share its last bucket.
        bidirectional: whether tokens see those after them: for classifiers.
        dropout: share of activations that is dropped in training.
        rms_norm_eps: added to mean squares.
        initializer_range: standard deviation of fresh weights.

    Raises:
        RecipeError: a value is out of its range, or does not fit another.
    """

    model_type = "block-state"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 256,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 8,
        intermediate_size: int = 1024,
        hidden_act: str = "relu",
        window: int = 128,
        mixer: Mixer = "block-state",
        mixer_layers: list[int] | tuple[int, ...] = (0, 3),
        context: Literal["sh", "mh", "mf"] = "sh",
        kernel: Literal["s4d", "unstructured"] = "s4d",
        state_size: int = 16,
        state_width: int | None = None,
        filters: int = 32,
        positional_ssm: bool = True,
        recurrent_states: int | None = None,
        memory_windows: int = 1,
        kernel_length: int = 4096,
        kernel_limit: int = 131_072,
        relative_buckets: int = 32,
        relative_distance: int = 128,
        bidirectional: bool = False,
        dropout: float = 0.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.window = window
        self.mixer = mixer
        self.mixer_layers = _listed(mixer_layers)
        self.context = context
        self.kernel = kernel
        self.state_size = state_size
        self.state_width = _share(hidden_size, context) if state_width is None else state_width
        self.filters = filters
        self.positional_ssm = positional_ssm
        self.recurrent_states = window if recurrent_states is None else recurrent_states
        self.memory_windows = memory_windows
        self.kernel_length = kernel_length
        self.kernel_limit = kernel_limit
        self.relative_buckets = relative_buckets
        self.relative_distance = relative_distance
        self.bidirectional = bidirectional
        self.dropout = dropout
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._check()
        super().__init__(**rest)

    @property
    def span(self) -> int:
        """How many tokens back attention reaches, the token itself among them."""
        return self.window * (self.memory_windows if self.mixer == "memory" else 1)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    def mixes(self, layer: int) -> bool:
        """Whether a layer has context states."""
        return self.mixer in ("block-state", "recurrent") and layer in self.mixer_layers

    def _check(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_layers()
        self._check_fit()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RecipeError(f"block-state: {name} is {value!r}; a whole number from 1 is expected.")
        if not 0 <= self.dropout < 1:
            raise RecipeError(f"block-state: dropout is {self.dropout}; a share from 0 to below 1 is expected.")

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RecipeError(
                    f"block-state: {name} is {getattr(self, name)!r}; one of {', '.join(choices)} is expected."
                )
        if self.hidden_act not in ACT2FN:
            known = did_you_mean(str(self.hidden_act), ACT2FN)
            raise RecipeError(f"block-state: there is no activation {self.hidden_act!r}{known}.")

    def _check_layers(self) -> None:
        odd = [layer for layer in self.mixer_layers if not isinstance(layer, int) or isinstance(layer, bool)]
        if odd:
            raise RecipeError(f"block-state: mixer_layers has {odd[0]!r}; whole numbers are expected, as in [0, 3].")
        wrong = [layer for layer in self.mixer_layers if not 0 <= layer < self.num_hidden_layers]
        if self.mixer in ("block-state", "recurrent") and wrong:
            raise RecipeError(
                f"block-state: mixer_layers names layer {wrong[0]}; the {self.num_hidden_layers} layers are counted "
                f"from 0 to {self.num_hidden_layers - 1}."
            )

    def _check_fit(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise RecipeError(
                f"block-state: {self.num_attention_heads} heads don't divide a width of {self.hidden_size}: change "
                "num_attention_heads or hidden_size."
            )
        if self.state_size % 2:
            raise RecipeError(
                f"block-state: state_size is {self.state_size}; an even number is expected, since states come in "
                "conjugate pairs."
            )
        if self.relative_buckets < 4 or self.relative_distance <= self.relative_buckets // 2:
            raise RecipeError(
                f"block-state: {self.relative_buckets} relative_buckets up to a relative_distance of "
                f"{self.relative_distance} leave none for long distances: take at least 4, and a distance above half "
                "of them."
            )
        if self.kernel_limit < self.kernel_length:
            raise RecipeError(
                f"block-state: kernel_limit {self.kernel_limit} is below kernel_length {self.kernel_length}: raise it."
            )
        if self.bidirectional and self.mixer in ("recurrent", "memory"):
            raise RecipeError(
                f"block-state: a bidirectional model can't have mixer: {self.mixer}, which reads from left to right: "
                "take block-state or slide."
            )


def _listed(layers: Any) -> list[int]:
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise RecipeError(f"block-state: mixer_layers is {layers!r}; a list of layers is expected, as in [0, 3].")
    return list(layers)


def _share(width: Any, context: str) -> int:
    """Of a width, what the state space has by default: a fourth, and an eighth for `mf`."""
    return max(1, width // (8 if context == "mf" else 4)) if isinstance(width, int) else 1

"""Model families: where each architecture keeps its layers, attention, FFN, embedding and head; one row each.

Paths are relative to `model.base_model`; paths of a layer's modules are relative to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from graftlm.errors import TapError, UnknownFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SiteKind = Literal["embedding", "layer", "attention", "ffn", "norm", "head", "module"]


@dataclass(frozen=True)
class Sublayer:
    """An attention or FFN sublayer: its input is the first input of `entry`, its output the output of `exit`.

    In most decoders both are one module, and `exit` may be left out. BERT's FFN enters at `intermediate` and leaves at
    `output.dense`, before the residual sum.
    """

    entry: str
    exit: str = ""


@dataclass(frozen=True)
class Family:
    """Where one architecture keeps the modules that grafts need.

    Args:
        layers: the list of layers.
        embedding: the token embedding.
        norm: the norm after the last layer; None for encoders that normalise inside each layer.
        attention, ffn: the sublayers of one layer.
        ffn_in: the Linears that read the FFN's input; the gating one is first in a gated linear unit.
        ffn_out: the Linear that writes the FFN's output.
        gated: the FFN is W_o(act(W_g x) * W_i x) rather than W_o act(W_i x).
        activation: the config field that names the activation.
        text_config: the config field that holds the text model's config in multimodal models.
        causal: no token attends to a later one.
        norms: the norms of one layer over the model's width, in the order in which they act.
        counts_positions: the model derives positions from the ids that are not padding, and reserves the first
            `pad_token_id + 1` positions, as RoBERTa does.
    """

    layers: str
    embedding: str
    norm: str | None
    attention: Sublayer
    ffn: Sublayer
    ffn_in: tuple[str, ...]
    ffn_out: str
    gated: bool
    activation: str = "hidden_act"
    text_config: str | None = None
    causal: bool = True
    norms: tuple[str, ...] = ()
    counts_positions: bool = False


_LLAMA = Family(
    layers="layers",
    embedding="embed_tokens",
    norm="norm",
    attention=Sublayer("self_attn"),
    ffn=Sublayer("mlp"),
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out="mlp.down_proj",
    gated=True,
    norms=("input_layernorm", "post_attention_layernorm"),
)
_GEMMA = replace(
    _LLAMA,
    activation="hidden_activation",
    norms=(*_LLAMA.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_BERT = Family(
    layers="encoder.layer",
    embedding="embeddings.word_embeddings",
    norm=None,
    attention=Sublayer("attention.self", "attention.output.dense"),
    ffn=Sublayer("intermediate", "output.dense"),
    ffn_in=("intermediate.dense",),
    ffn_out="output.dense",
    gated=False,
    causal=False,
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "gemma", "qwen2", "qwen3", "olmo"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gemma3": replace(
        _GEMMA,
        layers="language_model.layers",
        embedding="language_model.embed_tokens",
        norm="language_model.norm",
        text_config="text_config",
    ),
    "olmo2": replace(_LLAMA, norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "phi": replace(
        _LLAMA, norm="final_layernorm", ffn_in=("mlp.fc1",), ffn_out="mlp.fc2", gated=False, norms=("input_layernorm",)
    ),
    "gpt2": replace(
        _LLAMA,
        layers="h",
        embedding="wte",
        norm="ln_f",
        attention=Sublayer("attn"),
        ffn_in=("mlp.c_fc",),
        ffn_out="mlp.c_proj",
        gated=False,
        activation="activation_function",
        norms=("ln_1", "ln_2"),
    ),
    "gpt_neox": replace(
        _LLAMA,
        embedding="embed_in",
        norm="final_layer_norm",
        attention=Sublayer("attention"),
        ffn_in=("mlp.dense_h_to_4h",),
        ffn_out="mlp.dense_4h_to_h",
        gated=False,
    ),
    "bert": _BERT,
    "roberta": replace(_BERT, counts_positions=True),
    "distilbert": replace(
        _BERT,
        layers="transformer.layer",
        attention=Sublayer("attention"),
        ffn=Sublayer("ffn"),
        ffn_in=("ffn.lin1",),
        ffn_out="ffn.lin2",
        activation="activation",
        norms=("sa_layer_norm", "output_layer_norm"),
    ),
    "modernbert": replace(
        _LLAMA,
        embedding="embeddings.tok_embeddings",
        norm="final_norm",
        attention=Sublayer("attn"),
        ffn_in=("mlp.Wi",),  # one Linear for both halves of the gated linear unit
        ffn_out="mlp.Wo",
        activation="hidden_activation",
        causal=False,
        norms=("attn_norm", "mlp_norm"),
    ),
}


def register_family(model_type: str, family: Family) -> None:
    """Add an architecture to `FAMILIES`; `model_type` is the one in its config."""
    FAMILIES[model_type] = family


@dataclass(frozen=True)
class Site:
    """A location in a backbone where taps act.

    Layers, attentions and FFNs have the index of a layer, negative ones count from the end; `module` has its path.
    """

    kind: SiteKind
    layer: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        detail = self.path if self.kind == "module" else self.layer
        return self.kind if detail is None else f"{self.kind} {detail}"


class Sites:
    """The sites of one live model.

    Raises:
        UnknownFamilyError: no row describes the model's type, or the row does not fit the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model_type: str = model.config.model_type
        self.family = _family(model)
        self._model, self._base = model, model.base_model
        self.config = getattr(model.config, self.family.text_config or "", model.config)
        self.layers: Any = self._resolve(self._base, self.family.layers)
        if not isinstance(self.layers, nn.ModuleList):
            raise UnknownFamilyError(f"{self.family.layers} of {type(model).__name__} is not a list of layers.")

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        """The model's hidden size d."""
        return int(self.config.hidden_size)

    @property
    def activation(self) -> str:
        """The FFN's activation, by its name in transformers' ACT2FN."""
        return str(getattr(self.config, self.family.activation))

    def ffn_linears(self, layer: int) -> list[nn.Module]:
        """The Linears of a layer's FFN: those that read its input, the activated one first, then the last."""
        return [self._resolve(self.layers[layer], path) for path in (*self.family.ffn_in, self.family.ffn_out)]

    def norms(self, layer: int) -> list[Site]:
        """The norms inside a layer, in the order in which they act; empty where the family's row names none."""
        names = {module: name for name, module in self._model.named_modules()}
        modules = [self._resolve(self.layers[layer], path) for path in self.family.norms]
        return [Site("module", path=names[module]) for module in modules]

    def positions(self, mask: Tensor) -> Tensor | None:
        """Position ids (B, T) that count the real tokens of a mask (B, T); None where the model derives its own."""
        return None if self.family.counts_positions else (mask.long().cumsum(-1) - 1).clamp(min=0)

    def module(self, site: Site) -> tuple[nn.Module, nn.Module]:
        """The entry and exit modules of a site.

        Raises:
            TapError: the backbone has no such site.
        """
        if site.kind in ("layer", "attention", "ffn"):
            if site.layer is None or not -self.n_layers <= site.layer < self.n_layers:
                raise TapError(
                    f"There is no layer {site.layer}: this {self.model_type} model has layers 0 to {self.n_layers - 1}."
                )
            layer = self.layers[site.layer]
            sublayer = Sublayer("") if site.kind == "layer" else getattr(self.family, site.kind)
            return self._resolve(layer, sublayer.entry), self._resolve(layer, sublayer.exit or sublayer.entry)
        if site.kind == "head":
            module = self._model.get_output_embeddings()
        elif site.kind == "module":
            module = self._resolve(self._model, site.path or "")
        else:
            path = self.family.embedding if site.kind == "embedding" else self.family.norm
            module = self._resolve(self._base, path) if path else None
        if module is None:
            raise TapError(f"A {self.model_type} model has no {site}: choose another site for this tap.")
        return module, module

    def _resolve(self, root: nn.Module, path: str) -> nn.Module:
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise TapError(
                f"{type(root).__name__} of this {self.model_type} model has no module {path!r}: "
                "correct the path, or describe the family with graftlm.backbone.register_family."
            ) from None


def _family(model: PreTrainedModel) -> Family:
    """The row of a model's type, or the one that its class declares in `graft_sites` as a dict of `Family`'s fields."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    declared: dict[str, Any] | None = getattr(type(model), "graft_sites", None)
    if declared is None:
        raise UnknownFamilyError(
            f"GraftLM has no row for the model type {model_type!r} ({type(model).__name__}; known: "
            f"{', '.join(sorted(FAMILIES))}): describe it once with "
            f"graftlm.backbone.register_family({model_type!r}, Family(layers='layers', "
            "embedding='embed_tokens', norm='norm', attention=Sublayer('self_attn'), ffn=Sublayer('mlp'), "
            "ffn_in=('mlp.gate_proj', 'mlp.up_proj'), ffn_out='mlp.down_proj', gated=True)), with the paths that "
            "print(model.base_model) shows."
        )
    fields: dict[str, Any] = declared | {name: Sublayer(declared[name]) for name in ("attention", "ffn")}
    return Family(**fields)

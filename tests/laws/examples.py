"""What the laws are tested on: examples of every registered kind of graft, and tiny backbones of every family.

A new kind gets the laws by its line in the registry. `EXAMPLES` holds configs beside the default, and the reasons why
a law does not hold for a kind.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from graftlm.backbone import Backbone
from graftlm.grafts import kinds
from tiny import ALL_ENCODERS, DECODERS, ENCODERS, MORE_FAMILIES, SPREAD, TOKENS, tiny_model, tiny_tokenizer


@dataclass(frozen=True, eq=False)  # compared by identity, so that answers can be cached
class Example:
    """One config of a kind.

    Args:
        kind: its name in the registry.
        config: the values that differ from the kind's defaults.
        name: its name in test ids.
        spread: standard deviation of the noise that replaces training.
        learning_rate: a rate at which its loss falls within a few steps.
        start: how much an untrained graft may change logits, by rounding.
        hosts: the backbones of the laws, where not all are needed.
        exceptions: a law, the host of a backbone, a family, `encoders`, or a family and a law with a blank between
            them -> the reason why the law is skipped.
    """

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    spread: float = 0.2
    learning_rate: float = 1e-2
    start: float = 0.0
    hosts: tuple[str, ...] = ()
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name or self.kind

    @functools.cache  # noqa: B019 -- examples live as long as the session
    def exception(self, name: str, law: str = "") -> str | None:
        """The reason why a law is skipped on a backbone; None where it holds."""
        family, _, host = name.partition("+")
        if self.hosts and name not in self.hosts:
            return f"{name}: other backbones tell"
        if law == _CROPPED and host in ("bfloat16", "float16"):
            return f"{host}, {law}: the rounding of longer passes may choose another token"
        if (family, law) in FAMILY_EXCEPTIONS:
            return f"{family}, {law}: {FAMILY_EXCEPTIONS[family, law]}"
        if law == _WAITS and name not in _WAITS_FAMILIES:
            return f"{name}, {law}: what waits is a graft's own code, so a few families tell"
        keys = (f"{family} {law}", host, law, family, "encoders" if family in ALL_ENCODERS else "")
        return next((f"{self}, {key}: {self.exceptions[key]}" for key in keys if key in self.exceptions), None)

    def values(self) -> dict[str, Any]:
        """The config as a recipe writes it."""
        return {"kind": self.kind, **self.config}

    @functools.cache  # noqa: B019 -- examples live as long as the session
    def backbones(self) -> tuple[str, ...]:
        """The backbones of the laws: few for further examples, and two kinds for each family without a row."""
        if self.hosts:
            return self.hosts
        if self is not _all_examples(self.kind)[0]:
            return FEW_BACKBONES
        others = [kind for kind in kinds() if kind != "neutral-residues" and not _all_examples(kind)[0].hosts]
        turn = {family: others[number % len(others)] for number, family in enumerate(MORE_FAMILIES)}
        return (*BACKBONES, *(name for name in MORE_FAMILIES if self.kind in ("neutral-residues", turn[name])))


_PACKED, _CROPPED, _SAVED, _WAITS, _RECOMPUTED = (
    "packed_documents_do_not_meet",
    "speculative_decoding_crops_the_cache",
    "only_the_trained_tensors_are_saved",
    "decode_step_waits_for_no_accelerator",
    "recomputed_activations_change_no_gradient",
)
_WAITS_FAMILIES = ("llama", "gemma3", "gpt2")
FAMILY_EXCEPTIONS = {
    ("block-state", _PACKED): "states would pass from one document into the next, so a GraftError says so",
    ("block-state", _CROPPED): "a state can't be cropped by some tokens, so a GraftError says so",
    ("qwen3_next", _CROPPED): "transformers refuses it for models with a state",
    **{
        (family, _PACKED): "the family can't keep documents of a row apart, so a GraftError says so"
        for family in ("falcon", "opt", "bloom", "mpt", "gpt_oss", "qwen3_next", "lfm2")
    },
}
_STREAMS = "its layers pass several streams of hidden states, so a TapError says so"
_NO_BIAS = "its attention takes no additive mask, so a TapError says so"
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3")
_ROUTED = {
    **dict.fromkeys(_MIXTURES, "experts of an FFN that is a mixture itself are refused by a TapError"),
    **dict.fromkeys(("qwen3_next", "lfm2"), "a layer without attention is refused by a TapError"),
    "deberta-v2": "its attention reads relative positions, which have no route, so a GraftError says so",
}
_PACKED_WEIGHTS = "packed weights can't be trained, so a BackboneError says so"
_WHOLE = "its tensors are the whole model's: DESIGN's exception"
_OTHER_TOKENIZER = "tokens of two tokenizers are aligned in causal order only, so a GraftError says so"
_READS_TEXT = "characters are aligned on the host, which docs/what-it-needs.md says"
_RECOMPUTES = "the host decides whether to compute the cache again, which docs/what-it-needs.md says"
_NEXT_TOKENS = ("llama", "gemma3", "gpt2", "block-state", "llama+int8", "qwen3+adapted", "llama+bfloat16")
_NOT_CROPPED = "tokens of another tokenizer can't be cropped one by one, so a GraftError says so"


@functools.cache
def augmenting_folder(family: str, tokens: int = TOKENS) -> str:
    """The folder of another tiny model, with a tokenizer of `tokens`."""
    folder = tempfile.mkdtemp(prefix=f"tiny-{family}-{tokens}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny_model(family, seed=7).save_pretrained(folder)
    tiny_tokenizer(tokens).save_pretrained(folder)
    return folder


EXPERTS = {
    "english": {
        "rank": 4,
        "alpha": 8,
        "targets": ["attention", "ffn"],
        "texts": ["The quick brown fox", "thin forest"],
    },
    "code": {"rank": 2, "targets": ["ffn"], "texts": ["def forward(self): return self.down(x)"]},
    "french": {"rank": 3, "targets": ["embedding", "attention"], "texts": ["Le renard brun saute dans la forêt"]},
}
_ROUTING = {
    _SAVED: "its centroids are computed, and not trained",
    "no_logit_depends_on_a_later_token_in_training": "in training, a document's experts are chosen from all of it",
    "every_parameter_gets_a_gradient": "an expert trains on documents near its own texts, and random tokens are not",
    **_ROUTED,
}

_TOPICS = {"tasks": {"topics": {"type": "classification", "labels": ["sport", "politics"]}}, "task_width": 4}
_FIRST_SHOWS = dict.fromkeys(("gpt2", "qwen3", "int8", "encoders"), "the first example is tested there")
_ON_FEW = {*DECODERS, *ENCODERS, "adapted"} - {"llama", "gemma3", "block-state", "bert"}
_ALL_MODULES = {"attention": "blocks", "alignment": True, "norm": True, "bottleneck": "base", "modulated": 0.5}
_HALF_FROZEN = {**_TOPICS, **_ALL_MODULES, "frozen": 0.5, "block": 5, "bottleneck_width": 6, "max_length": 160}
_STATES = {"layers": [0, 1], "heads": 2, "head_width": 8}
_ROTARY = (
    *(
        "llama",
        "gemma",
        "qwen2",
        "qwen3",
        "phi",
        "gpt_neox",
        "olmo",
        "olmo2",
        "falcon",
        "smollm3",
        "granite",
        "stablelm",
    ),
    *("starcoder2", "nemotron", "phi3", "seed_oss", "hunyuan_v1_dense", "arcee", "bitnet", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "llama+bfloat16", "qwen3+float16", "llama+int8", "qwen3+adapted"),
)
_FEW_ROTARY = ("llama", "qwen3", "phi", "gpt_neox", "llama+bfloat16")
_NOT_BACK = "what left a window or entered a state can't come back, so a GraftError says so"
_UNTRAINED = ("untrained_graft_changes_no_bit", "untrained_graft_changes_nothing_in_training_mode")


EXAMPLES: dict[str, list[Example]] = {
    "composition": [
        Example(
            "composition",
            {"stride": 1, "positions": "none", "augmenting": {"one": {"name": augmenting_folder("llama")}}},
            spread=0.05,
            exceptions={"gemma3n": _STREAMS},
        ),
        Example(
            "composition",
            {
                "norm": "pre",
                "positions": "local",
                "augmenting": {
                    "one": {"name": augmenting_folder("gemma3"), "pairs": [[2, 0], [0, 0]]},
                    "two": {"name": augmenting_folder("gpt2"), "pairs": [[1, 1]]},
                },
                "heads": 2,
            },
            name="two-models",
            spread=0.05,
            exceptions=_FIRST_SHOWS | {"block-state": "the first example is tested there"},
        ),
        Example(
            "composition",
            {"stride": 1, "augmenting": {"one": {"name": augmenting_folder("qwen3", 280)}}},
            name="two-tokenizers",
            spread=0.05,
            exceptions={"encoders": _OTHER_TOKENIZER, _CROPPED: _NOT_CROPPED, _WAITS: _READS_TEXT},
        ),
        Example(
            "composition",
            {
                "stride": 1,
                "qk_norm": True,
                "readout": "mixture",
                "augmenting": {
                    "one": {"name": augmenting_folder("llama")},
                    "two": {"name": augmenting_folder("gpt2")},
                },
            },
            name="mixture",
            spread=0.05,
            hosts=_NEXT_TOKENS,
        ),
        Example(
            "composition",
            {"cross": False, "readout": "mixture", "augmenting": {"one": {"name": augmenting_folder("gemma3")}}},
            name="readout-alone",
            spread=0.05,
            hosts=_NEXT_TOKENS,
            exceptions={_RECOMPUTED: "no gradient passes a layer, so none is recomputed"},
        ),
    ],
    # The local losses weigh as much as the language-modelling loss, so that a mistake in them shows.
    "neutral-residues": [
        Example("neutral-residues", {"alpha": 1.0}),
        Example("neutral-residues", {"alpha": 1.0, "gate": "sigmoid", "init": "he"}, name="sigmoid"),
    ],
    "conditional-tasks": [
        Example(
            "conditional-tasks",
            _HALF_FROZEN,
            spread=0.05,
            exceptions={
                "int8": _PACKED_WEIGHTS,
                **dict.fromkeys(("block-state", "mpt", "deberta-v2"), _NO_BIAS),
                "gemma3n": _STREAMS,
            },
        ),
        Example(
            "conditional-tasks",
            {**_TOPICS, "frozen": 1.0, "modulated": 0.5, "alignment": True, "norm": False, "bottleneck": "large"},
            name="all-frozen",
            spread=0.1,
            exceptions=dict.fromkeys(_ON_FEW, "the first example is tested there"),
        ),
        Example(
            "conditional-tasks",
            {**_TOPICS, "lora_rank": 2},
            name="loras",
            exceptions={"every_parameter_gets_a_gradient": "modules alone read the tasks' vectors, and it has none"},
        ),
    ],
    "token-routing": [
        Example("token-routing", {"experts": EXPERTS, "prompt": "causal", "temperature": 0.1}, exceptions=_ROUTING),
        Example(
            "token-routing",
            {"experts": EXPERTS, "prompt": "causal", "every": 3, "window": 4, "policy": "nearest", "top": 1},
            name="one-at-a-time",
            exceptions=_ROUTING,
        ),
        Example(
            "token-routing",
            {"experts": EXPERTS, "prompt": "causal", "cache": "recompute", "temperature": 0.1},
            name="recomputing",
            exceptions=_ROUTING | {_WAITS: _RECOMPUTES} | _FIRST_SHOWS,
        ),
        Example(
            "token-routing",
            {
                "experts": EXPERTS,
                "prompt": "causal",
                "every": 3,
                "temperature": 0.1,
                "embedder": {"layers": 1, "whiten": True, "centroids": "all"},
            },
            name="by-states",
            exceptions=_ROUTING,
        ),
        Example(
            "token-routing",
            {"experts": {name: EXPERTS[name] for name in ("english", "code")}, "fixed": {"english": 0.5, "code": 0.2}},
            name="fixed",
            exceptions=_ROUTING,
        ),
    ],
    "memory": [
        Example(
            "memory",
            {**_STATES, "window": 32, "sinks": 4},  # the law of untrained grafts reads 24 tokens
            hosts=_ROTARY,
            exceptions={_CROPPED: _NOT_BACK},
        ),
        Example(
            "memory",
            {**_STATES, "window": 6, "sinks": 2},
            name="narrow-memory",
            hosts=_FEW_ROTARY,
            exceptions={
                _CROPPED: _NOT_BACK,
                **dict.fromkeys(_UNTRAINED, "24 tokens are more than the window: tests/memory tells what is equal"),
            },
        ),
    ],
    "lora": [
        Example(
            "lora",
            {"capacity": 0.1},
            exceptions={
                **{
                    f"{family} threads_do_not_mix": "PEFT adds to the experts of a mixture in place, for all threads"
                    for family in (*_MIXTURES, "qwen3_next")
                },
                "adapted": "PEFT would unload the user's adapter with it, so a TapConflictError says so",
            },
        )
    ],
    "finetune": [
        Example(
            "finetune",
            spread=0.05,
            learning_rate=1e-3,
            exceptions={_SAVED: _WHOLE, "int8": _PACKED_WEIGHTS},
        )
    ],
    "peft": [
        Example(
            "peft",
            {"method": "OFT", "options": {"oft_block_size": 4}},
            name="oft",
            hosts=("llama", "gemma3", "phi", "block-state", "bert", "modernbert", "llama+bfloat16", "qwen3+float16"),
        ),
        Example("peft", {"method": "OSF"}, name="osf", start=1e-5, hosts=("llama", "llama+bfloat16")),
        Example(
            "peft",
            {"method": "DORA", "options": {"r": 4}},
            name="dora",
            hosts=("gpt2", "llama+int8", "llama+bfloat16"),
        ),
        Example("peft", {"method": "IA3"}, name="ia3", learning_rate=3e-2, hosts=("gemma3", "gpt2+bfloat16")),
        Example(
            "peft",
            {"method": "VERA", "options": {"r": 8}},
            name="vera",
            hosts=("llama",),
            exceptions={_SAVED: "its fixed random projections are saved too"},
        ),
    ],
    "llama-pro": [
        Example(
            "llama-pro",
            {"blocks": 1},
            spread=0.1,
            hosts=(
                *(
                    "llama",
                    "gemma3",
                    "gpt2",
                    "mistral",
                    "gemma2",
                    "qwen3",
                    "phi",
                    "olmo2",
                    "smollm3",
                    "cohere2",
                    "lfm2",
                ),
                *("modernbert", "llama+bfloat16", "gemma3+bfloat16", "qwen3+float16"),
            ),
        )
    ],
}


def examples() -> list[Example]:
    """At least one example of every registered kind."""
    return [example for kind in kinds() for example in _all_examples(kind)]


def first_example(kind: str) -> Example:
    """The example of a kind that default runs take."""
    return _all_examples(kind)[0]


@functools.cache
def _all_examples(kind: str) -> list[Example]:
    return EXAMPLES.get(kind) or [Example(kind)]


@torch.no_grad()
def _adapted(model: nn.Module) -> PeftModel:
    """A user's own adapter on attention and FFN, with random factors."""
    names = ["c_attn", "c_proj"] if hasattr(model.config, "n_embd") else ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=names, fan_in_fan_out=hasattr(model.config, "n_embd"))
    adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, SPREAD, generator=generator)
    return adapted.eval()


def _int8(model: nn.Module) -> nn.Module:
    """Weights of Linears as eight-bit integers."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


_HOSTS = {
    "": lambda model: model,
    "adapted": _adapted,
    "int8": _int8,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.to(torch.float16),
}
HOSTED = ("llama+int8", "gemma3+int8", "qwen3+adapted", "gpt2+adapted")
HALF = ("llama+bfloat16", "gemma3+bfloat16", "gpt2+bfloat16", "block-state+bfloat16", "qwen3+float16", "bert+bfloat16")
CAUSAL = (*DECODERS, *HOSTED)
BACKBONES = (*CAUSAL, *ENCODERS, *HALF)
FEW_BACKBONES = ("llama", "gemma3", "gpt2", "qwen3", "block-state", "llama+int8", "qwen3+adapted", "bert", "modernbert")


@functools.cache
def backbone(name: str) -> Backbone:
    """The tiny backbone `family` or `family+host`; one for the whole session, since no law may change it."""
    family, _, host = name.partition("+")
    return Backbone.wrap(_HOSTS[host](tiny_model(family)), tiny_tokenizer(), name)

"""Two random Llamas, composed, and copies of both with nothing attached: what the benchmark of compositions runs on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from turns import Clock, seconds

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.composition import Composition, CompositionConfig


@dataclass(frozen=True)
class Shape:
    """How large one model is."""

    width: int
    ffn: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Size:
    """How large the models and the work are."""

    anchor: Shape = Shape(1024, 2816, 24, 16)
    augmenting: Shape = Shape(512, 1408, 16, 8)
    vocabulary: int = 32_000
    stride: int = 4
    context: int = 128
    steps: int = 2
    """Decode steps per turn."""
    prompt: int = 16
    new_tokens: int = 256
    every: int = 32
    """Of the lengths of a generation, every so-many-th is timed."""
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    """Texts behind which one token is recomputed."""
    rows: int = 2
    length: int = 128
    decode_rounds: int = 21
    generate_rounds: int = 3
    train_rounds: int = 5


QUICK = Size(
    Shape(64, 128, 4, 4),
    Shape(32, 64, 4, 4),
    vocabulary=512,
    stride=2,
    context=16,
    prompt=4,
    new_tokens=16,
    every=4,
    lengths=(8, 16, 32, 64),
    length=16,
    decode_rounds=3,
    train_rounds=3,
)


class Pair:
    """Anchor and augmenting model, composed, and copies of both that know nothing of each other."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype, clock: Clock) -> None:
        self._clock: Clock = clock
        anchor, augmenting = (
            random_llama(shape, size.vocabulary, seed).to(device, dtype)  # type: ignore[arg-type]  # hidden by a wrapper
            for seed, shape in enumerate((size.anchor, size.augmenting))
        )
        self.anchor, self.augmenting = wrap(copy.deepcopy(anchor)), wrap(copy.deepcopy(augmenting))
        config = CompositionConfig.parse({"augmenting": {"specialist": {"name": "in memory"}}, "stride": size.stride})
        torch.manual_seed(2)
        backbone = wrap(anchor)
        self.graft = Composition(config, backbone, augmenting={"specialist": wrap(augmenting)}).to(dtype)
        write_something(self.graft)
        self.composed = GraftedModel(backbone, {"graft": self.graft})

    @property
    def models(self) -> dict[str, Any]:
        """The composed model and both parents."""
        return {"composed": self.composed.model, "anchor": self.anchor.model, "augmenting": self.augmenting.model}

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes."""
        return seconds(work, self.composed.device, self._clock)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The paired layers, the augmenting model's first."""
        return self.graft.config.augmenting["specialist"].pairs or []


def wrap(model: Any) -> Backbone:
    """A model in memory; both read the same tokens, so that no tokenizer is needed."""
    return Backbone.wrap(model, name="a random Llama")


def random_llama(shape: Shape, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A Llama with tied embeddings, as models of this size have; it never ends a text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def write_something(graft: Graft) -> None:
    """Random output matrices: at the start they are zero."""
    for name, parameter in graft.named_parameters():
        if name.endswith("w_o.weight"):
            parameter.normal_(0, 0.02)


def random_ids(size: Size, rows: int, length: int, device: torch.device) -> Tensor:
    """Random tokens."""
    return torch.randint(size.vocabulary, (rows, length), generator=torch.Generator().manual_seed(3)).to(device)


class Reader:
    """A model that reads on and on, with a cache."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model = model
        self.cache = DynamicCache(config=model.config)
        self.read(ids)

    @torch.inference_mode()
    def read(self, ids: Tensor) -> None:
        """Read more tokens, and predict the one after them."""
        mask = torch.ones(1, self.cache.get_seq_length() + ids.shape[1], dtype=torch.long, device=ids.device)
        self._model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self, token: Tensor, count: int) -> None:
        """Read one token `count` times over."""
        for _ in range(count):
            self.read(token)


def count(module: nn.Module) -> int:
    """Its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def weight_bytes(module: nn.Module) -> int:
    """Of its parameters, shared ones once."""
    return sum(bytes_of(parameter) for parameter in module.parameters())


def bytes_of(tensor: Tensor | None) -> int:
    """What a tensor holds."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()

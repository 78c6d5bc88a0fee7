"""The models of the composition benchmark: two random Llamas, composed, and a copy of each without a graft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from turns import Clock, seconds

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.composition import Composition, CompositionConfig


@dataclass(frozen=True)
class Shape:
    """The sizes of one model.

    Args:
        width: width of the hidden states.
        ffn: width of the feed-forward layers.
        layers: number of layers.
        heads: number of attention heads.
    """

    width: int
    ffn: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Size:
    """The sizes of the models and of the work.

    Args:
        anchor: shape of the anchor.
        augmenting: shape of the augmenting model.
        vocabulary: number of tokens of both models.
        stride: stride of the pairs of layers.
        context: number of cached tokens in the measurement of a decode step.
        steps: decode steps per turn.
        prompt: number of tokens of the prompt of a generation.
        new_tokens: number of tokens that a generation adds.
        every: of the lengths of a generation, every `every`-th is timed.
        lengths: lengths of the texts after which one token is recomputed.
        rows: rows of a training batch.
        length: tokens of each row of a training batch.
        decode_rounds: rounds of the measurement of a decode step.
        generate_rounds: rounds of the measurement of a generation.
        train_rounds: rounds of the measurement of a training step.
    """

    anchor: Shape = Shape(width=1024, ffn=2816, layers=24, heads=16)
    augmenting: Shape = Shape(width=512, ffn=1408, layers=16, heads=8)
    vocabulary: int = 32_000
    stride: int = 4
    context: int = 128
    steps: int = 2
    prompt: int = 16
    new_tokens: int = 256
    every: int = 32
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    rows: int = 2
    length: int = 128
    decode_rounds: int = 21
    generate_rounds: int = 3
    train_rounds: int = 5


QUICK = Size(
    anchor=Shape(width=64, ffn=128, layers=4, heads=4),
    augmenting=Shape(width=32, ffn=64, layers=4, heads=4),
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
    """An anchor and an augmenting model, composed, and a copy of each without a graft.

    Args:
        size: sizes of the models.
        device: device of the models.
        dtype: dtype of the weights.
        clock: clock of the measurements.
    """

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype, clock: Clock) -> None:
        self._clock: Clock = clock
        anchor: Any = random_llama(size.anchor, size.vocabulary, seed=0)
        augmenting: Any = random_llama(size.augmenting, size.vocabulary, seed=1)
        anchor = anchor.to(device, dtype)
        augmenting = augmenting.to(device, dtype)
        self.anchor = wrap(copy.deepcopy(anchor))
        self.augmenting = wrap(copy.deepcopy(augmenting))
        config = CompositionConfig.parse({"augmenting": {"specialist": {"name": "in memory"}}, "stride": size.stride})
        torch.manual_seed(2)
        backbone = wrap(anchor)
        graft = Composition(config, backbone, augmenting={"specialist": wrap(augmenting)})
        self.graft = graft.to(dtype)
        randomise_outputs(self.graft)
        self.composed = GraftedModel(backbone, {"graft": self.graft})

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The composed model and both parents."""
        return {
            "composed": self.composed.model,
            "anchor": self.anchor.model,
            "augmenting": self.augmenting.model,
        }

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the duration of `work` in seconds."""
        return seconds(work, self.composed.device, self._clock)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of layers, (layer of the augmenting model, layer of the anchor)."""
        return self.graft.config.augmenting["specialist"].pairs or []


def wrap(model: PreTrainedModel) -> Backbone:
    """Return a backbone without a tokenizer, which both models then share."""
    return Backbone.wrap(model, name="a random Llama")


def random_llama(shape: Shape, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Return a random Llama with tied embeddings, as models of this size have, and without an end-of-text token."""
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
def randomise_outputs(graft: Graft) -> None:
    """Set the output matrices, which are initially zero, to random values."""
    for name, parameter in graft.named_parameters():
        if name.endswith("w_o.weight"):
            parameter.normal_(0, 0.02)


def random_ids(size: Size, rows: int, length: int, device: torch.device) -> Tensor:
    """Return random tokens, (rows, length)."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(size.vocabulary, (rows, length), generator=generator).to(device)


class Reader:
    """Reads text with a model and a cache.

    Args:
        model: the model.
        ids: (1, T) the context, which is read at once.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self._model = model
        self.cache = DynamicCache(config=model.config)
        self.read(ids)

    @torch.inference_mode()
    def read(self, ids: Tensor) -> None:
        """Read more tokens, and predict the one after them."""
        length = self.cache.get_seq_length() + ids.shape[1]
        mask = torch.ones(1, length, dtype=torch.long, device=ids.device)
        self._model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def step(self, token: Tensor, count: int) -> None:
        """Read one token `count` times."""
        for _ in range(count):
            self.read(token)


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters; shared ones are counted once."""
    return sum(bytes_of(parameter) for parameter in module.parameters())


def bytes_of(tensor: Tensor | None) -> int:
    """Return the bytes of a tensor's elements; 0 for None."""
    if tensor is None:
        return 0
    return tensor.numel() * tensor.element_size()

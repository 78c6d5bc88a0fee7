"""The models of the token-routing benchmark: a random Llama and random LoRA adapters in folders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pair import Shape, random_llama
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, DynamicCache, PreTrainedTokenizerFast
from turns import Clock, Turns, rounds, seconds

from graftlm.backbone import Backbone, Call
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.token_routing import TokenRouting, TokenRoutingConfig

SHAPE = Shape(width=1024, ffn=2816, layers=24, heads=16)
QUICK_SHAPE = Shape(width=64, ffn=128, layers=4, heads=4)
ENCODER = Shape(width=384, ffn=1536, layers=6, heads=12)
QUICK_ENCODER = Shape(width=32, ffn=64, layers=2, heads=2)
SPECIAL = {"eos_token": "<eos>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of the work.

    Args:
        shape: shape of the backbone.
        vocabulary: number of tokens.
        experts: number of experts.
        rank: rank of each of them.
        low_rank: rank of each expert in the measurement of many experts.
        context: number of cached tokens before a decode step.
        lengths: lengths of the texts after which peers are timed.
        encoder: shape of the published embedder, MiniLM.
        longest: length of the longest text in the measurement of the share of routing.
        rows: number of rows of a batch.
        short: length of the context of many rows and of many experts.
        steps: decode steps per turn.
        decode_rounds: rounds of the measurement of a decode step.
        peer_rounds: rounds of the measurement of peers.
        share_rounds: rounds of the measurement of the share of routing.
        batch_rounds: rounds of the measurement of a batch.
        many_rounds: rounds of the measurement of many experts.
    """

    shape: Shape = SHAPE
    vocabulary: int = 32_000
    experts: int = 4
    rank: int = 64
    low_rank: int = 16
    context: int = 128
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    encoder: Shape = ENCODER
    longest: int = 512
    rows: int = 16
    short: int = 32
    steps: int = 2
    decode_rounds: int = 11
    peer_rounds: int = 3
    share_rounds: int = 5
    batch_rounds: int = 5
    many_rounds: int = 5


QUICK = Size(
    QUICK_SHAPE,
    vocabulary=512,
    rank=8,
    low_rank=2,
    context=16,
    lengths=(16, 24, 32, 48),
    encoder=QUICK_ENCODER,
    longest=64,
    short=16,
    decode_rounds=3,
    peer_rounds=3,
    share_rounds=3,
    batch_rounds=3,
    many_rounds=3,
)


class RoutingBenchmark:
    """A random backbone with adapters in folders, and the models built from them, which share its weights.

    Args:
        size: sizes of the models.
        folder: folder to which adapters are written.
        device: device of the models.
        clock: clock of the measurements.
    """

    def __init__(self, size: Size, folder: Path, device: torch.device, clock: Clock) -> None:
        self.size = size
        self.device = device
        self.folder = folder
        self.clock: Clock = clock
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model: Any = random_llama(size.shape, size.vocabulary, seed=0)
        self.model: Any = model.to(device, self.dtype)
        self.tokenizer = word_tokenizer(size.vocabulary)
        self.adapters = self.write(size.experts, size.rank)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the duration of `work` in seconds."""
        return seconds(work, self.device, self.clock)

    def write(self, number: int, rank: int) -> list[Path]:
        """Write `number` PEFT adapters with random factors, and return their folders."""
        config = LoraConfig(
            r=rank,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj"],
            init_lora_weights=False,
        )
        peft = get_peft_model(self.shared(), config)
        generator = torch.Generator().manual_seed(1)
        folders = [self.folder / f"rank-{rank}-{n}" for n in range(number)]
        for folder in folders:
            with torch.no_grad():
                for parameter in lora_parameters(peft):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            peft.save_pretrained(str(folder), save_embedding_layers=False)
        return folders

    def shared(self) -> Any:
        """Return another instance of the backbone that shares the weights in memory."""
        parameters = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, parameters)

    def routed(self, graft: TokenRouting, backbone: Backbone) -> Any:
        """Return a model with a routing graft."""
        return GraftedModel(backbone, {"graft": graft}).eval().model

    def routing(self, adapters: Sequence[Path], **settings: Any) -> tuple[Any, Clocked]:
        """Return a model with a routing between adapters, and its graft."""
        experts = {f"expert{n}": {"path": str(folder)} for n, folder in enumerate(adapters)}
        backbone = self.backbone()
        config = TokenRoutingConfig.parse({"experts": experts, **settings})
        graft = Clocked(config, backbone, self.clock)
        graft.fit({name: [random_words(n, self.size.vocabulary)] for n, name in enumerate(experts)})
        return self.routed(graft, backbone), graft

    def again(self, graft: Clocked, **changes: Any) -> tuple[Any, Clocked]:
        """Return another model with the same experts in memory and a changed config."""
        other = copy.copy(graft)
        other.config = graft.config.model_copy(update=changes)
        return self.routed(other, self.backbone()), other

    def backbone(self) -> Backbone:
        """Return another backbone with the same weights."""
        return Backbone.wrap(self.shared(), self.tokenizer, "a random Llama")

    def peft(self, number: int) -> PeftModel:
        """Return PEFT's model with the first `number` adapters, unmerged, of which the first is active."""
        first, *others = self.adapters[:number]
        peft = PeftModel.from_pretrained(self.shared(), str(first), "0", autocast_adapter_dtype=False)
        for n, folder in enumerate(others, 1):
            peft.load_adapter(str(folder), str(n), autocast_adapter_dtype=False)
        return peft.eval()

    def xlora(self) -> Any:
        """Return PEFT's X-LoRA with all adapters and an untrained classifier."""
        model = self.shared()
        model.config.use_cache = False
        config = XLoraConfig(
            task_type="CAUSAL_LM",
            hidden_size=self.size.shape.width,
            adapters={str(n): str(folder) for n, folder in enumerate(self.adapters)},
        )
        xlora = get_peft_model(model, config, autocast_adapter_dtype=False)
        return xlora.to(self.dtype).eval()

    def encoder(self) -> Any:
        """Return a random BERT of the size of the published embedder."""
        shape = self.size.encoder
        config = BertConfig(
            vocab_size=30_522,
            hidden_size=shape.width,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
        )
        bert: Any = BertModel(config)
        return bert.to(self.device, self.dtype).eval()

    def ids(self, rows: int, length: int, seed: int = 3) -> Tensor:
        """Return random tokens, (rows, length)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, self.size.vocabulary, (rows, length), generator=generator).to(self.device)

    def step(self, reader: Reader) -> float:
        """Return the seconds of a decode step; every second step has a route update."""
        steps = self.size.steps
        return self.seconds(partial(reader.step, steps)) / steps

    def decode(self, models: Mapping[str, Any], ids: Tensor, count: int) -> Turns:
        """Return the seconds of a decode step of each model after the same text, in alternation."""
        turns = {name: partial(self.step, Reader(model, ids)) for name, model in models.items()}
        return rounds(turns, count)


class Clocked(TokenRouting):
    """A routing that measures the seconds of its `prepare`.

    Args:
        config: configuration of the routing.
        backbone: the backbone.
        clock: clock of the measurement.
    """

    def __init__(self, config: TokenRoutingConfig, backbone: Backbone, clock: Clock) -> None:
        super().__init__(config, backbone)
        self.spent = 0.0
        self._device = backbone.device
        self._clock: Clock = clock

    def prepare(self, call: Call) -> None:
        self.spent += seconds(partial(TokenRouting.prepare, self, call), self._device, self._clock)


class Reader:
    """Reads random text with a model and a cache.

    Args:
        model: the model.
        ids: (B, T) the context.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model = model
        self.cache = DynamicCache(config=model.config)
        generator = torch.Generator().manual_seed(4)
        more = torch.randint(2, model.config.vocab_size, (1, 256), generator=generator)
        self._more = more.to(ids.device).expand(len(ids), -1)
        self._next = 0
        self._read(ids)

    @torch.inference_mode()
    def _read(self, ids: Tensor) -> None:
        length = self.cache.get_seq_length() + ids.shape[1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        self._model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def step(self, number: int) -> None:
        """Read `number` more tokens, one at a time."""
        for _ in range(number):
            self._read(self._more[:, self._next : self._next + 1])
            self._next += 1


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; the first two tokens are special."""
    words = list(SPECIAL.values())
    words += [f"w{n}" for n in range(len(SPECIAL), vocabulary)]
    ids = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def random_words(seed: int, vocabulary: int) -> str:
    """Return random text for a centroid."""
    generator = torch.Generator().manual_seed(100 + seed)
    numbers = torch.randint(2, vocabulary, (64,), generator=generator).tolist()
    return " ".join(f"w{n}" for n in numbers)


def lora_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the factors of PEFT's adapters."""
    return [parameter for name, parameter in module.named_parameters() if ".lora_" in name]

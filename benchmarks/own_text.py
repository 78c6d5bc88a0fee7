"""The speed of sampling own text: slots in which new texts replace those that have ended, beside batches of `generate`.

    python benchmarks/own_text.py --out DIR [--quick] [--device DEVICE] [--clock cpu]

Both ways sample the same texts, up to rounding. A batch of `generate` takes as long as its longest text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from turns import AT_LEAST, Clock, command, interval, made_aim, rounds, seconds

from graftlm.backbone import Backbone, load_backbone
from graftlm.data.own_text_sampling import OwnTextSampler
from graftlm.data.source_config import SelfSourceConfig
from graftlm.evaluation import Results, Row
from graftlm.testing.tiny import tiny_model, tiny_tokenizer

NAME = "bench-own-text"
ROWS = {"free_text": "tokens per second of free text", "conversations": "tokens per second of conversations"}
AIM = (AT_LEAST, 1.0)
WAYS = ("batches", "slots")


@dataclass(frozen=True)
class Size:
    """How much is sampled.

    Attributes:
        texts: number of texts of a turn.
        at_once: number of texts that are sampled at once.
        length: maximum number of tokens of a text.
        rounds: number of rounds, in each of which both ways sample.
    """

    texts: int = 64
    at_once: int = 32
    length: int = 128
    rounds: int = 3


QUICK = Size(texts=8, at_once=4, length=64, rounds=1)


class Sampling:
    """One way to sample one kind of text.

    Args:
        backbone: the model.
        size: how much is sampled.
        kind: a key of `ROWS`.
        way: one of `WAYS`.
        clock: the clock of the measurement.
    """

    def __init__(self, backbone: Backbone, size: Size, kind: str, way: str, clock: Clock) -> None:
        self._device = backbone.device
        self._size = size
        self._is_chat = kind == "conversations"
        self._clock = clock
        config = SelfSourceConfig(
            self=True,
            tokens=size.texts * size.length,
            chat_fraction=float(self._is_chat),
            batch_size=size.at_once,
        )
        self._sampler = OwnTextSampler(backbone, config, size.length)
        if way == "batches":
            self._sampler._sampler._has_slots = False
        self._number = 0
        self.tokens = 0

    def speed(self) -> float:
        """Return the tokens per second of the next texts, which are other ones in each round."""
        taken = seconds(self._sample, self._device, self._clock)
        return self.tokens / taken

    def _sample(self) -> None:
        texts = self._sampler._sample(self._number, self._size.texts, is_chat=self._is_chat)
        self._number += 1
        self.tokens = sum(text.tokens for text in texts)


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Measure both kinds of text."""
    size = QUICK if quick else Size()
    backbone = tiny_backbone() if quick else load_backbone("smollm2-135m-instruct", device=str(device))
    rows = []
    aims = []
    speeds = {}
    for kind, label in ROWS.items():
        turns = {way: Sampling(backbone, size, kind, way, clock).speed for way in WAYS}
        speeds[kind] = rounds(turns, size.rounds)
        ratio = interval([ours / theirs for theirs, ours in zip(*speeds[kind].values(), strict=True)])
        rows.append(Row(id=kind, label=f"{label}, slots over batches", metrics={"ratio": ratio}))
        aims.append(made_aim(f"{label}, slots over batches", "ratio", AIM, None if quick else ratio.mean))
    details = {
        "size": asdict(size),
        "model": backbone.name,
        "dtype": str(backbone.model.dtype),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "tokens_per_s": speeds,
    }
    return Results.here(NAME, rows, aims=aims, details=details)


def tiny_backbone() -> Backbone:
    """Return a random backbone whose chat template ends turns with a token that it samples."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[tokenizer.eos_token_id] = 5.0
    return Backbone.wrap(model, tokenizer, "tiny")


if __name__ == "__main__":
    command(NAME, "The speed of sampling own text.", benchmark, dict.fromkeys(ROWS, AIM[1]))

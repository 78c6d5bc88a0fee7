"""How fast rows are drawn: from four weighted sources, over one source with the same text.

    python benchmarks/loading.py --out DIR [--quick] [--clock CLOCK]

A turn draws batches, which includes what collating costs and, of streams, reading and tokenizing text. All mixtures
take their turns in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from turns import AT_LEAST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.data import DataConfig, Mixture, build_mixture
from graftlm.evaluation import Results, Row
from graftlm.training.language_model import train_tokenizer

NAME = "bench-loading"
AIM = 0.95
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
ROWS = {
    "memory": "rows per second from memory, four weighted sources over one",
    "streams": "rows per second from streams, four weighted sources over one",
}
OVER = {"memory": "one_in_memory", "streams": "one_stream"}


@dataclass(frozen=True)
class Size:
    """The sizes of the texts and of the work.

    Attributes:
        words: words of each of the four texts.
        vocabulary: maximum number of tokens of the tokenizer, which is learned from the texts.
        length: tokens of a row.
        rows: rows of a batch.
        memory_batches: batches of a turn from memory.
        stream_batches: batches of a turn from streams.
        rounds: number of rounds.
    """

    words: int = 200_000
    vocabulary: int = 8192
    length: int = 256
    rows: int = 16
    memory_batches: int = 1_000
    stream_batches: int = 200
    rounds: int = 9


SIZE = Size()
QUICK = replace(SIZE, words=5_000, vocabulary=512, length=32, memory_batches=20, stream_batches=5, rounds=3)


def write_texts(folder: Path, size: Size) -> list[str]:
    """Write four texts of random words, one paragraph a file, and return their folders."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(generator.choice(letters, count)) for count in generator.integers(2, 9, 5_000)]
    folders = []
    for number in range(len(WEIGHTS)):
        own = folder / str(number)
        own.mkdir()
        drawn = generator.zipf(1.3, size.words) % len(words)
        for part, chosen in enumerate(np.array_split(drawn, max(1, size.words // 1_000))):
            text = " ".join(words[word] for word in chosen)
            (own / f"{part:05}.txt").write_text(text, encoding="utf-8")
        folders.append(str(own))
    return folders


def build(
    folders: list[str],
    weights: tuple[float | None, ...],
    streaming: tuple[bool, ...],
    size: Size,
    tokenizer: PreTrainedTokenizerBase,
) -> Mixture:
    """Return the mixture of some texts."""
    chosen = zip(folders, weights, streaming, strict=True)
    sources = [{"path": path, "weight": weight, "streaming": streams} for path, weight, streams in chosen]
    config = DataConfig.parse({"new": sources, "replay_fraction": 0, "length": size.length})
    return build_mixture(config, tokenizer, size.rows)


class Loading:
    """Draws the batches of a mixture in order.

    Args:
        mixture: the mixture.
        batches: number of batches of a turn.
        clock: clock of the measurement.
    """

    def __init__(self, mixture: Mixture, batches: int, clock: Clock) -> None:
        self._mixture = mixture
        self._batches = batches
        self._clock: Clock = clock
        self._step = 0

    def speed(self) -> float:
        """Return the rows per second of one turn."""
        rows = self._batches * self._mixture.batch_size
        return rows / seconds(self._draw, torch.device("cpu"), self._clock)

    def _draw(self) -> None:
        for _ in range(self._batches):
            self._mixture.batch(self._step)
            self._step += 1


def measure(size: Size, clock: Clock) -> Turns:
    """Return the rows per second of all mixtures in each round."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        folders = write_texts(texts, size)
        first = [path.read_text(encoding="utf-8") for path in sorted(Path(folders[0]).iterdir())]
        tokenizer = train_tokenizer(first, size.vocabulary)
        one = [folder]  # the same text: all four folders

        def loading(chosen: list[str], streaming: tuple[bool, ...]) -> Callable[[], float]:
            weights = WEIGHTS if len(chosen) > 1 else (None,)
            mixture = build(chosen, weights, streaming, size, tokenizer)
            batches = size.stream_batches if any(streaming) else size.memory_batches
            return Loading(mixture, batches, clock).speed

        turns = {
            "one_in_memory": loading(one, (False,)),
            "memory": loading(folders, (False,) * 4),
            "one_stream": loading(one, (True,)),
            "streams": loading(folders, (True,) * 4),
        }
        return rounds(turns, size.rounds)


def benchmark(size: Size, clock: Clock, *, decided: bool) -> Results:
    """Measure all rows.

    Args:
        size: sizes of the texts and of the work.
        clock: clock of the measurements.
        decided: whether the aims apply, which they do not for small texts.
    """
    speeds = measure(size, clock)
    rows = []
    aims = []
    for name, label in ROWS.items():
        pairs = zip(speeds[name], speeds[OVER[name]], strict=True)
        ratio = interval([many / one for many, one in pairs])
        rows.append(Row(id=name, label=label, metrics={"ratio": ratio}))
        aims.append(made_aim(label, "ratio", (AT_LEAST, AIM), ratio.mean if decided else None))
    details = {
        "size": asdict(size),
        "weights": list(WEIGHTS),
        "clock": clock,
        "threads": torch.get_num_threads(),
        "rows_per_s": speeds,
    }
    return Results.here(NAME, rows, aims=aims, details=details)


if __name__ == "__main__":
    command(
        NAME,
        "How fast rows are drawn from several weighted sources, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else SIZE, clock, decided=not quick),
        dict.fromkeys(ROWS, AIM),
        options=("clock",),
    )

"""Text that a backbone samples itself: what it knows, without its training data.

Free text begins as a document of the backbone's training does. Of a conversation the model writes both sides: the
user's turn behind the chat template's beginning, then the answer behind the template's header of an answer.

Samples are token ids, as they were drawn. A file holds one line for each batch, so that an interrupted sampling goes on
behind the last complete line: a batch depends on the seed, its number and the batches before it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence
from rich.progress import MofNCompleteColumn

from graftlm.backbone import Backbone, end_ids, generate_rows, leading_bos, max_sequence_length
from graftlm.backbone.patching import replaced_attributes
from graftlm.data.chats import render_question
from graftlm.data.marked_ids import PROMPT
from graftlm.data.sources import SelfSourceConfig
from graftlm.errors import DataError, first_line
from graftlm.files.writing import write_errors
from graftlm.progress import progress_bar

_DOCUMENT_SEPARATOR = "<|endoftext|>"
_CONTENT = "the-content-of-the-user"  # a stand-in, in whose place the model writes
_BARREN_BATCHES = 3
_MIN_TURN = 8


@dataclass(frozen=True)
class OwnText:
    """One sampled text: its tokens, with those that it was begun with.

    `turns` has (start, stop) of each part that the model sampled: one of free text, two of a conversation.
    """

    ids: list[int]
    turns: list[tuple[int, int]]

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return len(self.turns) > 1

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(stop - start for start, stop in self.turns)


def sample_own_text(
    backbone: Backbone,
    config: SelfSourceConfig,
    length: int,
    path: Path,
    *,
    key: str = "",
    model: Any = None,
    progress: bool = True,
) -> list[OwnText]:
    """The backbone's own samples, from `path` as far as an interrupted call left them there; it gets the rest.

    Args:
        backbone: grafts that are attached to it don't act.
        length: most tokens of a text where the config names none.
        path: the file of samples, one JSON line for each batch.
        key: what the file belongs to; a file with another key is written anew.
        model: what samples in the backbone's place, such as a `GraftedModel` on it; None is the bare backbone.

    Raises BackboneError if the backbone has no tokenizer, and DataError if the backbone is an encoder, has no chat
    template for the conversations that are asked for, or ends its texts at once.
    """
    sampler = _Sampler(backbone, config, config.length or length, model)
    with write_errors(path, DataError, "free some space, and run the same command to go on"):
        return _sample_to(path, sampler, config, key, progress)


def _sample_to(path: Path, sampler: _Sampler, config: SelfSourceConfig, key: str, progress: bool) -> list[OwnText]:
    lines = _read_lines(path, key)
    samples = [sample for line in lines for sample in line]
    bar = progress_bar("sampling", config.tokens, MofNCompleteColumn(), "tokens", show=progress)
    with bar as update, path.open("ab") as file:
        if not lines:
            file.truncate(0)
            file.write(json.dumps({"key": key}).encode() + b"\n")
        for stop in range(1, len(lines) + 1):
            sampler.check_yield(lines[:stop])
        while (total := sum(sample.tokens for sample in samples)) < config.tokens:
            update(completed=total)
            batch = sampler.batch(len(lines), samples, config.tokens - total)
            lines.append(batch)
            samples += batch
            file.write(json.dumps([asdict(sample) for sample in batch]).encode() + b"\n")
            file.flush()
            sampler.check_yield(lines)
        update(completed=config.tokens)
    return samples


def read_own_text(path: Path) -> list[OwnText]:
    """The samples of a file. Raises DataError if the file is missing or damaged."""
    try:
        _, *lines = path.read_text(encoding="utf-8").splitlines()
        return [_sample(values) for line in lines for values in json.loads(line)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"The sampled text {path} can't be read ({first_line(error)}): remove it, and it is sampled again."
        raise DataError(why) from None


def _sample(values: dict[str, Any]) -> OwnText:
    return OwnText([int(token) for token in values["ids"]], [(int(a), int(b)) for a, b in values["turns"]])


def _read_lines(path: Path, key: str) -> list[list[OwnText]]:
    """The complete batches of an interrupted sampling; what follows them is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
        if json.loads(first) != {"key": key}:
            return []
    except (OSError, ValueError):
        return []
    batches, size = [], len(first)
    for line in lines:
        try:
            batches.append([_sample(values) for values in json.loads(line)])
        except (ValueError, KeyError, TypeError):
            break
        size += len(line)
    with path.open("r+b") as file:
        file.truncate(size)
    return batches


class _Sampler:
    """Samples batches of one backbone."""

    def __init__(self, backbone: Backbone, config: SelfSourceConfig, length: int, model: Any = None) -> None:
        self.name = backbone.name
        self._tokenizer: Any = backbone.need_tokenizer()
        if not (backbone.sites.family.causal and backbone.model.can_generate()):
            raise DataError(
                f"The backbone {backbone.name} can't sample text, as it is no causal language model: name real text "
                "under data.old, and set evaluation.own_tokens to 0."
            )
        if (limit := max_sequence_length(backbone.model)) < length:
            why = f"Samples of {length} tokens do not fit the backbone, which has {limit} positions: lower the length."
            raise DataError(why)
        self._model: Any = backbone.bare_model if model is None else model
        self._live: Any = self._model if model is None else backbone.model
        self._config, self._length = config, length
        self._ends = end_ids(backbone.model, self._tokenizer)
        self._chat_fraction, self._template = self._chats(backbone.name)
        self._starts = self._free_starts(backbone.name) if self._chat_fraction < 1 else []

    def _chats(self, name: str) -> tuple[float, tuple[list[int], list[int]]]:
        """The share of conversations, and the parts of the chat template; by default none without a usable one."""
        fraction = self._config.chat_fraction
        if fraction == 0 or (fraction is None and not self._tokenizer.chat_template):
            return 0.0, ([], [])
        try:
            return 0.5 if fraction is None else fraction, self._split_template(name)
        except DataError:
            if fraction is None:
                return 0.0, ([], [])
            raise

    def batch(self, number: int, samples: Sequence[OwnText], needed: int) -> list[OwnText]:
        """The next samples: of the kind of which more is missing, until its share of all tokens is reached."""
        from transformers import GenerationConfig  # which imports the models

        chats = sum(sample.tokens for sample in samples if sample.is_chat)
        missing = self._chat_fraction * (sum(sample.tokens for sample in samples) + needed) - chats
        is_chat = missing > needed - missing  # more of conversations than of free text
        needed = min(needed, max(1, math.ceil(missing if is_chat else needed - missing)))
        rows = min(self._config.batch_size, math.ceil(needed / self._length) + 1)
        device = self._model.device
        devices = [] if device.type == "cpu" else [device]
        # Settings of the checkpoint's generation config, such as its penalties, are left out.
        plain = replaced_attributes(self._live, generation_config=GenerationConfig())
        with torch.random.fork_rng(devices, device_type=device.type), plain:
            torch.manual_seed(int(SeedSequence([self._config.seed, number]).generate_state(1)[0]))
            made = list(self._conversations(rows) if is_chat else self._free_texts(rows, number))
        before = accumulate((sample.tokens for sample in made), initial=0)
        return [sample for sample, total in zip(made, before, strict=False) if total < needed]

    def check_yield(self, batches: Sequence[Sequence[OwnText]]) -> None:
        """Leave out conversations for which nobody asked, or raise, when batch upon batch brings nothing."""
        barren = sum(1 for _ in takewhile(operator.not_, reversed(batches)))
        if not barren or barren % _BARREN_BATCHES:
            return
        samples = [sample for batch in batches for sample in batch]
        if not self._chat_fraction or self._config.chat_fraction is not None:
            raise DataError(self._nothing_usable(samples, barren))
        self._chat_fraction = 0.0
        self._starts = self._free_starts(self.name)

    def _nothing_usable(self, samples: Sequence[OwnText], barren: int) -> str:
        total = sum(sample.tokens for sample in samples)
        some_free = any(not sample.is_chat for sample in samples)
        only_chats = self._chat_fraction == 1 or (self._chat_fraction > 0 and some_free)
        what = "no conversation whose user's turn ends" if only_chats else "nothing but texts that end at once"
        way = "raise the length, set chat_fraction to 0" if only_chats else "try a temperature of 1"
        return (
            f"The backbone {self.name} samples {what} ({barren} batches of at most {self._config.batch_size} texts of "
            f"{self._length} tokens, after {total:,} of {self._config.tokens:,} tokens): {way}, or name real text "
            "under data.old; for own_kl, set evaluation.own_tokens to 0."
        )

    def _free_texts(self, rows: int, number: int) -> Iterator[OwnText]:
        first = number * self._config.batch_size
        starts = [self._starts[(first + row) % len(self._starts)] for row in range(rows)]
        ends = self._ends | ({starts[0][0]} if leading_bos(self._tokenizer) is None else set())
        for _, group in groupby(sorted(starts, key=len), len):  # each to its full length
            openings = list(group)
            for start, new in zip(openings, self._continue(openings, ends, self._length), strict=True):
                if new and new[0] not in ends:
                    yield OwnText(start + new, [(len(start), len(start) + len(new))])

    def _conversations(self, rows: int) -> Iterator[OwnText]:
        before, after = self._template
        budget = self._length - len(before) - len(after)
        turns = self._continue([before] * rows, self._ends | {after[0]}, len(before) + budget // 2)
        ended = [turn for turn in turns if len(turn) > 1 and turn[-1] == after[0]]
        prompts = [before + turn + after[1:] for turn in ended]
        answers = self._continue(prompts, self._ends, self._length) if prompts else []
        for turn, prompt, answer in zip(ended, prompts, answers, strict=True):
            if answer:
                parts = [(len(before), len(before) + len(turn)), (len(prompt), len(prompt) + len(answer))]
                yield OwnText(prompt + answer, parts)

    @torch.no_grad()
    def _continue(self, prompts: list[list[int]], ends: set[int], length: int) -> list[list[int]]:
        """Sampled tokens behind each prompt, up to and with the first end, to at most `length` in all."""
        width = max(map(len, prompts))
        if length <= width:
            return [[] for _ in prompts]
        options = {"temperature": self._config.temperature, "top_p": self._config.top_p, "top_k": 0, "do_sample": True}
        return generate_rows(self._model, self._tokenizer, prompts, ends, max_new_tokens=length - width, **options)

    def _free_starts(self, name: str) -> list[list[int]]:
        """The tokens with which free texts begin in turn."""
        tokenizer = self._tokenizer
        known = tokenizer.get_vocab().get(_DOCUMENT_SEPARATOR)
        starts = (leading_bos(tokenizer), known, tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = next(([token] for token in starts if isinstance(token, int)), [])
        openings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in self._config.openings]
        if not start and not all(openings or [[]]):
            raise DataError(
                f"The tokenizer of {name} has no token with which a text begins or ends: name openings for the "
                "backbone's own text, and set evaluation.own_tokens to 0."
            )
        if (longest := max(map(len, openings), default=0)) + len(start) >= self._length:
            raise DataError(
                f"An opening has {longest} tokens, but a text has {self._length} at most: shorten it, or raise length."
            )
        return [start + opening for opening in openings or [[]]]

    def _split_template(self, name: str) -> tuple[list[int], list[int]]:
        """The chat template's tokens before a user's first turn, and from its end to the beginning of the answer."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise DataError(
                f"The tokenizer of {name} has no chat template for conversations: set chat_fraction to 0, or name a "
                "chat model."
            )
        try:
            text = render_question([{"role": "user", "content": _CONTENT}], tokenizer)
        except DataError:
            raise DataError(f"The chat template of {name} can't be filled: set chat_fraction to 0.") from None
        before, content, after = text.partition(_CONTENT)
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
        if not content or not all(ids) or ids[1][0] not in tokenizer.added_tokens_decoder:
            raise DataError(f"The chat template of {name} has no token that ends a user turn: set chat_fraction to 0.")
        if self._length < sum(map(len, ids)) + 2 * _MIN_TURN:
            raise DataError(
                f"The chat template of {name} takes {sum(map(len, ids))} tokens, but a text has at most "
                f"{self._length}: raise the length, or set chat_fraction to 0."
            )
        return ids[0], ids[1]


def marked_ids(sample: OwnText) -> np.ndarray:
    """A sample as marked ids (n,) of `packing`: what a conversation or an opening begins with is its prompt."""
    start = sample.turns[0][0]
    ids = np.array(sample.ids, dtype=np.int32)
    if start > 1:
        ids[:start] |= PROMPT
    ids[0] = ~ids[0]
    return ids

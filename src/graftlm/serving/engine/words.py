"""Text out of tokens as they come: whole characters only, and nothing that may begin a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_CONTEXT = 6  # tokens of the prompt that say how the first new one is to be read, such as with a space before it
_PART = "\ufffd"  # what decoders give for a character that is not whole


class Words:
    """The text of one continuation.

    A token is decoded with some before it, as the same token may say another thing at the start of a text.

    Args:
        tokenizer: the backbone's.
        prompt: token ids.
        stops: strings before which the text ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode = _decoder(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._ids = _end_of(prompt, set(tokenizer.all_special_ids), self._decode)
        self._start, self._read = 0, len(self._ids)
        self._before = self._decode(self._ids)
        self._shown = len(self._before)
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """What can be shown now that this token has come, and whether a stop string has."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        ready = text.rstrip(_PART)
        new = self._news(ready, text)
        if new:
            self._shown, self._before = len(ready), ""
            if ready == text:
                self._start, self._read = self._read, len(self._ids)
                self._shown = len(self._decode(self._ids[self._start :]))
        return self._past_stops(new)

    def rest(self) -> str:
        """What was held back, once it is known that nothing more comes."""
        text = self._decode(self._ids[self._start :])
        return self._held + self._news(text, text)

    def _news(self, ready: str, text: str) -> str:
        if self._before.endswith(_PART):  # the prompt ended within a character, which may be whole by now
            return ready[_common(self._before, text) :]
        return ready[self._shown :]

    def _past_stops(self, new: str) -> tuple[str, bool]:
        if not self._stops or not new:
            return new, False
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        begun = max(_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun], False


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _end_of(prompt: Sequence[int], special: set[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The last tokens of a prompt: some that say something, if any do, and from the start of a character on."""
    count = _CONTEXT
    while count < len(prompt):
        end = list(prompt[-count:])
        if sum(token not in special for token in end) >= _CONTEXT // 2 and not decode(end).startswith(_PART):
            return end
        count *= 2
    return list(prompt)


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    shorter = min(len(one), len(other))
    return next((n for n in range(shorter) if one[n] != other[n]), shorter)

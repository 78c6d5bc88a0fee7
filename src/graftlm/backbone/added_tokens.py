"""Tokens that are added to a tokenizer, for the grafts of a backbone whose own vocabulary does not change.

Tokens have one of two forms:

    texts     each text is one token wherever it occurs, also inside longer words; tokenizers calls it an `AddedToken`
    merges    pairs of tokens that are joined after all merges of a byte pair encoding were applied, so that a token
              never crosses the border of a word

In both forms, text in which no new token occurs has the ids that it had before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from graftlm.errors import BackboneError, shorten

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

MOST_TOKENS = 100_000
"""The largest number of tokens that can be added."""


@dataclass(frozen=True)
class AddedTokens:
    """Tokens to add to a tokenizer.

    Attributes:
        texts: the tokens in the order of their ids: texts, or with merges the names that they have in the tokenizer.
        merges: the names of the two tokens of each merge, in the order in which they are applied; empty for texts.
    """

    texts: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Check the tokens without a tokenizer.

        Raises:
            BackboneError: there are none or too many, or one is empty, only whitespace, or there twice.
        """
        if not 1 <= len(self.texts) <= MOST_TOKENS:
            raise BackboneError(
                f"The number of tokens to add is {len(self.texts):,}, but 1 to {MOST_TOKENS:,} are expected: name "
                "fewer in add_tokens, or leave it out."
            )
        seen: set[str] = set()
        for text in self.texts:
            if not text.strip():
                raise BackboneError(
                    f"The token to add {text!r} is empty or only whitespace, but a text is expected: remove it from "
                    "add_tokens."
                )
            if text in seen:
                raise BackboneError(f"The token {shorten(text)!r} is in add_tokens twice: name it once.")
            seen.add(text)


@dataclass(frozen=True, eq=False)
class ExtendedVocabulary:
    """A tokenizer with added tokens, whose ids follow those of the old tokens.

    Attributes:
        added: the tokens.
        tokenizer: a copy of the backbone's tokenizer that has them.
        first: the id of the first of them.
        spellings: the ids of the old tokens that spell each of them.
    """

    added: AddedTokens
    tokenizer: PreTrainedTokenizerBase
    first: int
    spellings: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of added tokens."""
        return len(self.spellings)

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Replace each added token by the old tokens that spell it.

        Args:
            ids: ids of the extended tokenizer.

        Returns:
            Ids of the backbone's own tokenizer.
        """
        spelled: list[int] = []
        for token in ids:
            spelled += self.spelling(token)
        return spelled

    def spelling(self, token: int) -> tuple[int, ...]:
        """Return the ids of the old tokens that spell a token; that of an old token is itself."""
        number = token - self.first
        return self.spellings[number] if 0 <= number < self.count else (token,)


def extend(tokenizer: PreTrainedTokenizerBase, added: AddedTokens, name: str) -> ExtendedVocabulary:
    """Return a copy of a tokenizer with added tokens.

    Args:
        tokenizer: the tokenizer, which does not change.
        added: the tokens.
        name: name of the backbone in messages.

    Raises:
        BackboneError: the tokenizer is not one of the library tokenizers; or a token exists already, is changed by
            decoding, is empty or only whitespace, or there twice.
    """
    added.check()
    _check_fast(tokenizer, name)
    if added.merges:
        return _with_merges(tokenizer, added, name)
    return _with_texts(tokenizer, added, name)


def _check_fast(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not tokenizer.is_fast:
        raise BackboneError(
            f"The tokenizer of {name} is a {type(tokenizer).__name__}, which does not belong to the library "
            "tokenizers, but add_tokens needs one that does: put a tokenizer.json next to its weights."
        )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _first_new_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values()) + 1


# Texts


def _with_texts(tokenizer: PreTrainedTokenizerBase, added: AddedTokens, name: str) -> ExtendedVocabulary:
    from transformers import AddedToken

    known = tokenizer.get_vocab()
    spellings: list[tuple[int, ...]] = []
    for text in added.texts:
        spelling = _encode(tokenizer, text)
        if text in known or len(spelling) == 1:
            raise BackboneError(
                f"The token {shorten(text)!r} is a token of {name} already (its id is "
                f"{known.get(text, spelling[0])}): remove it from add_tokens."
            )
        if not spelling:
            raise BackboneError(
                f"The token {shorten(text)!r} has no token of {name} that spells it, so that its embedding would have "
                "no start: remove it from add_tokens."
            )
        spellings.append(tuple(spelling))
    first = _first_new_id(tokenizer)
    extended = copy.deepcopy(tokenizer)
    tokens: list[str | AddedToken] = [AddedToken(text, normalized=False, special=False) for text in added.texts]
    extended.add_tokens(tokens)
    _check_ids(extended, added, first, name)
    for text in added.texts:
        _check_round_trip(tokenizer, extended, text, name)
    return ExtendedVocabulary(added, extended, first, tuple(spellings))


def _check_ids(extended: PreTrainedTokenizerBase, added: AddedTokens, first: int, name: str) -> None:
    """Raise `BackboneError` unless the new ids follow the old ones."""
    ids = [extended.convert_tokens_to_ids(text) for text in added.texts]
    if ids != list(range(first, first + len(added.texts))):
        raise BackboneError(
            f"The tokenizer of {name} gives added tokens the ids {ids[:3]} ..., but ids from {first} on are expected: "
            "its vocabulary has gaps, so save it again with transformers, or use another backbone."
        )


def _check_round_trip(
    tokenizer: PreTrainedTokenizerBase, extended: PreTrainedTokenizerBase, text: str, name: str
) -> None:
    """Raise `BackboneError` if a token is not found in a text, or changes what the text is decoded to."""
    around = f"a{text} b"
    ids = _encode(extended, around)
    if extended.convert_tokens_to_ids(text) not in ids:
        raise BackboneError(
            f"The token {shorten(text)!r} is not found in a text that contains it, because another token to add or the "
            f"tokenizer of {name} changes it: remove one of them from add_tokens."
        )
    decoded = _decode(extended, ids)
    if decoded not in (around, _decode(tokenizer, _encode(tokenizer, around))):
        raise BackboneError(
            f"With the token {shorten(text)!r}, the tokenizer of {name} decodes {shorten(around)!r} as "
            f"{shorten(decoded)!r}: begin the token with a space, or learn tokens from the new text (add_tokens: "
            "{learn: 2000})."
        )


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


# Merges


def _with_merges(tokenizer: PreTrainedTokenizerBase, added: AddedTokens, name: str) -> ExtendedVocabulary:
    from tokenizers import Tokenizer

    values = bpe_values(tokenizer, name)
    model = values["model"]
    vocabulary = model["vocab"]
    # tokenizers counts the ids of added tokens from the size of the vocabulary, which grows here.
    for token in values["added_tokens"]:
        vocabulary.setdefault(token["content"], token["id"])
    first = _first_new_id(tokenizer)
    for number, text in enumerate(added.texts):
        if text in vocabulary:
            raise BackboneError(
                f"The token {shorten(text)!r} is a token of {name} already (its id is {vocabulary[text]}): learn the "
                "tokens with this tokenizer."
            )
        vocabulary[text] = first + number
    spellings: dict[str, tuple[int, ...]] = {}
    for left, right in added.merges:
        unknown = [part for part in (left, right, left + right) if part not in vocabulary]
        if unknown:
            raise BackboneError(
                f"A merge of add_tokens joins {left!r} and {right!r}, but {name} has no token {unknown[0]!r}: learn "
                "the tokens with this tokenizer."
            )
        parts = [spellings.get(part, (vocabulary[part],)) for part in (left, right)]
        spellings.setdefault(left + right, parts[0] + parts[1])
    as_pairs = not model["merges"] or not isinstance(model["merges"][0], str)
    model["merges"] += [list(pair) if as_pairs else " ".join(pair) for pair in added.merges]
    extended = copy.deepcopy(tokenizer)
    vars(extended)["_tokenizer"] = Tokenizer.from_str(json.dumps(values))
    _check_ids(extended, added, first, name)
    unmade = [text for text in added.texts if text not in spellings]
    if unmade:
        raise BackboneError(f"No merge of add_tokens makes the token {unmade[0]!r}: learn the tokens again.")
    return ExtendedVocabulary(added, extended, first, tuple(spellings[text] for text in added.texts))


class BpeModel(TypedDict):
    """The part `model` of `tokenizer.json`, as far as it is read here."""

    type: NotRequired[str]
    vocab: dict[str, int]
    merges: list[list[str] | str]
    continuing_subword_prefix: NotRequired[str | None]
    end_of_word_suffix: NotRequired[str | None]


class NamedToken(TypedDict):
    """An added token in `tokenizer.json`, as far as it is read here."""

    id: int
    content: str


class TokenizerFile(TypedDict):
    """The content of `tokenizer.json`, as far as it is read here."""

    added_tokens: list[NamedToken]
    model: BpeModel


def bpe_values(tokenizer: PreTrainedTokenizerBase, name: str) -> TokenizerFile:
    """Return the content of `tokenizer.json` of a tokenizer whose model is a byte pair encoding.

    Args:
        tokenizer: the tokenizer.
        name: name of the backbone in messages.

    Raises:
        BackboneError: the tokenizer has another model, or none of the library tokenizers.
    """
    _check_fast(tokenizer, name)
    backend = cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer
    values: TokenizerFile = json.loads(backend.to_str())
    model = values["model"]
    kind = model.get("type", "BPE")
    is_marked = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if kind != "BPE" or is_marked:
        found = f"a {kind} model" if kind != "BPE" else "a BPE model that marks parts of words"
        raise BackboneError(
            f"The tokenizer of {name} has {found}, but tokens are learned by merges of a plain BPE model: list the "
            "tokens in add_tokens instead."
        )
    return values

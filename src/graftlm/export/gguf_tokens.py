"""The tokenizer of a GGUF file: that of the file that the backbone came from, or from a fast tokenizer.

Tokenizers that merge bytes, and those of SentencePiece that merge characters, can be expressed. The first need a name
of the way in which they split text, the others a score for each token in place of the list of merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from graftlm.backbone import Backbone, turn_end_ids
from graftlm.backbone.gguf_header import local_path
from graftlm.backbone.gguf_tokenizer import named_split
from graftlm.errors import ArtifactError, BackboneError
from graftlm.export.gguf_source import Value, read_values
from graftlm.files.model_files import find_model, names_gguf_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PREFIX = "tokenizer."
_REMEDY = "export the model as a folder (--to FOLDER), and convert that with llama.cpp"
_LEARN = f"train with learned tokens (add_tokens: {{learn: 2000}}), or {_REMEDY}"
_UNSIGNED, _INTEGER, _FLOAT, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
"""The format's numbers of types."""
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""The format's numbers of kinds of tokens."""
_SPLITS = {
    "gpt-2": False,
    "smollm": False,
    "qwen2": False,
    "llama-bpe": True,
    "smaug-bpe": False,
    "tekken": True,
    "gpt-4o": False,
    "qwen35": False,
    "falcon": False,
    "bloom": False,
    "deepseek-coder": False,
}
"""By the name of a split, whether llama.cpp takes a whole piece for a token, if it is one, before it merges."""
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}
_BLANK = "\u2581"
_NO_SCORE = -1e9
PROBES = (
    "The harbour of Vall has 12 cranes, 1234567 crates; it's THE keeper's, they'LL say!",
    "two  blanks\n\n\tdef sail(boat):\r\n    return boat_name   # 3.14 + x_1 == y!\n",
    "Grüße aus Århus, žltý kôň; 東京の港 8番 안녕하세요 Привет мир مرحبا \u00a0 🙂👍🏽",
)
"""Texts by which tokenizers are compared. None begins with a blank, before which some put another one, some not."""


class _Merge(NamedTuple):
    left: str
    right: str


def token_facts(backbone: Backbone) -> dict[str, Value]:
    """Return what a file states about the tokenizer of a backbone.

    Args:
        backbone: the backbone.

    Raises:
        ArtifactError: the backbone has no tokenizer, or one that can't be expressed.
    """
    tokenizer = backbone.tokenizer
    if tokenizer is None:
        raise ArtifactError(
            "The backbone has no tokenizer, which a GGUF file contains: load a model with its tokenizer."
        )
    rows = backbone.config.get_text_config().vocab_size
    extended = backbone.extended
    if extended is not None:
        remedy = _REMEDY
        if extended.added.merges:
            learned = tokenizer.decode([extended.first])
            remedy = f"train with a list of tokens in add_tokens, without learned ones such as {learned!r}"
        return _facts_of(tokenizer, max(rows, extended.first + extended.count), remedy)
    return _source_facts(backbone.name, rows) or _facts_of(tokenizer, rows)


def _source_facts(name: str, rows: int) -> dict[str, Value]:
    """Return the facts of the file from which a tokenizer was loaded; none without one, or if it has other tokens.

    Args:
        name: name of the backbone.
        rows: number of rows of the token embeddings.
    """
    if not names_gguf_file(name):
        return {}
    try:
        path = local_path(name, find_model(name))
    except BackboneError:  # the file is gone since
        return {}
    facts = read_values(Path(path), PREFIX)
    tokens = facts["tokenizer.ggml.tokens"].value
    assert isinstance(tokens, list)
    return facts if len(tokens) == rows else {}


def _facts_of(tokenizer: PreTrainedTokenizerBase, rows: int, remedy: str = _REMEDY) -> dict[str, Value]:
    """Return the facts of a fast tokenizer.

    Args:
        tokenizer: the tokenizer.
        rows: number of rows of the token embeddings.
        remedy: what to do if the merges don't follow from scores.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused("it is no fast tokenizer")
    description = json.loads(backend.to_str())
    model = description["model"]
    kind = _kind(description)
    added = {token["id"]: token for token in description["added_tokens"]}
    tokens = _tokens(tokenizer, rows)
    unknown = model.get("unk_token") if kind == "llama" else None
    kinds = [_kind_of_token(token, added.get(number), unknown) for number, token in enumerate(tokens)]
    merges = [_merge(merge) for merge in model["merges"]]
    if kind == "gpt2":
        facts = {"tokenizer.ggml.pre": _text(_split_of(backend, ignores_merges=bool(model.get("ignore_merges"))))}
        facts["tokenizer.ggml.merges"] = _texts([f"{merge.left} {merge.right}" for merge in merges])
        shown = [token or f"[PAD{number}]" for number, token in enumerate(tokens)]
    else:
        facts = {"tokenizer.ggml.scores": Value(_scores(tokens, kinds, merges, remedy), _ARRAY, _FLOAT)}
        facts["tokenizer.ggml.add_space_prefix"] = Value(_adds_blank(backend), _BOOL)
        shown = [_sentencepiece(token, number, kinds[number]) for number, token in enumerate(tokens)]
    facts["tokenizer.ggml.model"] = _text(kind)
    facts["tokenizer.ggml.tokens"] = _texts(shown)
    facts["tokenizer.ggml.token_type"] = Value(list(kinds), _ARRAY, _INTEGER)
    return facts | _special_facts(tokenizer)


def _refused(problem: str, remedy: str = _REMEDY) -> ArtifactError:
    return ArtifactError(f"The tokenizer can't be written into a GGUF file, because {problem}: {remedy}.")


def _kind(description: Mapping[str, dict]) -> Literal["gpt2", "llama"]:
    """Return llama.cpp's name of the kind of a tokenizer."""
    kind = description["model"]["type"]
    steps = json.dumps([description.get("pre_tokenizer"), description.get("normalizer")])
    if kind == "BPE" and '"ByteLevel"' in steps:
        return "gpt2"
    if kind == "BPE" and description["model"].get("byte_fallback"):
        return "llama"
    raise _refused(
        f"it is of the kind {kind}, which merges neither bytes nor, with single bytes for others, characters"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Return the tokens of all rows; empty texts for rows without a token."""
    tokens = [""] * rows
    for token, number in tokenizer.get_vocab().items():
        if number >= rows:
            raise _refused(f"its token {token!r} has the id {number}, but the model has {rows} tokens")
        tokens[number] = token
    return tokens


def _kind_of_token(token: str, added: Mapping[str, object] | None, unknown: str | None) -> int:
    """Return the kind of a token.

    Args:
        token: the token; empty for a row without one.
        added: the description of a token that was added to the vocabulary; None for others.
        unknown: the token for characters without a token.
    """
    if not token:
        return _UNUSED
    if token == unknown:
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added["special"] else _ADDED
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _merge(merge: str | Sequence[str]) -> _Merge:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return _Merge(left, right)


def _split_of(backend: Tokenizer, *, ignores_merges: bool) -> str:
    """Return the name of the way in which a tokenizer splits text."""
    texts = [*PROBES, "  two blanks"]
    pieces = [backend.pre_tokenizer.pre_tokenize_str(text) for text in texts]
    for name, ignored in _SPLITS.items():
        split = named_split(name)
        assert split is not None, "the table has known names"
        if ignored == ignores_merges and [split.pre_tokenize_str(text) for text in texts] == pieces:
            return name
    raise _refused("it splits text in a way that none of llama.cpp's names stands for")


def _scores(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[_Merge], remedy: str) -> list[float]:
    """Return a score of each token by which the pairs of characters merge in the order of the merges.

    A pair of tokens merges wherever both together are a token, and the pair with the largest score merges first.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.left + merge.right, rank)
    wrong = _merge_without_score(tokens, kinds, merges, ranks)
    if wrong is not None:
        raise _refused(
            f"the merge of {wrong.left!r} and {wrong.right!r} does not follow from a score for each token, as "
            "SentencePiece has them",
            remedy,
        )
    return [-float(ranks[token]) if token in ranks else _NO_SCORE for token in tokens]


def _merge_without_score(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[_Merge], ranks: Mapping[str, int]
) -> _Merge | None:
    """Return the first merge that is out of the order of ranks, has no tokens, or is missing; None if none is."""
    possible = _possible_merges(tokens, kinds)
    last = -1
    for merge in merges:
        rank = ranks[merge.left + merge.right]
        if rank < last or merge not in possible:
            return merge
        last = rank
    missing = sorted(possible - set(merges))
    return min(missing, key=lambda merge: ranks.get(merge.left + merge.right, len(merges)), default=None)


def _possible_merges(tokens: Sequence[str], kinds: Sequence[int]) -> set[_Merge]:
    """Return all pairs of tokens of text that together are a token of text."""
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (_NORMAL, _ADDED)}
    found = set()
    for token in known:
        for end in range(1, len(token)):
            merge = _Merge(token[:end], token[end:])
            if merge.left in known and merge.right in known:
                found.add(merge)
    return found


def _adds_blank(backend: Tokenizer) -> bool:
    """Return whether a tokenizer puts a blank before a text."""
    return backend.encode("a", add_special_tokens=False).tokens[0].startswith(_BLANK)


def _sentencepiece(token: str, number: int, kind: int) -> str:
    """Return a token as files spell it: added ones with blanks, because they are looked up in the text itself."""
    if kind == _UNUSED:
        return f"[PAD{number}]"
    return token.replace(_BLANK, " ") if kind == _ADDED else token


def _special_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Value]:
    """Return the special tokens, whether texts begin and end with them, and the chat template."""
    facts: dict[str, Value] = {}
    for field, key in _SPECIAL.items():
        number = getattr(tokenizer, field)
        if number is not None:
            facts[f"tokenizer.ggml.{key}"] = Value(number, _UNSIGNED)
    ids = tokenizer("a")["input_ids"]
    facts["tokenizer.ggml.add_bos_token"] = Value(ids[0] == tokenizer.bos_token_id, _BOOL)
    facts["tokenizer.ggml.add_eos_token"] = Value(ids[-1] == tokenizer.eos_token_id, _BOOL)
    ends = [number for number in turn_end_ids(tokenizer) if number != tokenizer.eos_token_id]
    if ends:
        facts["tokenizer.ggml.eot_token_id"] = Value(ends[0], _UNSIGNED)
    if isinstance(tokenizer.chat_template, str):
        facts["tokenizer.chat_template"] = _text(tokenizer.chat_template)
    return facts


def _text(text: str) -> Value:
    return Value(text.encode(), _STRING)


def _texts(texts: Sequence[str]) -> Value:
    return Value([text.encode() for text in texts], _ARRAY, _STRING)


def check_tokenizer(read: PreTrainedTokenizerBase, backbone: Backbone) -> None:
    """Raise `ArtifactError` if a tokenizer that was read from a file gives some texts other tokens than the original.

    Args:
        read: the tokenizer of the file.
        backbone: the backbone with the original. A text of its added tokens is compared, too.
    """
    tokenizer = backbone.need_tokenizer()
    plain = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
    _check_added(read, backbone)
    for text in [*PROBES, "".join(plain)]:
        expected = tokenizer(text)["input_ids"]
        found = read(text)["input_ids"]
        if found != expected:
            raise _refused(f"the file's tokenizer encodes {text[:20]!r} as {found[:8]}, not as {expected[:8]}")


def _check_added(read: PreTrainedTokenizerBase, backbone: Backbone) -> None:
    """Raise `ArtifactError` if a tokenizer does not find a token that was added to that of a backbone."""
    extended = backbone.extended
    if extended is None:
        return
    tokenizer = backbone.need_tokenizer()
    ids = list(range(extended.first, extended.first + extended.count))
    text = str(tokenizer.decode(ids))
    expected = tokenizer(text)["input_ids"]
    found = read(text)["input_ids"]
    if found == expected:
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    assert backend is not None, "tokens are added to fast tokenizers only"
    can_learn = not extended.added.merges and _kind(json.loads(backend.to_str())) == "gpt2"
    remedy = _LEARN if can_learn else _REMEDY
    missing = [number for number in ids if number in expected and number not in found]
    if missing:
        raise _refused(f"the file's tokenizer does not find the added token {tokenizer.decode(missing[:1])!r}", remedy)
    raise _refused(f"the file's tokenizer encodes {text[:20]!r} as {found[:8]}, not as {expected[:8]}", remedy)

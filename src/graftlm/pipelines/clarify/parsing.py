"""One form for what parsers of English say of a sentence, so that rules need not know which parser it was."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from graftlm.errors import DataError, MissingExtraError

# spaCy's English models have names of their own for what Universal Dependencies calls otherwise.
_UNIVERSAL = {"dobj": "obj", "nsubjpass": "nsubj:pass", "relcl": "acl:relcl", "pobj": "obl", "poss": "nmod:poss"}


class Token(NamedTuple):
    """One word.

    Args:
        text: as it stands.
        lemma: its dictionary form, in lower case.
        pos: its part of speech, in Universal Dependencies' tags.
        tag: its Penn Treebank tag.
        dep: its relation to its head.
        head: the index of its head; of a root its own.
        start: where it begins in the text.
    """

    text: str
    lemma: str
    pos: str
    tag: str
    dep: str
    head: int
    start: int


Parser = Callable[[str], list[Token]]


def load_parser(name: str) -> Parser:
    """A parser by name: `spacy:en_core_web_sm` (any English pipeline of spaCy's), or `stanza:en`.

    Raises:
        DataError: the name is of another form, or the model is not on this machine.
        MissingExtraError: the library is not installed.
    """
    library, _, model = name.partition(":")
    if library not in _LOADERS or not model:
        raise DataError(f"{name!r} names no parser: write spacy:MODEL or stanza:en.")
    try:
        module = import_module(library)
    except ModuleNotFoundError:
        raise MissingExtraError(library, "parser", "Parsing English") from None
    try:
        return _LOADERS[library](module, model)
    except (OSError, ValueError, FileNotFoundError):
        raise DataError(f"{library} has no model {model!r} on this machine: install it as {library} says.") from None


def from_spacy(document: Any) -> list[Token]:
    """The tokens of a spaCy document."""
    words = [token for token in document if not token.is_space]
    places = {token.i: place for place, token in enumerate(words)}
    return [
        Token(
            token.text,
            token.lemma_.lower() or token.lower_,
            token.pos_,
            token.tag_,
            str(_UNIVERSAL.get(token.dep_, token.dep_)),
            places.get(token.head.i, place),
            token.idx,
        )
        for place, token in enumerate(words)
    ]


def from_stanza(document: Any) -> list[Token]:
    """The tokens of a stanza document."""
    tokens: list[Token] = []
    for sentence in document.sentences:
        first = len(tokens)
        for word in sentence.words:
            head = first + (word.head - 1 if word.head else word.id - 1)
            start = word.start_char if word.start_char is not None else word.parent.start_char
            tokens.append(
                Token(word.text, (word.lemma or word.text).lower(), word.upos, word.xpos, word.deprel, head, start)
            )
    return tokens


def _load_spacy(spacy: Any, model: str) -> Parser:
    pipeline = spacy.load(model)
    return lambda text: from_spacy(pipeline(text))


def _load_stanza(stanza: Any, language: str) -> Parser:
    pipeline = stanza.Pipeline(language, processors="tokenize,pos,lemma,depparse", download_method=None, verbose=False)
    return lambda text: from_stanza(pipeline(text))


_LOADERS: dict[str, Callable[[Any, str], Parser]] = {"spacy": _load_spacy, "stanza": _load_stanza}

"""A common token format for parsers of English, so that rules do not depend on the parser."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.errors import DataError, MissingExtraError
from graftlm.pipelines.clarify.ambiguity import Parser, Token

# Relations of spaCy's English models and their names in Universal Dependencies.
_UNIVERSAL = {"dobj": "obj", "nsubjpass": "nsubj:pass", "relcl": "acl:relcl", "pobj": "obl", "poss": "nmod:poss"}


def load_parser(name: str) -> Parser:
    """A parser by its name: `spacy:en_core_web_sm` (any English pipeline of spaCy), or `stanza:en`.

    Raises:
        DataError: the name has another form, or the model is not installed.
        MissingExtraError: the library is not installed.
    """
    library, _, model = name.partition(":")
    if library not in {"spacy", "stanza"} or not model:
        raise DataError(f"{name!r} names no parser: write spacy:MODEL or stanza:en.")
    try:
        module = import_module(library)
    except ModuleNotFoundError:
        raise MissingExtraError(library, "parser", "Parsing English") from None
    try:
        if library == "spacy":
            spacy_pipeline = module.load(model)
            return lambda text: from_spacy(spacy_pipeline(text))
        processors = "tokenize,pos,lemma,depparse"
        stanza_pipeline = module.Pipeline(model, processors=processors, download_method=None, verbose=False)
        return lambda text: from_stanza(stanza_pipeline(text))
    except (OSError, ValueError):
        raise DataError(f"{library} has no model {model!r} on this machine: install it as {library} says.") from None


def from_spacy(document: Any) -> list[Token]:
    """The tokens of a spaCy document, without spaces."""
    words = [token for token in document if not token.is_space]
    indices = {token.i: index for index, token in enumerate(words)}
    return [
        Token(
            token.text,
            token.lemma_.lower() or token.lower_,
            token.pos_,
            token.tag_,
            str(_UNIVERSAL.get(token.dep_, token.dep_)),
            indices.get(token.head.i, index),
            token.idx,
        )
        for index, token in enumerate(words)
    ]


def from_stanza(document: Any) -> list[Token]:
    """The tokens of a stanza document; heads count over all its sentences."""
    tokens: list[Token] = []
    for sentence in document.sentences:
        first = len(tokens)
        for word in sentence.words:
            head = first + (word.head - 1 if word.head else word.id - 1)
            start = word.start_char if word.start_char is not None else word.parent.start_char
            lemma = (word.lemma or word.text).lower()
            tokens.append(Token(word.text, lemma, word.upos, word.xpos, word.deprel, head, start))
    return tokens

"""A common token format for parsers of English, so that rules do not depend on the parser."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.errors import DataError, MissingExtraError
from graftlm.pipelines.clarify.ambiguity import Parser, Token

# Relations of spaCy's English models and their names in Universal Dependencies.
_UNIVERSAL = {"dobj": "obj", "nsubjpass": "nsubj:pass", "relcl": "acl:relcl", "pobj": "obl", "poss": "nmod:poss"}


def load_parser(name: str) -> Parser:
    """Load a parser.

    Args:
        name: `spacy:MODEL` for an English pipeline of spaCy, such as spacy:en_core_web_sm, or `stanza:en`.

    Raises:
        DataError: the name has another form, or the model is not installed.
        MissingExtraError: the library is not installed.
    """
    library, _, model = name.partition(":")
    if library not in {"spacy", "stanza"} or not model:
        raise DataError(f"The parser {name!r} is unknown: write spacy:MODEL or stanza:en.")
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
        raise DataError(
            f"The model {model!r} of {library} is not installed: install it as described by {library}."
        ) from None


def from_spacy(document: Any) -> list[Token]:
    """Convert a spaCy document; tokens of white space are left out."""
    words = [token for token in document if not token.is_space]
    indices = {token.i: index for index, token in enumerate(words)}
    tokens: list[Token] = []
    for index, word in enumerate(words):
        token = Token(
            text=word.text,
            lemma=word.lemma_.lower() or word.lower_,
            pos=word.pos_,
            tag=word.tag_,
            dep=str(_UNIVERSAL.get(word.dep_, word.dep_)),
            head=indices.get(word.head.i, index),
            start=word.idx,
        )
        tokens.append(token)
    return tokens


def from_stanza(document: Any) -> list[Token]:
    """Convert a stanza document; heads are indices over all its sentences."""
    tokens: list[Token] = []
    for sentence in document.sentences:
        first = len(tokens)
        for word in sentence.words:
            head = word.head or word.id  # a root is its own head; both count from 1
            start = word.start_char
            if start is None:
                start = word.parent.start_char
            token = Token(
                text=word.text,
                lemma=(word.lemma or word.text).lower(),
                pos=word.upos,
                tag=word.xpos,
                dep=word.deprel,
                head=first + head - 1,
                start=start,
            )
            tokens.append(token)
    return tokens

"""A page on which people rate summaries without knowing who wrote them.

One HTML file without anything from outside it: documents in a drawn order, their summaries under letters in a drawn
order, four ratings each (the criteria of table 2.7), kept by the browser and downloaded as JSON. Which system wrote
what stands in a key beside the page, which raters don't get. Summaries of a document that are the same are shown once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.io import write_atomically
from graftlm.pipelines.summarize.document import SourceDocument

SCALE = 5
RATINGS_FORM, KEY_FORM = "graft-ratings-1", "graft-ratings-key-1"
CRITERIA = {
    "coherence": ("Coherence", "Do its sentences belong together, in this order?"),
    "fluency": ("Fluency", "Is each sentence easy to read and without mistakes?"),
    "informativeness": ("Informativeness", "Does it tell the main points of the document?"),
    "relevance": ("Relevance", "Is what it says true to the document?"),
}
_MOST_CHARACTERS = 20_000_000  # of a page that a browser opens without trouble


@dataclass(frozen=True)
class RatingItem:
    """A document and what its summaries are.

    Attributes:
        document: its name, for the key.
        passages: headings and the text below each; an empty heading is none.
        summaries: by system.
        language: a code, for the page.
    """

    document: str
    passages: tuple[tuple[str, str], ...]
    summaries: Mapping[str, str]
    language: str = ""

    @classmethod
    def of(cls, document: SourceDocument, summaries: Mapping[str, str]) -> RatingItem:
        """A document that was read, section by section."""
        passages = tuple(
            (section.title, " ".join(one.text for one in document.sentences[section.first : section.end]))
            for section in document.sections
        )
        return cls(document.where, passages, summaries, document.language)


@dataclass(frozen=True)
class RatingPage:
    """A page, and what tells its summaries' systems."""

    html: str
    key: dict[str, Any]

    def write(self, out: Path) -> list[Path]:
        """Write the page, and the key beside it; gives both paths.

        Raises:
            EvaluationError: the place can't be written to.
        """
        key = json.dumps(self.key, indent=2, ensure_ascii=False) + "\n"
        return [
            write_atomically(out, self.html.encode()),
            write_atomically(key_path(out), key.encode()),
        ]


def key_path(page: Path) -> Path:
    """Where the key of a page lies."""
    return page.with_suffix(".key.json")


def rating_page(items: Sequence[RatingItem], seed: int = 0) -> RatingPage:
    """The page of some documents.

    Args:
        items: the documents with their summaries.
        seed: of both orders and of the summaries' ids.

    Raises:
        DataError: there is nothing to rate, or more than a page can hold.
    """
    if not any(item.summaries for item in items):
        raise DataError("There is no summary to rate: name files with summaries of the same documents.")
    chance = random.Random(f"ratings {seed}")
    documents, systems = [], {}
    for item in chance.sample(list(items), len(items)):
        found = _blinded(item, chance)
        documents.append({"language": item.language, "passages": item.passages, "summaries": [one for one, _ in found]})
        systems |= {one["id"]: {"document": item.document, "systems": who} for one, who in found}
    page = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:12]
    data = {"form": RATINGS_FORM, "page": page, "scale": SCALE, "criteria": CRITERIA, "documents": documents}
    key = {"form": KEY_FORM, "page": page, "seed": seed, "scale": SCALE, "summaries": systems}
    return RatingPage(_html(data), key)


def _blinded(item: RatingItem, chance: random.Random) -> list[tuple[dict[str, str], list[str]]]:
    """Different summaries of a document in a drawn order, under drawn ids, and the systems that wrote each."""
    by_text: dict[str, list[str]] = {}
    for system in sorted(item.summaries):
        by_text.setdefault(" ".join(item.summaries[system].split()), []).append(system)
    texts = chance.sample(list(by_text), len(by_text))
    return [({"id": f"{chance.getrandbits(48):012x}", "text": text}, by_text[text]) for text in texts]


def _html(data: Mapping[str, Any]) -> str:
    style, script = _part("page.css"), _part("page.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    embedded = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # so that no text ends the script element
    if len(embedded) > _MOST_CHARACTERS:
        raise DataError(
            f"The page would have {len(embedded):,} characters, and one may have {_MOST_CHARACTERS:,}: "
            "take fewer documents."
        )
    html = _part("page.html")
    for name, text in {"policy": policy, "style": style, "script": script, "data": embedded}.items():
        html = html.replace("{{" + name + "}}", text, 1)
    return html


def _part(name: str) -> str:
    return files("graftlm.pipelines.summarize.rating").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names a script or a style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

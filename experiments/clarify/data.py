"""Which ambiguous sentences there are in the data folder, by kind and language."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity_sets import mt_geneval_contexts, read_ambigmt, read_discevalmt
from graftlm.pipelines.clarify.builder import read_examples
from graftlm.pipelines.clarify.examples import Example

Key = tuple[str, str]  # kind and language, as ("it", "fr")
LANGUAGES = ("es", "fr", "de", "ja")
TABLES = {"4.2": ("formality", "it", "polysemy"), "4.3": ("name", "profession")}


def read_sets(data: Path) -> dict[Key, list[Example]]:
    """The sentences that have a context and a reference, by kind and language.

    AmbigMT is read from `ambigmt` where it lies there; sets that the builder wrote from `sets/*.jsonl`; and what else
    is public with a context from `ambig`: DiscEvalMT ("it", French) and MT-GenEval (professions, German and French). A
    kind and language that AmbigMT has is taken from it alone.

    Raises:
        DataError: nothing is there.
    """
    first = read_ambigmt(data / "ambigmt").examples if (data / "ambigmt").is_dir() else ()
    found = _by_key(first)
    for key, examples in _by_key(_others(data)).items():
        found.setdefault(key, examples)
    if not found:
        raise DataError(
            f"{data} holds no ambiguous sentences with their contexts: put AmbigMT into its folder ambigmt, sets of "
            "the builder into sets, or DiscEvalMT and MT-GenEval into ambig."
        )
    return {key: found[key] for key in sorted(found, key=_order)}


def _others(data: Path) -> Iterable[Example]:
    for path in sorted((data / "sets").glob("*.jsonl")):
        yield from read_examples(path)
    if (data / "ambig" / "discevalmt").is_dir():
        yield from (one for one in read_discevalmt(data / "ambig" / "discevalmt") if one.kind == "it")
    for language in ("de", "fr"):
        if list((data / "ambig" / "mt_geneval").glob(f"geneval-context-*2to1-test.en_{language}.en")):
            yield from mt_geneval_contexts(data / "ambig" / "mt_geneval", language)


def _by_key(examples: Iterable[Example]) -> dict[Key, list[Example]]:
    found: dict[Key, list[Example]] = {}
    for one in examples:
        if one.context and one.reference and one.language in LANGUAGES:
            found.setdefault((one.kind, one.language), []).append(one)
    return found


def _order(key: Key) -> tuple[int, int]:
    kinds = [kind for kinds in TABLES.values() for kind in kinds]
    return kinds.index(key[0]), LANGUAGES.index(key[1])


def some(examples: Sequence[Example], limit: int) -> list[Example]:
    """At most so many, drawn with a fixed seed, in their order; of several with the same text and context the first."""
    different = list({(one.source, one.context, one.label): one for one in examples}.values())
    if len(different) <= limit:
        return different
    chosen = sorted(random.Random(0).sample(range(len(different)), limit))
    return [different[place] for place in chosen]


def fingerprint(examples: Sequence[Example]) -> str:
    """SHA-256 over examples."""
    return hashlib.sha256(json.dumps([asdict(one) for one in examples], sort_keys=True).encode()).hexdigest()

"""The ambiguous sentences of the data folder, by kind and language."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.clarify.builder import read_examples
from graftlm.errors import DataError
from graftlm.pipelines.clarify.datasets import AmbiguousExample, mt_geneval_contexts, read_ambigmt, read_discevalmt

Key = tuple[str, str]  # kind and language, as ("it", "fr")
LANGUAGES = ("es", "fr", "de", "ja")
TABLES = {"4.2": ("formality", "it", "polysemy"), "4.3": ("name", "profession")}


def read_sets(data: Path) -> dict[Key, list[AmbiguousExample]]:
    """The sentences with a context and a reference, by kind and language.

    AmbigMT comes from the folder `ambigmt`, sets of the builder from `sets/*.jsonl`. From `ambig` come DiscEvalMT
    ("it", French) and MT-GenEval (professions). If AmbigMT has a kind and language, it is the only source of it.

    Raises:
        DataError: the folder has none of them.
    """
    sets = _by_key(read_ambigmt(data / "ambigmt")[0] if (data / "ambigmt").is_dir() else ())
    for key, examples in _by_key(_other_sets(data)).items():
        sets.setdefault(key, examples)
    if not sets:
        raise DataError(
            f"{data} holds no ambiguous sentences with their contexts: put AmbigMT into its folder ambigmt, sets of "
            "the builder into sets, or DiscEvalMT and MT-GenEval into ambig."
        )
    kinds = [kind for kinds in TABLES.values() for kind in kinds]
    return dict(sorted(sets.items(), key=lambda item: (kinds.index(item[0][0]), LANGUAGES.index(item[0][1]))))


def _other_sets(data: Path) -> Iterable[AmbiguousExample]:
    for path in sorted((data / "sets").glob("*.jsonl")):
        yield from read_examples(path)
    if (data / "ambig" / "discevalmt").is_dir():
        yield from read_discevalmt(data / "ambig" / "discevalmt")
    for language in ("es", "fr", "de"):
        if list((data / "ambig" / "mt_geneval").glob(f"geneval-context-*2to1-test.en_{language}.en")):
            yield from mt_geneval_contexts(data / "ambig" / "mt_geneval", language)


def _by_key(examples: Iterable[AmbiguousExample]) -> dict[Key, list[AmbiguousExample]]:
    sets: dict[Key, list[AmbiguousExample]] = {}
    for example in examples:
        if example.context and example.reference and example.language in LANGUAGES:
            sets.setdefault((example.kind, example.language), []).append(example)
    return sets


def sample(examples: Sequence[AmbiguousExample], limit: int) -> list[AmbiguousExample]:
    """At most `limit` examples in their order, drawn with a fixed seed; duplicates of text and context count once."""
    unique = list({(ex.source, ex.context, ex.label): ex for ex in examples}.values())
    if len(unique) <= limit:
        return unique
    return [unique[index] for index in sorted(random.Random(0).sample(range(len(unique)), limit))]


def fingerprint(examples: Sequence[AmbiguousExample]) -> str:
    """SHA-256 over examples."""
    return hashlib.sha256(json.dumps([asdict(example) for example in examples], sort_keys=True).encode()).hexdigest()

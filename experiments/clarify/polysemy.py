"""Words of several meanings from WordNet, with translations from word alignments (appendix C.1.6 of the thesis).

1. A word of WordNet is taken if it has more than four letters and more than three definitions. Of definitions that
   share a synonym, only one counts.
2. Its translations are the words to which an aligner aligned it in a parallel corpus. The thesis took them from Google
   Cloud Translation.
3. A sentence pair with the word becomes an example if the translation contains exactly one of these words.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from experiments.clarify.builder import translation_in
from experiments.clarify.corpora import Alignment
from experiments.clarify.datasets import AmbiguousExample, SentencePair
from graftlm.errors import DataError, MissingExtraError

MIN_LETTERS = 5
MIN_SENSES = 4
_WORD = re.compile(r"[a-z]+")


def distinct_senses(synonyms: Iterable[frozenset[str]]) -> int:
    """Count the definitions of a word; one that shares a synonym with a counted definition does not count.

    Args:
        synonyms: the synonyms of each definition, without the word itself, in WordNet's order.
    """
    counted: set[str] = set()
    count = 0
    for words in synonyms:
        if counted.isdisjoint(words):
            count += 1
            counted |= words
    return count


def polysemous_words(data: str | Path) -> list[str]:
    """Return the English words of WordNet with several meanings, in alphabetical order.

    Args:
        data: the folder of NLTK's data, with the files of WordNet in corpora/wordnet.

    Raises:
        DataError: the folder has no WordNet.
        MissingExtraError: NLTK is not installed.
    """
    folder = Path(data) / "corpora" / "wordnet"
    if not (folder / "index.noun").is_file():
        raise DataError(f"{folder} has no file index.noun of WordNet: unpack the package wordnet of NLTK's data there.")
    try:
        nltk_data = import_module("nltk.data")
        readers = import_module("nltk.corpus.reader.wordnet")
    except ModuleNotFoundError:
        raise MissingExtraError("nltk", "harness", "Reading WordNet") from None
    nltk_data.path.insert(0, str(data))  # NLTK looks up a part of the files by their name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that other languages are not available
            reader = readers.WordNetCorpusReader(str(folder), None)
        names = sorted(set(reader.all_lemma_names()))
        return [name for name in names if _is_polysemous(name, _synonyms(reader.synsets(name), name))]
    except (OSError, LookupError, ValueError, AssertionError, readers.WordNetError):
        raise DataError(f"The files of WordNet in {folder} can't be read: unpack them again.") from None
    finally:
        nltk_data.path.remove(str(data))


def _synonyms(synsets: Iterable[object], name: str) -> list[frozenset[str]]:
    """Return the synonyms of each synset of NLTK, without the word itself."""
    found = []
    for synset in synsets:
        names = getattr(synset, "lemma_names")()  # noqa: B009  # NLTK has no types
        found.append(frozenset(names) - {name})
    return found


def _is_polysemous(name: str, synonyms: Sequence[frozenset[str]]) -> bool:
    is_word = _WORD.fullmatch(name) is not None and len(name) >= MIN_LETTERS
    return is_word and distinct_senses(synonyms) >= MIN_SENSES


def aligned_translations(
    pairs: Sequence[SentencePair],
    alignments: Sequence[Alignment],
    words: Iterable[str],
    *,
    min_count: int = 3,
    min_share: float = 0.05,
) -> dict[str, tuple[str, ...]]:
    """Return the translations of words that a corpus shows, the most frequent one first.

    Args:
        pairs: sentence pairs, whose tokens are their words between white space.
        alignments: the alignment of each pair.
        words: English words in lower case.
        min_count: how often a translation must occur.
        min_share: share of all occurrences of the word that a translation must have.

    Returns:
        The translations in lower case, without outer punctuation, of the words that have some.
    """
    wanted = set(words)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair, alignment in zip(pairs, alignments, strict=True):
        sources = [_bare(token) for token in pair.source.split()]
        targets = [_bare(token) for token in pair.target.split()]
        for source, target in alignment:
            if sources[source] in wanted and targets[target]:
                counts[sources[source]][targets[target]] += 1
    translations: dict[str, tuple[str, ...]] = {}
    for word, counter in sorted(counts.items()):
        least = max(min_count, min_share * counter.total())
        frequent = tuple(target for target, count in counter.most_common() if count >= least)
        if frequent:
            translations[word] = frequent
    return translations


def _bare(token: str) -> str:
    """Return a token in lower case without outer punctuation."""
    return re.sub(r"^\W+|\W+$", "", token).lower()


def polysemy_examples(
    pairs: Iterable[SentencePair],
    translations: Mapping[str, Sequence[str]],
    language: str,
    *,
    quota: int | None = None,
    per_word: int | None = None,
) -> list[AmbiguousExample]:
    """Build examples of polysemous words; the English sentence is the context.

    Args:
        pairs: sentence pairs.
        translations: the translations of each word; a word needs at least two.
        language: language code of the translations.
        quota: maximum number of examples; None for no limit.
        per_word: maximum number of examples of a word; None for no limit.
    """
    ambiguous = {word: frozenset(listed) for word, listed in translations.items() if len(set(listed)) > 1}
    examples: list[AmbiguousExample] = []
    taken: Counter[str] = Counter()
    for pair in pairs:
        tokens = dict.fromkeys(_bare(token) for token in pair.source.split())
        for word in tokens:
            if word not in ambiguous or taken[word] == per_word:
                continue
            if quota is not None and len(examples) >= quota:
                return examples
            found = [listed for listed in ambiguous[word] if translation_in(frozenset([listed]), pair.target)]
            if len(found) == 1:
                taken[word] += 1
                examples.append(_example(pair, word, found[0], language))
    return examples


def _example(pair: SentencePair, word: str, translation: str, language: str) -> AmbiguousExample:
    return AmbiguousExample(
        id=f"{pair.id}:polysemy:{word}",
        kind="polysemy",
        language=language,
        source=word,
        context=(pair.source,),
        reference=translation,
        label=translation,
        word=word,
    )

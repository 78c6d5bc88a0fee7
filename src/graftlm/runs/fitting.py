"""The texts from which grafts learn without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from graftlm.data import SourceConfig, build_documents
from graftlm.data.example_texts import example_texts
from graftlm.errors import RecipeError
from graftlm.grafts import FitsOnText


def fit_on_text(graft: FitsOnText, new: Sequence[SourceConfig], set_of: Mapping[str, str]) -> list[str]:
    """Let a graft learn from the texts that it names, or from new text where it names none.

    The arguments are those of `example_sources`.

    Returns:
        Sentences for the user.
    """
    texts = {}
    for name, sources in example_sources(graft, new, set_of).items():
        texts[name] = example_texts(build_documents(sources), prompts_only=graft.learns_from_prompts)
    return graft.fit(texts)


def example_sources(
    graft: FitsOnText,
    new: Sequence[SourceConfig],
    set_of: Mapping[str, str],
) -> dict[str, list[SourceConfig]]:
    """Return the sources of the texts that a graft learns from, by the graft's names for them.

    Args:
        graft: the graft.
        new: the sources of new text.
        set_of: the named set of new text on which a part of the graft trains, by the graft's names.

    Raises:
        RecipeError: several names have no sources and no set, or new text that is needed before training is streamed.
    """
    found: dict[str, list[SourceConfig]] = {}
    named = graft.sources()
    without = [name for name, sources in named.items() if not sources and name not in set_of]
    _check_examples(without, {source.set for source in new if source.set is not None})
    for name, sources in named.items():
        parsed = [SourceConfig.parse(dict(source)) for source in sources]
        if not parsed:
            parsed = [source for source in new if name not in set_of or source.set == set_of[name]]
            if any(source.streaming for source in parsed):
                raise RecipeError(
                    f"{name} takes its examples from data.new, which is streamed and may have no end: give it "
                    "examples under texts or sources, or set streaming to false."
                )
        found[name] = parsed
    return found


def _check_examples(without: Sequence[str], sets: Set[str]) -> None:
    """Raise `RecipeError` if several parts of a graft have neither sources nor a set of new text.

    Args:
        without: the graft's names for them.
        sets: names of the sets of new text. Parts and sets that have each other's names were meant to belong together.
    """
    if len(without) < 2:
        return
    known = ", ".join(sorted(sets))
    lacking = [name for name in without if name not in sets]
    if lacking and len(lacking) < len(without):
        raise RecipeError(
            f"{lacking[0]} has no set in data.new (known: {known}): add one of that name, or name one in its key set."
        )
    unused = sorted(sets - set(without))
    if unused and not lacking:
        raise RecipeError(
            f"The set {unused[0]} of data.new has the name of no part that trains ({', '.join(without)}): leave it "
            "out, or name it in the key set of a part."
        )
    raise RecipeError(
        f"{' and '.join(without)} have no examples, but only one can take them from data.new: give the others "
        "texts or sources."
    )

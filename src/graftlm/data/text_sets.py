"""The named sets of new and old text, to which test texts of the same names belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graftlm.errors import did_you_mean

# Names that would give the metrics of a set the names of other metrics.
_TAKEN = ("new", "old", "own", "chat", "learned", "forgotten")


@dataclass(frozen=True)
class TextSets:
    """Names of the sets of new and of old text; without names there is one set of each, `new` and `old`.

    Attributes:
        new: names of the sets of new text.
        old: names of the sets of old text.
    """

    new: tuple[str, ...] = ()
    old: tuple[str, ...] = ()

    @property
    def are_named(self) -> bool:
        """Whether new or old text has named sets."""
        return bool(self.new or self.old)

    def is_old(self, name: str) -> bool:
        """Return whether a test text of this name is old; every other text is new."""
        return name in (self.old or ("old",))

    def is_new(self, name: str) -> bool:
        """Return whether a test text of this name is text of the sets of new text, or of the one set `new`."""
        return name in (self.new or ("new",))

    def of_domain(self, domain: str, names: Iterable[str]) -> list[str]:
        """Return those of the names of test texts that belong to a domain, `new` or `old`."""
        belongs = self.is_old if domain == "old" else self.is_new
        return [name for name in names if belongs(name)]

    def problems(self, tests: Iterable[str]) -> Iterator[str]:
        """Yield what is wrong with the names, as clauses.

        Args:
            tests: names of the test texts.
        """
        for name in (*self.new, *self.old):
            if name in _TAKEN:
                yield f"a set of texts is named {name}, which is the name of a measurement: choose another name"
        for name in self.new:
            if name in self.old:
                yield f"the set {name} is both new and old: give one of them another name"
        if not self.are_named:
            return
        known = [*(self.new or ("new",)), *(self.old or ("old",))]
        for name in tests:
            if name not in known:
                yield (
                    f"the test text {name} belongs to no set of new or old text{did_you_mean(name, known)}: name it "
                    "after one of them, or leave it out"
                )


ONE_SET = TextSets()
"""One set of new text and one of old text, without names."""

"""What all files of a LaTeX document share: definitions, limits, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from graftlm.errors import DataError
from graftlm.pipelines.summarize.readers.latex_arguments import LatexNode, parse_latex, unclosed_nodes
from graftlm.pipelines.summarize.readers.latex_files import LatexFiles
from graftlm.pipelines.summarize.readers.latex_source import (
    Definition,
    LatexDefinitions,
    TypesetSource,
    typeset_source,
)
from graftlm.pipelines.summarize.readers.roles import element_roles
from graftlm.pipelines.summarize.text import import_extra

MAX_DEPTH = 40
"""Deepest level of macros inside macros."""
_MAX_REPLACED = 5_000_000  # characters that replace macros, in all
_MACRO_COST = 100  # characters as which each macro counts beside what replaces it


class DocumentState:
    """What all files of a document share."""

    def __init__(self, name: str, files: LatexFiles) -> None:
        self.name = name
        self.files = files
        self.definitions = LatexDefinitions()
        self.unknown_macros = Counter[str]()
        self.unknown_environments = Counter[str]()
        self.left_out_macros = Counter[str]()  # those that are not known, in the definitions of environments
        self.unclosed: list[str] = []  # places of what has no end
        self._replaced = 0
        self._bodies: dict[str, Sequence[LatexNode | None]] = {}  # the nodes of definitions
        latex2text = import_extra("pylatexenc.latex2text", "Reading LaTeX")
        self.converter = latex2text.LatexNodes2Text(math_mode="verbatim")

    def add_file(self, text: str) -> tuple[TypesetSource, Sequence[LatexNode | None]]:
        """Add the file that was opened last.

        Returns:
            What of the file is typeset, and its nodes.
        """
        self.files.add(text)
        source = typeset_source(text, self.definitions, self.files.read_preamble)
        nodes = self.parse(source.text)
        self._note_unclosed(source, nodes)
        return source, nodes

    def parse(self, text: str) -> Sequence[LatexNode | None]:
        """Return the nodes of a text."""
        macros = {name: macro.arguments for name, macro in self.definitions.macros.items()}
        environments = {name: environment.arguments for name, environment in self.definitions.environments.items()}
        return parse_latex(
            text,
            macros=_macro_forms() | macros,
            environments=_environment_forms() | environments,
        )

    def _note_unclosed(self, source: TypesetSource, nodes: Sequence[LatexNode | None]) -> None:
        """Remember the lines in which something begins that has no end."""
        page = self.files.pages[-1]
        for node in unclosed_nodes(source.text, nodes):
            line = page.count("\n", 0, source.position(node.pos)) + 1
            file = f"{self.files.names[-1]}, " if len(self.files.names) > 1 else ""
            self.unclosed.append(f"{file}line {line:,}")

    def expansion(self, macro: str) -> Definition | None:
        """Return the definition of a macro that is to be replaced; None for other macros.

        Raises:
            DataError: macros are replaced by too many characters.
        """
        definition = self.definitions.macros.get(macro)
        if definition is not None:
            self._count_expansion(macro, definition)
        return definition

    def environment_expansion(self, environment: str) -> Definition | None:
        """Return the definition of an environment that is to be replaced; None for other environments.

        Raises:
            DataError: macros are replaced by too many characters.
        """
        definition = self.definitions.environments.get(environment)
        if definition is not None:
            self._count_expansion(f"begin{{{environment}}}", definition)
        return definition

    def _count_expansion(self, macro: str, definition: Definition) -> None:
        self._replaced += len(definition.body) + _MACRO_COST
        self.check_expansion(macro, self._replaced <= _MAX_REPLACED)

    def check_expansion(self, macro: str, is_allowed: bool) -> None:
        """Raise `DataError` unless a macro may be replaced."""
        if not is_allowed:
            raise DataError(
                f"{self.name} has macros that are replaced at more than {MAX_DEPTH} levels or by more than "
                f"{_MAX_REPLACED:,} characters, such as \\{macro}: correct their definitions."
            )

    def body_nodes(self, definition: Definition) -> Sequence[LatexNode | None]:
        """Return the nodes of what a macro is replaced by."""
        if definition.body not in self._bodies:
            self._bodies[definition.body] = self.parse(definition.body)
        return self._bodies[definition.body]

    def notes(self) -> Iterator[str]:
        """Yield what was left out or is not known."""
        yield from self.files.notes
        if self.definitions.unknown_conditionals:
            counts = _counts(self.definitions.unknown_conditionals)
            yield f"has conditionals whose value is not known ({counts}), of which no branch is read"
        if self.definitions.unclosed:
            yield f"has conditionals without \\fi ({self.definitions.unclosed:,} in all)"
        if self.unknown_macros:
            yield f"has macros that are not known ({_counts(self.unknown_macros)}), which stay as they are written"
        if self.left_out_macros:
            counts = _counts(self.left_out_macros)
            yield f"defines environments by macros that are not known ({counts}), which are left out"
        if self.unclosed:
            count = len(self.unclosed)
            yield f"has groups, formulas or environments that are not closed (in {self.unclosed[0]}; {count:,} in all)"
        if self.unknown_environments:
            yield f"has environments that are not known ({_counts(self.unknown_environments)}), whose text is read"


def _counts(counts: Counter[str]) -> str:
    """Return the three most frequent names with their numbers."""
    named = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(3))
    return f"{named}, and {len(counts) - 3} more" if len(counts) > 3 else named


@cache
def _macro_forms() -> dict[str, str]:
    """Return the forms of the arguments of known macros, which may have a star."""
    forms = element_roles("latex_arguments")
    return {name: form if form.startswith("*") else f"*{form}" for name, form in forms.items()}


@cache
def _environment_forms() -> dict[str, str]:
    """Return the forms of the arguments of known environments, and of their variants with a star."""
    forms: dict[str, str] = {}
    for name in element_roles("latex_environments"):
        form = element_roles("latex_environment_arguments").get(name)
        if form is not None or element_roles("latex_environments")[name] == "prose":
            forms |= {name: form or "", f"{name}*": form or ""}
    return forms

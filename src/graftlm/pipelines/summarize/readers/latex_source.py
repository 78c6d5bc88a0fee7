"""The part of LaTeX source that is typeset: without the branches of conditionals that are not taken, and definitions.

pylatexenc, which parses what is left, knows neither conditionals nor definitions.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

# A `%` in an address begins no comment.
_ADDRESS = r"\\(?:url|path|nolinkurl|href\s*(?:\[[^\]]*\])?)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_TOKEN = re.compile(
    r"%[^\n]*|" + _ADDRESS + r"|\\verb\*?(?P<delimiter>[^\sa-zA-Z*]).*?(?P=delimiter)"
    r"|\\begin\s*\{(?P<verbatim>verbatim\*?|Verbatim|lstlisting|minted|comment)\}.*?(?:\\end\s*\{(?P=verbatim)\}|\Z)"
    r"|\\begin\s*\{document\}"
    r"|\\(?P<word>[A-Za-z@]+)"
    r"|\\.",
    re.DOTALL,
)
_PRIMITIVES = {
    *("if", "ifcat", "ifx", "ifnum", "ifdim", "ifodd", "ifcase", "iftrue", "iffalse", "ifdefined", "ifcsname"),
    *("ifvmode", "ifhmode", "ifmmode", "ifinner", "ifvoid", "ifhbox", "ifvbox", "ifeof", "iffontchar"),
    *("ifpdf", "ifxetex", "ifluatex", "iftutex", "ifPDFTeX", "ifXeTeX", "ifLuaTeX"),
}
_DEFINITIONS = {"newcommand", "renewcommand", "providecommand", "DeclareRobustCommand", "DeclareMathOperator"}
_DOCUMENT_DEFINITIONS = {
    "NewDocumentCommand",
    "RenewDocumentCommand",
    "ProvideDocumentCommand",
    "DeclareDocumentCommand",
}
_ENVIRONMENT_DEFINITIONS = {"newenvironment", "renewenvironment", "provideenvironment"}
_DOCUMENT_ENVIRONMENT_DEFINITIONS = {
    "NewDocumentEnvironment",
    "RenewDocumentEnvironment",
    "ProvideDocumentEnvironment",
    "DeclareDocumentEnvironment",
}
_BODY_DEFINITIONS = {"NewEnviron", "RenewEnviron"}  # They write the environment's text as \BODY.
_PRIMITIVE_DEFINITIONS = {"def", "gdef", "edef", "xdef"}
# The value that each macro gives the switch that it names.
_SWITCHES = {
    "newboolean": False,
    "newbool": False,
    "provideboolean": False,
    "newtoggle": False,
    "providetoggle": False,
    "toggletrue": True,
    "togglefalse": False,
    "booltrue": True,
    "boolfalse": False,
}
_SETTERS = {"setboolean", "setbool", "settoggle"}
_GAP = r"(?:\s|%[^\n]*\n)*"
_NAME = r"\*?\s*(?:\{\s*\\([A-Za-z@]+)\s*\}|\\([A-Za-z@]+))" + _GAP
_PARAMETERS = rf"(?:\[(\d)\]{_GAP})?(?:\[([^\]]*)\]{_GAP})?"
_COMMAND = re.compile(_NAME + _PARAMETERS)
_DOCUMENT_PARAMETERS = r"\{((?:[^{}]|\{[^{}]*\})*)\}" + _GAP
_DOCUMENT_COMMAND = re.compile(_NAME + _DOCUMENT_PARAMETERS)
_PRIMITIVE_COMMAND = re.compile(r"\s*\\([A-Za-z@]+)((?:#\d)*)" + _GAP)
_ENVIRONMENT_NAME = r"\*?\s*\{\s*([\w@*-]+)\s*\}" + _GAP
_ENVIRONMENT = re.compile(_ENVIRONMENT_NAME + _PARAMETERS)
_DOCUMENT_ENVIRONMENT = re.compile(_ENVIRONMENT_NAME + _DOCUMENT_PARAMETERS)
_DOCUMENT_DEFAULT = re.compile(r"\s*O\{([^}]*)\}")
_GAPS = re.compile(_GAP)
_LET = re.compile(r"\s*\\([A-Za-z@]+)\s*=?\s*\\([A-Za-z@]+)")
_NEWIF = re.compile(r"\s*\{?\s*\\if([A-Za-z@]+)\s*\}?")
_WORD_ARGUMENT = re.compile(r"\s*\{\s*([\w@*-]+)\s*\}")
_TEST_TOKENS = re.compile(r"\s*(\\[A-Za-z@]+|[^\\])(\s*\\[A-Za-z@]+|[^\\])")
_CONTROL_WORD = re.compile(r"\s*\\([A-Za-z@]+)")
_TWO_CONTROL_WORDS = re.compile(r"\s*\\([A-Za-z@]+)\s*\\([A-Za-z@]+)")
_CONTROL_NAME = re.compile(r"([^\\]*?)\\endcsname")
_BOOLEAN = re.compile(r"\s*(\\not\s*)?\\boolean\s*\{\s*([\w@-]+)\s*\}\s*")
_THEOREM = re.compile(r"\*?\s*\{([^}]*)\}(?:\[[^\]]*\])?\s*\{[^}]*\}(?:\[[^\]]*\])?")
_INPUT = re.compile(r"\s*(?:\{([^}]*)\}|([^\s{}\\%]+))")
# The length of a macro such as `\vskip`, which has no braces, or of an assignment to a length.
_LENGTH = re.compile(r"\s*=?\s*-?(?:\d*\.?\d+\s*(?:pt|cm|mm|in|ex|em|bp|pc|sp|dd|fill?l?)\b|-?\d*\.?\d*\\[a-z]+width)")
_LENGTH_WORDS = {"vskip", "hskip", "kern", "parskip", "parindent", "baselineskip", "itemsep", "topsep", "textwidth"}
_LINE_REST = re.compile(r"[ \t]*\r?\n")
_BRACE = re.compile(_ADDRESS + r"|\\.|%[^\n]*|[{}]", re.DOTALL)
_BLANKS = re.compile(r"[ \t]*")


@dataclass(frozen=True)
class Definition:
    r"""A macro or an environment that a document defines.

    Attributes:
        arguments: the form of its arguments.
        body: what it is replaced by, in which `#1` stands for the first argument, and `\BODY` for the text of an
            environment.
        default: the first argument if it is optional and absent.
    """

    arguments: str
    body: str
    default: str = ""


@dataclass
class LatexDefinitions:
    r"""What the files of a document define, and what of it is not known.

    Attributes:
        macros: definitions by the name of the macro.
        switches: values of conditionals by name: `draft` for `\newif\ifdraft`, booleans and toggles.
        environments: definitions by the name of the environment.
        hidden_environments: names of environments that `\excludecomment` hides.
        unknown_conditionals: number of conditionals whose value is not known, by name.
        unclosed: number of conditionals without an end.
    """

    macros: dict[str, Definition] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)
    environments: dict[str, Definition] = field(default_factory=dict)
    hidden_environments: set[str] = field(default_factory=set)
    unknown_conditionals: Counter[str] = field(default_factory=Counter)
    unclosed: int = 0

    def is_defined(self, name: str) -> bool:
        """Return whether the document defines a macro."""
        is_switch = name.removesuffix("true").removesuffix("false") in self.switches
        return name in self.macros or is_switch or name.removeprefix("if") in self.switches


@dataclass(frozen=True)
class TypesetSource:
    """What is left of a source.

    Attributes:
        text: the text.
        starts: positions in `text` at which a piece of the source begins, in increasing order.
        sources: the position of each of these pieces in the source.
    """

    text: str
    starts: list[int]
    sources: list[int]

    def position(self, index: int) -> int:
        """Return the position in the source of the character of `text` at an index."""
        piece = bisect_right(self.starts, index) - 1
        return self.sources[piece] + index - self.starts[piece]


def typeset_source(
    text: str,
    definitions: LatexDefinitions,
    read_input: Callable[[str], str | None] = lambda name: None,
) -> TypesetSource:
    """Return the text without what is not typeset, and record its definitions.

    Args:
        text: LaTeX source.
        definitions: what is defined so far; the definitions of the text are added.
        read_input: returns the text of a file that the preamble includes; None if it is not read.
    """
    scanner = _Scanner(text, definitions, read_input)
    scanner.scan(0, len(text))
    return scanner.result()


@dataclass
class _Branch:
    """The current branch of an open conditional.

    Attributes:
        is_typeset: whether the branch is typeset; None if that is not known, for the other branch as well.
    """

    is_typeset: bool | None


class _Scanner:
    """Reads control words in order, and keeps the pieces between those that are not typeset."""

    def __init__(
        self,
        text: str,
        definitions: LatexDefinitions,
        read_input: Callable[[str], str | None],
    ) -> None:
        self._text = text
        self._definitions = definitions
        self._read_input = read_input
        self._pieces: list[tuple[int, int]] = []
        self._branches: list[_Branch] = []
        self._kept_to = 0  # end of what was kept or cut
        self._in_preamble = "\\begin{document}" in text
        self._negated = False

    def result(self) -> TypesetSource:
        """Return what was kept."""
        starts = []
        length = 0
        for first, last in self._pieces:
            starts.append(length)
            length += last - first
        kept = "".join(self._text[first:last] for first, last in self._pieces)
        return TypesetSource(kept, starts or [0], [first for first, _ in self._pieces] or [len(self._text)])

    @property
    def _is_typeset(self) -> bool:
        return all(branch.is_typeset for branch in self._branches)

    def scan(self, start: int, end: int) -> None:
        """Read a range of the text."""
        self._kept_to = start
        position = start
        outer = len(self._branches)
        while match := _TOKEN.search(self._text, position, end):
            position = self._read_token(match, end)
            if position < 0:  # \endinput
                break
        if len(self._branches) > outer:
            self._definitions.unclosed += len(self._branches) - outer
        if position >= 0 and self._is_typeset:
            self._keep_to(end)
        del self._branches[outer:]
        self._kept_to = end

    def _keep_to(self, end: int) -> None:
        """Keep the text up to a position."""
        if end > self._kept_to:
            self._pieces.append((self._kept_to, end))
        self._kept_to = max(self._kept_to, end)

    def _cut(self, start: int, end: int) -> int:
        """Keep the text before a range that is not typeset, and return the position after it.

        TeX skips the blanks after a control word. A line of which nothing is left must not become an empty one, which
        would end the paragraph.
        """
        self._keep_to(start)
        blanks = _BLANKS.match(self._text, end)
        end = blanks.end() if blanks else end
        before = self._text[:start].rstrip(" \t")[-1:] if start else "\n"
        rest = _LINE_REST.match(self._text, end)
        if rest and before in ("", "\n"):
            end = rest.end()
        self._kept_to = max(self._kept_to, end)
        return self._kept_to

    def _read_token(self, match: re.Match[str], end: int) -> int:
        """Handle a token, and return the position after it; -1 at the end of the file's typeset text."""
        word = match["word"]
        if match.group().startswith("\\begin") and not match["verbatim"]:
            self._in_preamble = False
        if match["verbatim"] == "comment" and self._is_typeset:
            return self._cut(match.start(), match.end())
        if word is None:
            return match.end()
        if word in ("else", "or", "fi"):
            return self._end_branch(word, match)
        if self._is_conditional(word, match.end()):
            return self._open_conditional(word, match)
        if not self._is_typeset:
            return match.end()
        if word == "endinput":
            self._keep_to(match.start())
            return -1
        if word == "unless":
            self._negated = True
            return self._cut(match.start(), match.end())
        return self._read_definition(word, match) or self._read_choice(word, match) or self._read_included(word, match)

    def _is_conditional(self, word: str, position: int) -> bool:
        r"""Return whether a control word begins a conditional that ends with `\fi`.

        Macros such as `\ifthenelse` have their branches as arguments in braces.
        """
        if word in _PRIMITIVES:
            return True
        if not word.startswith("if") or word in ("iff", "iflanguage"):
            return False
        if word[2:] in self._definitions.switches:
            return True
        return word not in self._definitions.macros and not self._text[position : position + 20].lstrip().startswith(
            "{"
        )

    def _open_conditional(self, word: str, match: re.Match[str]) -> int:
        """Open a conditional, and return the position after its test."""
        negated = self._negated
        self._negated = False
        if not self._is_typeset:
            self._branches.append(_Branch(is_typeset=False))
            return match.end()
        value, end = self._evaluate(word, match.end())
        if value is None:
            self._definitions.unknown_conditionals[f"\\{word}"] += 1
        elif negated:
            value = not value
        end = self._cut(match.start(), end)
        self._branches.append(_Branch(is_typeset=value))
        return end

    def _evaluate(self, word: str, position: int) -> tuple[bool | None, int]:
        """Return the value of a conditional, None if it is not known, and the position after its test."""
        known = self._definitions
        text = self._text
        if word in ("iftrue", "iffalse"):
            return word == "iftrue", position
        if word[2:] in known.switches:
            return known.switches[word[2:]], position
        if word == "ifdefined" and (match := _CONTROL_WORD.match(text, position)):
            return known.is_defined(match[1]), match.end()
        if word == "ifcsname" and (match := _CONTROL_NAME.match(text, position)):
            return known.is_defined(match[1].strip()), match.end()
        if word == "ifx" and (match := _TWO_CONTROL_WORDS.match(text, position)):
            names = [name for name in match.groups() if name not in ("undefined", "@undefined")]
            if len(names) == 1:
                return not known.is_defined(names[0]), match.end()
        if word == "if" and (match := _TEST_TOKENS.match(text, position)):
            first, second = (self._character(token) for token in match.groups())
            if first and second:
                return first == second, match.end()
        return None, position

    def _character(self, token: str) -> str | None:
        r"""Return the character that a token of `\if` stands for; None if it is not known."""
        name = token.strip().removeprefix("\\")
        if not token.strip().startswith("\\"):
            return token if token.strip() else " "
        definition = self._definitions.macros.get(name)
        return definition.body if definition and len(definition.body) == 1 else None

    def _end_branch(self, word: str, match: re.Match[str]) -> int:
        """Begin the other branch of a conditional, or end it."""
        if not self._branches:
            return self._cut(match.start(), match.end()) if self._is_typeset else match.end()
        was_typeset = self._is_typeset
        branch = self._branches[-1]
        if was_typeset:
            self._keep_to(match.start())
        if word == "fi":
            self._branches.pop()
        elif branch.is_typeset is not None:
            branch.is_typeset = not branch.is_typeset
        if not self._is_typeset:
            return match.end()
        # From here on the text is typeset; what was kept ends before this conditional or at this control word.
        start = match.start() if was_typeset else self._kept_to
        self._kept_to = match.end()
        return self._cut_after(start, match.end())

    def _cut_after(self, start: int, end: int) -> int:
        """Return the position after a cut whose beginning was kept already, as `_cut` does."""
        before = self._text[:start].rstrip(" \t")[-1:] if start else "\n"
        blanks = _BLANKS.match(self._text, end)
        end = blanks.end() if blanks else end
        rest = _LINE_REST.match(self._text, end)
        if rest and before in ("", "\n"):
            end = rest.end()
        self._kept_to = end
        return end

    def _read_definition(self, word: str, match: re.Match[str]) -> int:
        """Record and cut a definition, and return the position after it; 0 if there is none."""
        known = self._definitions
        text = self._text
        end = match.end()
        if word in _LENGTH_WORDS and (found := _LENGTH.match(text, end)):
            return self._cut(match.start(), found.end())
        if word == "newif" and (found := _NEWIF.match(text, end)):
            known.switches.setdefault(found[1], False)
            return self._cut(match.start(), found.end())
        for suffix, value in (("true", True), ("false", False)):
            name = word.removesuffix(suffix)
            if name != word and name in known.switches:
                known.switches[name] = value
                return self._cut(match.start(), end)
        if (word in _SWITCHES or word in _SETTERS) and (found := _WORD_ARGUMENT.match(text, end)):
            value = _SWITCHES.get(word, False)
            end = found.end()
            if word in _SETTERS and (setting := _WORD_ARGUMENT.match(text, end)):
                value = setting[1] == "true"
                end = setting.end()
            known.switches[found[1]] = value
            return self._cut(match.start(), end)
        if word in ("excludecomment", "includecomment") and (found := _WORD_ARGUMENT.match(text, end)):
            if word == "excludecomment":
                known.hidden_environments.add(found[1])
            else:
                known.environments[found[1]] = Definition("", "\\BODY ")
            return self._cut(match.start(), found.end())
        if word in ("newtheorem", "spnewtheorem") and (found := _THEOREM.match(text, end)):
            known.environments[found[1].strip()] = Definition("t", "\\BODY ")
            return self._cut(match.start(), found.end())
        return self._read_environment(word, match) or self._read_macro(word, match)

    def _read_environment(self, word: str, match: re.Match[str]) -> int:
        r"""Record and cut the definition of an environment, as that of a macro with `\BODY`; 0 if there is none."""
        text = self._text
        is_document = word in _DOCUMENT_ENVIRONMENT_DEFINITIONS
        if not is_document and word not in _ENVIRONMENT_DEFINITIONS | _BODY_DEFINITIONS:
            return 0
        found = (_DOCUMENT_ENVIRONMENT if is_document else _ENVIRONMENT).match(text, match.end())
        if found is None:
            return 0
        arguments = _document_form(found[2]) if is_document else _form(found[2], found[3])
        begin, end = self._group(found.end())
        if word in _BODY_DEFINITIONS:
            body = begin
        else:
            closing, end = self._group(end)
            body = f"{begin}\\BODY{{}}{closing}"
        if not set(arguments) <= set("*[{"):
            arguments = "a"
        default = _document_default(found[2]) if is_document else found[3] or ""
        self._definitions.environments[found[1]] = Definition(arguments, body, default)
        return self._cut(match.start(), end)

    def _group(self, position: int) -> tuple[str, int]:
        """Return the text of the next group without its braces, and the position after it; no text without a group."""
        gap = _GAPS.match(self._text, position)
        start = gap.end() if gap else position
        end = group_end(self._text, start)
        return ("", position) if end < 0 else (self._text[start + 1 : end - 1], end)

    def _read_macro(self, word: str, match: re.Match[str]) -> int:
        """Record and cut the definition of a macro; 0 if there is none."""
        text = self._text
        end = match.end()
        name, definition = "", Definition("", "")
        if word in _DEFINITIONS and (found := _COMMAND.match(text, end)):
            name = found[1] or found[2]
            definition = Definition(_form(found[3], found[4]), "", found[4] or "")
        elif word in _DOCUMENT_DEFINITIONS and (found := _DOCUMENT_COMMAND.match(text, end)):
            name = found[1] or found[2]
            definition = Definition(_document_form(found[3]), "", _document_default(found[3]))
        elif word in _PRIMITIVE_DEFINITIONS and (found := _PRIMITIVE_COMMAND.match(text, end)):
            name = found[1]
            definition = Definition("{" * found[2].count("#"), "")
        elif word == "let" and (found := _LET.match(text, end)):
            self._define(word, found[1], Definition("", f"\\{found[2]} "))
            return self._cut(match.start(), found.end())
        else:
            return 0
        last = group_end(text, found.end())
        if last < 0:
            return 0
        body = text[found.end() + 1 : last - 1]
        if word != "DeclareMathOperator" and set(definition.arguments) <= set("*[{"):
            self._define(word, name, Definition(definition.arguments, body, definition.default))
        return self._cut(match.start(), last)

    def _define(self, word: str, name: str, definition: Definition) -> None:
        is_kept = word.lower().startswith("provide") and name in self._definitions.macros
        if not is_kept:
            self._definitions.macros[name] = definition

    def _read_choice(self, word: str, match: re.Match[str]) -> int:
        r"""Read the branch that a macro such as `\iftoggle` takes, and return the position after it; 0 for others."""
        text = self._text
        value: bool | None = None
        if word in ("iftoggle", "ifbool") and (found := _WORD_ARGUMENT.match(text, match.end())):
            value = self._definitions.switches.get(found[1])
            first = found.end()
        elif word == "ifthenelse":
            first = group_end(text, match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip()))
            if first < 0:
                return 0
            test = text[match.end() : first].strip()[1:-1]
            if found := _BOOLEAN.fullmatch(test):
                switch = self._definitions.switches.get(found[2])
                value = None if switch is None else switch != bool(found[1])
        else:
            return 0
        branches = []
        end = first
        for _ in range(2):
            start = end + len(text[end:]) - len(text[end:].lstrip())
            end = group_end(text, start)
            if end < 0:
                return 0
            branches.append((start + 1, end - 1))
        self._keep_to(match.start())
        if value is None:
            self._definitions.unknown_conditionals[f"\\{word}"] += 1
        else:
            self.scan(*branches[0 if value else 1])
        self._kept_to = end
        return self._cut_after(match.start(), end) if value is None else end

    def _read_included(self, word: str, match: re.Match[str]) -> int:
        """Read the definitions of a file that a preamble includes, and return the position after the control word."""
        text = self._text
        if word in ("input", "include") and self._in_preamble and (found := _INPUT.match(text, match.end())):
            included = self._read_input((found[1] or found[2]).strip())
            if included is not None:
                typeset_source(included, self._definitions)
        return match.end()


def length_end(text: str, position: int) -> int:
    """Return the position after a length, or the assignment of one, that may stand at a position."""
    found = _LENGTH.match(text, position)
    return found.end() if found else position


def _form(count: str | None, default: str | None) -> str:
    """Return the form of the arguments by their number, of which the first is optional if it has a default."""
    optional = "[" if default is not None else ""
    return optional + "{" * (int(count or 0) - len(optional))


def _document_form(arguments: str) -> str:
    r"""Return the form of the arguments of `\NewDocumentCommand`."""
    optional = re.sub(r"O\{[^}]*\}|o", "[", arguments.replace(" ", ""))
    return optional.replace("m", "{").replace("s", "*").replace("+", "")


def _document_default(arguments: str) -> str:
    r"""Return the default of the first argument of `\NewDocumentCommand`; an empty text if it has none."""
    found = _DOCUMENT_DEFAULT.match(arguments)
    return found[1] if found else ""


def group_end(text: str, start: int) -> int:
    """Return the position after the group in braces that begins at `start`; -1 if there is none, or no end."""
    if text[start : start + 1] != "{":
        return -1
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if not depth:
            return match.end()
    return -1

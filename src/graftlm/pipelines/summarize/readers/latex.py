"""LaTeX reader, based on pylatexenc, whose nodes have positions in the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from graftlm.pipelines.summarize.document import SENTENCE_END, BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.document_builder import aligned_spans
from graftlm.pipelines.summarize.readers.blocks import shifted_text
from graftlm.pipelines.summarize.readers.latex_arguments import LatexNode
from graftlm.pipelines.summarize.readers.latex_files import LatexFiles
from graftlm.pipelines.summarize.readers.latex_source import (
    Definition,
    TypesetSource,
    group_end,
    length_end,
)
from graftlm.pipelines.summarize.readers.latex_state import MAX_DEPTH, DocumentState
from graftlm.pipelines.summarize.readers.roles import element_roles

_HEADING_LEVELS = {
    "part": 1,
    "chapter": 1,
    "section": 1,
    "subsection": 2,
    "subsubsection": 3,
    "paragraph": 4,
    "subparagraph": 5,
    "frametitle": 3,
    "framesubtitle": 4,
}
_PARAGRAPH_BREAK = re.compile(r"\r?\n[ \t]*\r?\n\s*")
_INPUT = re.compile(r"\\(?:input|include|subfile|subfileinclude)\s*(?:\{([^{}]*)\}|([^\s{}\\%]+))")
_IMPORT = re.compile(r"\\(?:sub)?import\*?\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_PARAMETER = re.compile(r"#(\d)")
_ENVIRONMENT_MARK = re.compile(r"\\(begin|end)\s*\{\s*([^{}]*?)\s*\}")
_ESCAPE = re.compile(r"\\(?=[%#&_~{}$])|%?\s*\n\s*")  # in an address
_BLOCK_BREAK = re.compile(r"\n\s*\n|\\(?:par|item|begin|BODY|(?:sub)*section|(?:sub)?paragraph)\b|\\\[|\$\$")
_INNER_SENTENCE_END = re.compile(r"[.!?]\s")


class LatexDocument(NamedTuple):
    """The files of a document, and its blocks.

    Attributes:
        pages: the text of each file that was read.
        files: the name of each; empty for a document in one file.
        blocks: the blocks in order.
    """

    pages: list[str]
    files: list[str]
    blocks: list[TextBlock]


def read_latex(
    text: str,
    notes: list[str],
    name: str = "The text",
    path: Path | None = None,
    max_characters: int | None = None,
) -> LatexDocument:
    """Read paragraphs, list items and headings of the document's body. Inline formulas keep their source.

    Tables, figures, displayed formulas and code are blocks of their source. Only what is typeset is read: branches of
    conditionals that are taken, and macros of the document as they are defined. Footnotes, citations and remarks in the
    margin are skipped. A macro that is not known stays in its sentence as it is written.

    Args:
        text: the source.
        notes: receives what was left out or is not known.
        name: name of the document in messages.
        path: the file of the source. Files that it includes are read if they are in its folder or below.
        max_characters: maximum number of characters of all files.

    Raises:
        DataError: macros are replaced without end, or the files are too large together.
        MissingExtraError: pylatexenc is not installed.
    """
    files = LatexFiles(name, path, max_characters)
    state = DocumentState(name, files)
    blocks = _read_file(state, text)
    notes.extend(state.notes())
    if len(files.names) == 1:
        return LatexDocument(files.pages, [], [replace(block, page=None) for block in blocks])
    return LatexDocument(files.pages, files.names, blocks)


def _read_file(state: DocumentState, text: str) -> list[TextBlock]:
    """Return the blocks of the file that was opened last."""
    source, nodes = state.add_file(text)
    parser = _LatexBlockParser(state, source, page=len(state.files.pages))
    parser.walk(_body(nodes))
    return parser.finish()


def _body(nodes: Iterable[LatexNode | None]) -> Iterable[LatexNode | None]:
    """Return the nodes of the document environment, or all nodes without one."""
    for node in nodes:
        if node is not None and getattr(node, "environmentname", None) == "document":
            return node.nodelist
    return nodes


@dataclass
class _Frame:
    """A text whose nodes are walked: the source of a file, or what a macro is replaced by.

    Attributes:
        text: the text.
        call: the range of the macro in the file; None for the file itself.
        arguments: the nodes of the macro's arguments, which belong to the outer frame.
        default: what stands for the first argument if it is absent.
        outer: the frame around.
        content: the environment whose definition the text is; it belongs to the outer frame. None for other texts.
        handled_to: end of what was read otherwise than by walking the nodes of the text.
    """

    text: str
    call: tuple[int, int] | None = None
    arguments: Sequence[LatexNode | None] = ()
    default: str = ""
    outer: _Frame | None = None
    content: LatexNode | None = None
    handled_to: int = 0

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else 1 + self.outer.depth


def _content_range(environment: LatexNode) -> tuple[int, int]:
    """Return the range of what an environment contains."""
    nodes = [node for node in environment.nodelist if node is not None]
    if not nodes:
        end = environment.pos + environment.len
        return end, end
    return nodes[0].pos, nodes[-1].pos + nodes[-1].len


def _content_role(definition: Definition) -> BlockKind | Literal["hidden"]:
    """Return the role of the environments around the text of one that the document defines; `prose` without others."""
    open_names: list[str] = []
    begin, _, _ = definition.body.partition("\\BODY")
    for match in _ENVIRONMENT_MARK.finditer(begin):
        if match[1] == "begin":
            open_names.append(match[2].rstrip("*"))
        elif open_names:
            open_names.pop()
    roles = [element_roles("latex_environments").get(name, "prose") for name in open_names]
    return next((role for role in roles if role != "prose"), "prose")


class _LatexBlockParser:
    """Walks the nodes of a file and collects text spans into blocks."""

    def __init__(self, state: DocumentState, source: TypesetSource, page: int) -> None:
        self._state = state
        self._source = source
        self._page = page
        self._frame = _Frame(source.text)
        self._blocks: list[TextBlock] = []
        self._spans: list[TextSpan] = []
        self._quotations = 0  # that are open
        self._handlers: dict[str, Callable[[LatexNode], None]] = {
            "LatexCharsNode": self._handle_characters,
            "LatexCommentNode": self._handle_comment,
            "LatexGroupNode": self._handle_group,
            "LatexMathNode": self._handle_formula,
            "LatexSpecialsNode": self._handle_specials,
            "LatexEnvironmentNode": self._handle_environment,
            "LatexMacroNode": self._handle_macro,
        }
        self._role_handlers: dict[str, Callable[[LatexNode], None]] = {
            "inline": self._walk_argument,
            "first": partial(self._walk_argument, index=-2),
            "address": self._add_address,
            "quoted": self._add_quotation,
            "upper": partial(self._add_changed, change=str.upper),
            "lower": partial(self._add_changed, change=str.lower),
            "raised": partial(self._add_shifted, tag="sup"),
            "lowered": partial(self._add_shifted, tag="sub"),
            "quantity": self._add_quantity,
            "break": self._handle_break,
            "item": self._handle_item,
            "input": self._include,
            "space": self._add_space,
            "gap": self._add_gap,
            "kept": partial(self._keep_macro, is_known=True),
            "silent": self._skip_macro,
            "symbol": self._add_converted,
        }

    def finish(self) -> list[TextBlock]:
        """Close the open block and return all blocks, whose spans refer to the file."""
        self._close_block()
        return self._blocks

    def walk(self, nodes: Iterable[LatexNode | None] | None) -> None:
        """Handle nodes in order."""
        for node in nodes or ():
            if node is None or node.pos + node.len <= self._frame.handled_to:
                continue
            handle = self._handlers[type(node).__name__]
            handle(node)

    def _handle_characters(self, node: LatexNode) -> None:
        """Add a node's text, and close the block at each empty line."""
        text = self._frame.text
        end = node.pos + node.len
        start = max(node.pos, self._frame.handled_to)
        for gap in _PARAGRAPH_BREAK.finditer(text, start, end):
            self._add_literal(start, gap.start())
            self._close_block()
            start = gap.end()
        self._add_literal(start, end)

    def _handle_comment(self, node: LatexNode) -> None:
        space = node.comment_post_space.removeprefix("\r").removeprefix("\n")
        if "\n" in space:  # An empty line follows.
            self._close_block()

    def _handle_group(self, node: LatexNode) -> None:
        self.walk(node.nodelist)

    def _handle_formula(self, node: LatexNode) -> None:
        if node.displaytype == "inline":
            self._add_literal(node.pos, node.pos + node.len, is_formula=True)
        else:
            self._add_kind(node, "formula")

    def _handle_specials(self, node: LatexNode) -> None:
        if node.specials_chars.startswith("\n"):
            self._close_block()
        else:
            self._add_converted(node)

    def _handle_environment(self, node: LatexNode) -> None:
        """Walk an environment of prose, add another known one as a block of its kind, and walk unknown ones."""
        name = node.environmentname
        definitions = self._state.definitions
        if name in definitions.hidden_environments:
            return
        role = element_roles("latex_environments").get(name.rstrip("*"))
        definition = self._state.environment_expansion(name)
        if definition is not None and role in (None, "prose"):
            role = _content_role(definition)
        if role == "hidden":
            return
        if role is not None and role != "prose":
            self._add_kind(node, role)
            return
        if role is None:
            self._state.unknown_environments[name] += 1
        self._close_block()
        if name == "abstract":
            self._add_heading("Abstract", node)
        self._add_printed_arguments(node)
        if definition is None:
            self.walk(node.nodelist)
        else:
            self._expand(node, definition, name=f"begin{{{name}}}", content=node)
        self._close_block()

    def _add_printed_arguments(self, node: LatexNode) -> None:
        """Add the arguments of an environment that are printed: its label as a field, and its headings."""
        if not node.nodeargd:
            return
        for letter, argument in zip(node.nodeargd.argspec, node.nodeargd.argnlist or (), strict=False):
            if argument is not None and letter in ("t", "g"):
                self.walk(argument.nodelist)
                if letter == "t":
                    self._close_block(kind="field")
                else:
                    self._close_block(_HEADING_LEVELS["frametitle"])

    def _add_heading(self, title: str, node: LatexNode) -> None:
        start, _ = self._file_range(node.pos, node.pos)
        self._blocks.append(TextBlock((TextSpan(title, start, start),), 1, self._page))

    def _add_kind(self, node: LatexNode, kind: BlockKind) -> None:
        """Add a block of the node's source."""
        self._close_block()
        self._add_literal(node.pos, node.pos + node.len)
        self._close_block(kind=kind)

    def _handle_macro(self, node: LatexNode) -> None:
        """Handle a macro by its definition in the document, or by its role."""
        name = node.macroname.rstrip("*")
        definition = self._state.expansion(node.macroname)
        if definition is not None:
            self._expand(node, definition, name=node.macroname)
            return
        if name == "BODY" and self._frame.content is not None:
            self._walk_content(self._frame.content)
            return
        role = element_roles("latex_macros").get(name)
        if name in element_roles("latex_texts"):
            role = "symbol"
        if name in _HEADING_LEVELS:
            self._close_block()
            self._walk_argument(node)
            self._close_block(_HEADING_LEVELS[name])
        elif role is None:
            self._keep_macro(node, is_known=False)
        else:
            handle = self._role_handlers[role]
            handle(node)

    def _handle_break(self, node: LatexNode) -> None:
        self._close_block()

    def _handle_item(self, node: LatexNode) -> None:
        self._close_block()
        self._walk_label(node)

    def _expand(
        self,
        node: LatexNode,
        definition: Definition,
        name: str,
        content: LatexNode | None = None,
    ) -> None:
        """Walk what a macro or an environment of the document is replaced by."""
        frame = self._frame
        self._state.check_expansion(name, frame.depth < MAX_DEPTH)
        arguments = node.nodeargd.argnlist if node.nodeargd else []
        end = node.pos + node.len if content is None else _content_range(content)[0]
        call = frame.call or self._file_range(node.pos, end)
        self._frame = _Frame(definition.body, call, arguments, definition.default, frame, content)
        self.walk(self._state.body_nodes(definition))
        self._frame = frame

    def _walk_content(self, content: LatexNode) -> None:
        """Walk the text of an environment whose definition is being read. What follows has the place of its end."""
        frame = self._frame
        outer = frame.outer
        assert outer is not None, "a definition has a frame around"
        self._frame = outer
        self.walk(content.nodelist)
        frame.call = outer.call or self._file_range(_content_range(content)[1], content.pos + content.len)
        self._frame = frame

    def _keep_macro(self, node: LatexNode, *, is_known: bool) -> None:
        """Add a macro with the groups that directly follow it as it is written, because its output is not known.

        In the definition of an environment, where macros rarely print anything, one that is not known is left out.
        """
        is_left_out = not is_known and self._frame.content is not None
        if is_left_out:
            self._state.left_out_macros[f"\\{node.macroname}"] += 1
        elif not is_known:
            self._state.unknown_macros[f"\\{node.macroname}"] += 1
        text = self._frame.text
        end = node.pos + node.len
        while text[end : end + 1] in ("{", "["):
            last = group_end(text, end) if text[end] == "{" else text.find("]", end) + 1
            if last <= end or "\n\n" in text[end:last]:
                break
            end = last
        if is_left_out:
            end = length_end(text, end)
        self._frame.handled_to = max(self._frame.handled_to, end)
        if not is_left_out:
            self._add_literal(node.pos, end)

    def _skip_macro(self, node: LatexNode) -> None:
        """Remove the space before a skipped macro, such as a citation, unless a word follows the macro."""
        end = node.pos + node.len
        if not self._frame.text[end : end + 1].isalnum():
            self._strip_trailing_space()

    def _strip_trailing_space(self) -> None:
        while self._spans and not self._spans[-1].text.strip():
            self._spans.pop()
        if self._spans and self._spans[-1].is_literal and not self._spans[-1].is_formula:
            last = self._spans[-1]
            text = last.text.rstrip()
            self._spans[-1] = TextSpan(text, last.start, last.start + len(text))

    def _arguments(self, node: LatexNode) -> list[LatexNode]:
        """Return the arguments of a macro that are present."""
        if not node.nodeargd:
            return []
        return [argument for argument in node.nodeargd.argnlist or () if argument is not None]

    def _walk_argument(self, node: LatexNode, index: int = -1) -> None:
        """Walk an argument of a macro, which is printed; by default the last one."""
        arguments = self._arguments(node)
        if len(arguments) >= -index:
            self.walk([arguments[index]])

    def _add_address(self, node: LatexNode) -> None:
        """Add an address, which is read verbatim but for escaped characters and line breaks."""
        for argument in self._arguments(node)[-1:]:
            start = argument.pos
            end = argument.pos + argument.len
            for escape in _ESCAPE.finditer(self._frame.text, start, end):
                self._add_literal(start, escape.start())
                start = escape.end()
            self._add_literal(start, end)

    def _add_quotation(self, node: LatexNode) -> None:
        """Add an argument in quotation marks: single ones with a star or inside others."""
        is_single = "*" in map(self._source_of, self._arguments(node)) or self._quotations % 2 == 1
        opening, closing = "‘’" if is_single else "“”"
        self._quotations += 1
        end = node.pos + node.len
        self._spans.append(TextSpan(opening, *self._file_range(node.pos, node.pos + 1)))
        self._walk_argument(node)
        self._spans.append(TextSpan(closing, *self._file_range(end - 1, end)))
        self._quotations -= 1

    def _add_changed(self, node: LatexNode, change: Callable[[str], str]) -> None:
        """Add an argument with its characters changed, outside formulas."""
        first = len(self._spans)
        self._walk_argument(node)
        for index, span in enumerate(self._spans[first:], first):
            if not span.is_formula:
                self._spans[index] = replace(span, text=change(span.text))

    def _walk_label(self, node: LatexNode) -> None:
        """Add the label of an item in a list of descriptions: a field, unless the text after it continues it."""
        end = node.pos + node.len
        following = self._frame.text[end : end + 20].lstrip()
        for label in self._arguments(node):
            self.walk(label.nodelist)
        if not following[:1].islower():
            self._close_block(kind="field")

    def _add_shifted(self, node: LatexNode, tag: str) -> None:
        """Add an argument as raised or lowered characters, if there are such."""
        first = len(self._spans)
        self._walk_argument(node)
        self._spans[first:] = [replace(span, text=shifted_text(span.text, tag)) for span in self._spans[first:]]

    def _add_quantity(self, node: LatexNode) -> None:
        """Add a number with its unit; as written, if the unit is written with macros."""
        arguments = [argument for argument in self._arguments(node) if self._source_of(argument).startswith("{")]
        source = "".join(map(self._source_of, arguments))
        if not arguments or "\\" in source or "#" in source:
            self._keep_macro(node, is_known=True)
            return
        for number, argument in enumerate(arguments):
            if number:
                place = argument.pos
                self._spans.append(TextSpan(" ", *self._file_range(place, place)))
            self.walk([argument])

    def _source_of(self, node: LatexNode) -> str:
        return self._frame.text[node.pos : node.pos + node.len]

    def _add_space(self, node: LatexNode) -> None:
        r"""Add the space of `\xspace` at the end of a definition, if a word follows the macro."""
        if self._frame.call is None:
            return
        end = self._frame.call[1]
        following = self._state.files.pages[self._page - 1][end : end + 1]
        if following.isalnum() or following in ("(", "$", "\\"):
            self._spans.append(TextSpan(" ", end, end))

    def _add_gap(self, node: LatexNode) -> None:
        self._spans.append(TextSpan(" ", *self._file_range(node.pos, node.pos + node.len)))

    def _include(self, node: LatexNode) -> None:
        """Read an included file, whose name may stand without braces."""
        text = self._frame.text
        match = _INPUT.match(text, node.pos) or _IMPORT.match(text, node.pos)
        if match is None:
            self._keep_macro(node, is_known=False)
            return
        self._frame.handled_to = max(self._frame.handled_to, match.end())
        parts = [part.strip() for part in match.groups() if part is not None]
        name = "/".join(part.strip("/") for part in parts) if len(parts) > 1 else parts[0]
        included = self._state.files.open(name)
        if included is None:
            return
        blocks = _read_file(self._state, included)
        self._state.files.close()
        start, end = self._file_range(node.pos, match.end())
        if self._is_inside_sentence(blocks):
            self._spans.append(TextSpan(blocks[0].text.strip(), start, end))
            return
        self._close_block()
        self._blocks += blocks

    def _is_inside_sentence(self, blocks: Sequence[TextBlock]) -> bool:
        """Return whether an included file is a part of a sentence, such as a number."""
        if len(blocks) != 1 or blocks[0].level or blocks[0].kind != "prose" or not self._spans:
            return False
        before = "".join(span.text for span in self._spans).rstrip()
        return not SENTENCE_END.search(before) and not _INNER_SENTENCE_END.search(blocks[0].text.rstrip())

    def _file_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range in the file of a range of the frame's text.

        Text that replaces a macro is not in the file. Whatever its range, it gets the next place in the macro's call.
        """
        call = self._frame.call
        if call is None:
            first = self._source.position(start)
            return first, self._source.position(end - 1) + 1 if end > start else first
        first, last = call
        cursor = self._last_end
        if cursor > first:
            # Later pieces take one character of the call each, as long as some are left.
            return cursor, min(cursor + 1, max(cursor, last))
        return (first, first + 1) if self._is_divided_call() else (first, last)

    def _is_divided_call(self) -> bool:
        """Return whether the call of the outermost macro also holds arguments or further blocks.

        All macros inside that macro share its call.
        """
        frame: _Frame | None = self._frame
        while frame is not None and frame.call is not None:
            if any(frame.arguments) or _BLOCK_BREAK.search(frame.text):
                return True
            frame = frame.outer
        return False

    @property
    def _last_end(self) -> int:
        """The end in the file of the last text that was added."""
        if self._spans:
            return self._spans[-1].end
        spans = (block.spans for block in reversed(self._blocks) if block.page == self._page)
        last = next(spans, None)
        return last[-1].end if last else 0

    def _add_literal(self, start: int, end: int, *, is_formula: bool = False) -> None:
        """Add a range of the frame's text, in which the arguments of a macro are replaced."""
        if end <= start:
            return
        frame = self._frame
        if frame.outer is not None:
            self._add_replaced(frame.text[start:end], is_formula=is_formula)
            return
        positions = [self._source.position(index) for index in range(start, end)]
        for span in aligned_spans(frame.text[start:end], positions):
            self._spans.append(replace(span, is_formula=is_formula))

    def _add_replaced(self, text: str, *, is_formula: bool) -> None:
        """Add a part of the text that replaces a macro, with the arguments in place of `#1` and so on."""
        frame = self._frame
        end = 0
        for match in _PARAMETER.finditer(text):
            self._add_at_call(text[end : match.start()], is_formula=is_formula)
            index = int(match[1]) - 1
            argument = frame.arguments[index] if index < len(frame.arguments) else None
            if argument is None:
                self._add_at_call(frame.default if index == 0 else "", is_formula=is_formula)
            else:
                self._add_argument(argument, is_formula=is_formula)
            end = match.end()
        self._add_at_call(text[end:], is_formula=is_formula)

    def _add_argument(self, argument: LatexNode, *, is_formula: bool) -> None:
        """Add an argument of the macro that is replaced. It stands in the text around the macro's call."""
        frame = self._frame
        outer = frame.outer
        assert outer is not None, "a replaced macro has a frame around"
        source = outer.text[argument.pos : argument.pos + argument.len]
        if is_formula and outer.outer is None:
            self._add_at_call(source, is_formula=True)
            return
        self._frame = outer
        if is_formula:
            self._add_replaced(source, is_formula=True)
        else:
            handled_to = outer.handled_to  # The argument may occur again.
            self.walk([argument])
            outer.handled_to = handled_to
        self._frame = frame

    def _add_at_call(self, text: str, *, is_formula: bool = False) -> None:
        """Add text that is not in the file, at the place of the macro that it replaces."""
        if text:
            self._spans.append(TextSpan(text, *self._file_range(0, 0), is_formula))

    def _add_converted(self, node: LatexNode) -> None:
        """Add a node as the text into which pylatexenc converts it."""
        text = element_roles("latex_texts").get(getattr(node, "macroname", ""))
        if text is None:
            text = self._state.converter.nodelist_to_text([node])
        if text:
            self._spans.append(TextSpan(text, *self._file_range(node.pos, node.pos + node.len)))

    def _close_block(self, level: int = 0, kind: BlockKind = "prose") -> None:
        if self._spans:
            block = TextBlock(tuple(self._spans), level, self._page, kind)
            self._blocks.append(block)
        self._spans = []

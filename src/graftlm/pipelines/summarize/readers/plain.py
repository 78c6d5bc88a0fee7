"""Plain text reader."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graftlm.pipelines.summarize.document import TextBlock, TextSpan

_MAX_HEADING_WORDS = 12
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_UNDERLINE = re.compile(r"^\s*([=\-~^\"'`#*+_.])\1{2,}\s*$")
_UNDERLINE_LEVELS = {"=": 1, "#": 1, "*": 1, "-": 2}
_LIST_ITEM = re.compile(r"^\s*(?:[-*+•‣–]|\(?\d{1,3}[.)]|\(?[a-z]\))[ \t]+(?=\S)")
_NUMBERED_HEADING = re.compile(r"^\s*((?:\d{1,2}|[A-H])(?:\.\d{1,2}){0,3})\.?[ \t]+[^\W\d_a-z]")
_KNOWN_HEADING = re.compile(
    r"^\s*(?:(?:\d{1,2}|[IVX]+)\.?\s+)?(abstract|summary|introduction|motivation|background|overview|related work|"
    r"methods?|materials and methods|results?|discussion|conclusions?|acknowledge?ments?|references|bibliography|"
    r"appendix(?: \w)?)\s*[.:]?\s*$",
    re.IGNORECASE,
)
_GAP = re.compile(r"\S(?:[ \t]{3,}|\t)\S")
_SENTENCE_ENDS = ".!?;,。！？"


def plain_blocks(text: str, notes: list[str]) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings of plain text. A paragraph that does not look like prose is a table.

    Args:
        text: the document.
        notes: not used; the readers of all formats have the same arguments.
    """
    matches = (match for match in _LINE.finditer(text) if match.group())
    lines = [TextSpan(match.group(), match.start(), match.end()) for match in matches]
    paragraph: list[TextSpan] = []
    for index, line in enumerate(lines):
        following = lines[index + 1].text if index + 1 < len(lines) else ""
        is_empty = not line.text.strip()
        is_isolated = not paragraph and not following.strip()
        level = heading_level(line.text, following, isolated=is_isolated)
        marker = list_item(line.text)
        if paragraph and (level or marker or is_empty):
            yield _paragraph(paragraph)
            paragraph = []
        if level:
            yield TextBlock((line,), level)
        elif not is_empty and not _UNDERLINE.match(line.text):
            span = TextSpan(line.text[marker:], line.start + marker, line.end)
            paragraph.append(span)
    if paragraph:
        yield _paragraph(paragraph)


def _paragraph(spans: list[TextSpan]) -> TextBlock:
    block = TextBlock(tuple(spans))
    if looks_like_prose(block.text):
        return block
    return TextBlock(block.spans, kind="table")


def list_item(line: str) -> int:
    """Return the position of the text of a list item, after its marker; 0 for any other line."""
    match = _LIST_ITEM.match(line)
    return match.end() if match else 0


def looks_like_prose(text: str) -> bool:
    """Return whether most characters are letters, and most lines have no gap as between columns."""
    dense = "".join(text.split())
    letters = sum(character.isalpha() for character in dense)
    gaps = len(_GAP.findall(text))
    lines = text.strip().splitlines()
    return 2 * letters > len(dense) and gaps < max(2, len(lines))


def heading_level(line: str, following: str, *, isolated: bool) -> int:
    """Return the level of a heading, from 1, or 0 for any other line.

    Args:
        line: the line, with or without its line break.
        following: the next line, which may underline the heading; empty at the end.
        isolated: whether the line is a paragraph of only one line.
    """
    words = line.split()
    if not words or len(words) > _MAX_HEADING_WORDS or _UNDERLINE.match(line):
        return 0
    stripped = line.strip()
    underline = _UNDERLINE.match(following)
    if underline and len(following.strip()) >= min(len(stripped), 4):
        return _UNDERLINE_LEVELS.get(underline[1], 3)
    if not isolated:
        return 0
    if _KNOWN_HEADING.match(line):
        return 1
    if stripped[-1] in _SENTENCE_ENDS:
        return 0
    numbered = _NUMBERED_HEADING.match(line)
    if numbered:
        return 1 + numbered[1].count(".")
    return 1 if line.isupper() and len(stripped) > 3 else 0

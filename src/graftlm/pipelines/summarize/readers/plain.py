"""Plain text, and the text of a PDF's page: paragraphs between blank lines, items of lists, headings by their looks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graftlm.pipelines.summarize.document import TextBlock, TextSpan

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_RULE = re.compile(r"^\s*([=\-~^\"'`#*+_.])\1{2,}\s*$")
_LEVELS = {"=": 1, "#": 1, "*": 1, "-": 2}
_ITEM = re.compile(r"^\s*(?:[-*+•‣–]|\(?\d{1,3}[.)]|\(?[a-z]\))[ \t]+(?=\S)")
_NUMBERED = re.compile(r"^\s*((?:\d{1,2}|[A-H])(?:\.\d{1,2}){0,3})\.?[ \t]+[^\W\d_a-z]")
_KNOWN = re.compile(
    r"^\s*(?:(?:\d{1,2}|[IVX]+)\.?\s+)?(abstract|summary|introduction|motivation|background|overview|related work|"
    r"methods?|materials and methods|results?|discussion|conclusions?|acknowledge?ments?|references|bibliography|"
    r"appendix(?: \w)?)\s*[.:]?\s*$",
    re.IGNORECASE,
)
_MOST_WORDS = 12  # of a heading
_STOPS = ".!?;,。！？"


def plain_blocks(text: str, page: int | None = None) -> Iterator[TextBlock]:
    """Paragraphs, items and headings of a text; the text of a page has few blank lines, so headings need none there."""
    paragraph: list[TextSpan] = []
    lines = [TextSpan(match.group(), match.start(), match.end()) for match in _LINE.finditer(text) if match.group()]
    for index, line in enumerate(lines):
        below = lines[index + 1].text if index + 1 < len(lines) else ""
        level = _level(line.text, below, alone=page is not None or not (paragraph or below.strip()))
        item = _ITEM.match(line.text)
        if paragraph and (level or item or not line.text.strip()):
            yield TextBlock(tuple(paragraph), 0, page)
            paragraph = []
        if level:
            yield TextBlock((line,), level, page)
        elif not _RULE.match(line.text) and line.text.strip():
            paragraph.append(_behind(line, item.end()) if item else line)
    if paragraph:
        yield TextBlock(tuple(paragraph), 0, page)


def _behind(line: TextSpan, length: int) -> TextSpan:
    return TextSpan(line.text[length:], line.start + length, line.end)


def _level(line: str, below: str, *, alone: bool) -> int:
    """Of a heading; 0 where the line is none."""
    words = line.split()
    if not words or len(words) > _MOST_WORDS or _RULE.match(line):
        return 0
    rule = _RULE.match(below)
    if rule and len(below.strip()) >= min(len(line.strip()), 4):
        return _LEVELS.get(rule[1], 3)
    if not alone:
        return 0
    if _KNOWN.match(line):
        return 1
    numbered = _NUMBERED.match(line)
    if numbered and line.strip()[-1] not in _STOPS:
        return 1 + numbered[1].count(".")
    return 1 if line.isupper() and line.strip()[-1] not in _STOPS and len(line.strip()) > 3 else 0

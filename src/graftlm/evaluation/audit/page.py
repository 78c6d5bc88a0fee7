"""The page of an audit: self-contained HTML, with tokens coloured by their divergence and both models' choices."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from string import Template

from graftlm.evaluation.audit.chats import ChatAnswer, ChatQuestion
from graftlm.evaluation.audit.comparison import Passage, PassageToken
from graftlm.evaluation.results import Aim, Results
from graftlm.evaluation.tables import format_metric, metric_names, metric_title

_MET = {True: "within", False: "over"}
_SHOWN_ANSWERS = 12
_MOST_HEAT = 55  # per cent of the colour, on which text stays readable


Conversation = tuple[ChatQuestion, ChatAnswer, ChatAnswer]
"""A question, and the answers of base and tuned."""


def render_page(
    results: Results, passages: Sequence[Passage], conversations: Sequence[Conversation], notes: Sequence[str]
) -> str:
    """The page of an audit as HTML that needs no other file; see `Audit` for the arguments."""
    template = Template(files("graftlm.evaluation.audit").joinpath("page.html").read_text(encoding="utf-8"))
    base, tuned = results.row("base"), results.row("tuned")
    tokens = [token for passage in passages for token in passage.tokens]
    return template.substitute(
        title=html.escape(f"Audit of {tuned.label.removeprefix('tuned: ')}"),
        base=html.escape(base.label),
        tuned=html.escape(tuned.label),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        rows="".join(_rows(results)),
        budget=_budget(results.aims),
        passages="".join(_passages(passages)),
        answers="".join(_answers(conversations)),
        choices=json.dumps([[token.kl, token.base, token.tuned] for token in tokens]).replace("<", "\\u003c"),
    )


def _rows(results: Results) -> Iterator[str]:
    rows = [results.row(name).metrics for name in ("base", "tuned")]
    names = metric_names(results)
    for name in names:
        cells = "".join(f"<td>{html.escape(format_metric(name, metrics.get(name)))}</td>" for metrics in rows)
        yield f'<tr><th scope="row">{html.escape(metric_title(name, names))}</th>{cells}</tr>'


def _budget(aims: Sequence[Aim]) -> str:
    lines = [
        f"<li>{_MET[bool(aim.met)]} the {html.escape(aim.text)}: {aim.measured:.4g}, at most {aim.aim:g}</li>"
        for aim in aims
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _passages(passages: Sequence[Passage]) -> Iterator[str]:
    if not passages:
        yield "<p>No token's prediction differs.</p>"
        return
    largest = max(token.kl for passage in passages for token in passage.tokens)
    yield (
        f'<p class="soft">The stronger the colour, the larger the divergence, up to {largest:.2g} nats. '
        "Point at a token, or go through them with the tab and arrow keys, to see what both models find likeliest.</p>"
    )
    number = 0
    for passage in passages:
        spans = []
        for token in passage.tokens:
            spans.append(_span(token, number, largest))
            number += 1
        before = f'<span class="soft">{html.escape(passage.before)}</span>'
        yield (
            f'<article><p class="soft">{html.escape(passage.source)}, {passage.kl:.3f} nats per token</p>'
            f'<p class="text tokens">{before}{"".join(spans)}</p></article>'
        )


def _span(token: PassageToken, number: int, largest: float) -> str:
    heat = round(_MOST_HEAT * token.kl / largest) if largest > 0 else 0
    return f'<span class="token" data-i="{number}" style="--s:{heat}%">{html.escape(token.text)}</span>'


def _answers(conversations: Sequence[Conversation]) -> Iterator[str]:
    differing = [conversation for conversation in conversations if conversation[1].text != conversation[2].text]
    if not conversations:
        yield "<p>No question was asked.</p>"
        return
    yield f'<p class="soft">{len(differing)} of {len(conversations)} greedy answers differ.</p>'
    for question, base, tuned in differing[:_SHOWN_ANSWERS]:
        yield (
            f'<article><h3>{html.escape(question.text)}</h3><div class="pair">'
            f"{_answer('base', base)}{_answer('tuned', tuned)}</div></article>"
        )


def _answer(name: str, answer: ChatAnswer) -> str:
    faults = [] if answer.stops else ["does not end"]
    faults += [] if answer.keeps_template else ["breaks the template"]
    faults += ["another language"] if answer.same_language is False else []
    head = ", ".join([name, *faults])
    return f'<div><h4>{head}</h4><p class="text">{html.escape(answer.text)}</p></div>'

"""The page of an audit: self-contained HTML, with tokens coloured by their divergence and both models' choices."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from graftlm.evaluation.audit.comparison import Passage, PassageToken
from graftlm.evaluation.tables import format_metric, metric_title

if TYPE_CHECKING:
    from graftlm.evaluation.audit.chats import Answer
    from graftlm.evaluation.audit.run import Audit

_MET = {True: "within", False: "over"}
_SHOWN_ANSWERS = 12
_FULL_HEAT = 2.0  # nats at which a token has the strongest colour
_MOST_HEAT = 55  # per cent of the colour, on which text stays readable


def render_page(audit: Audit) -> str:
    """The page of an audit as HTML that needs no other file."""
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    base, tuned = audit.results.row("base"), audit.results.row("tuned")
    tokens = [token for passage in audit.passages for token in passage.tokens]
    return template.substitute(
        title=html.escape(f"Audit of {tuned.label.removeprefix('tuned: ')}"),
        base=html.escape(base.label),
        tuned=html.escape(tuned.label),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in audit.notes),
        rows="".join(_rows(audit)),
        budget=_budget(audit),
        passages="".join(_passages(audit.passages)),
        answers="".join(_answers(audit)),
        choices=json.dumps([[token.kl, token.base, token.tuned] for token in tokens]).replace("<", "\\u003c"),
    )


def _rows(audit: Audit) -> Iterator[str]:
    rows = [audit.results.row(name).metrics for name in ("base", "tuned")]
    names = dict.fromkeys(name for metrics in rows for name in metrics)
    for name in names:
        cells = "".join(f"<td>{html.escape(format_metric(name, metrics.get(name)))}</td>" for metrics in rows)
        yield f'<tr><th scope="row">{html.escape(metric_title(name, names))}</th>{cells}</tr>'


def _budget(audit: Audit) -> str:
    lines = [
        f"<li>{_MET[bool(aim.met)]} the {html.escape(aim.text)}: {aim.measured:.4g}, at most {aim.aim:g}</li>"
        for aim in audit.results.aims
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _passages(passages: list[Passage]) -> Iterator[str]:
    if not passages:
        yield "<p>No token's prediction differs.</p>"
        return
    yield (
        '<p class="soft">The stronger the colour, the larger the divergence. Point at a token, or go through them with '
        "the tab and arrow keys, to see what both models find likeliest.</p>"
    )
    number = 0
    for passage in passages:
        spans = []
        for token in passage.tokens:
            spans.append(_span(token, number))
            number += 1
        before = f'<span class="soft">{html.escape(passage.before)}</span>'
        yield (
            f'<article><p class="soft">{html.escape(passage.source)}, {passage.kl:.3f} nats per token</p>'
            f'<p class="text tokens">{before}{"".join(spans)}</p></article>'
        )


def _span(token: PassageToken, number: int) -> str:
    heat = round(_MOST_HEAT * min(1.0, token.kl / _FULL_HEAT))
    return f'<span class="token" data-i="{number}" style="--s:{heat}%">{html.escape(token.text)}</span>'


def _answers(audit: Audit) -> Iterator[str]:
    differing = [conversation for conversation in audit.conversations if conversation[1].text != conversation[2].text]
    if not audit.conversations:
        yield "<p>No question was asked.</p>"
        return
    yield f'<p class="soft">{len(differing)} of {len(audit.conversations)} greedy answers differ.</p>'
    for question, base, tuned in differing[:_SHOWN_ANSWERS]:
        yield (
            f'<article><h3>{html.escape(question.text)}</h3><div class="pair">'
            f"{_answer('base', base)}{_answer('tuned', tuned)}</div></article>"
        )


def _answer(name: str, answer: Answer) -> str:
    faults = [] if answer.stops else ["does not end"]
    faults += [] if answer.keeps_template else ["breaks the template"]
    faults += ["another language"] if answer.same_language is False else []
    head = ", ".join([name, *faults])
    return f'<div><h4>{head}</h4><p class="text">{html.escape(answer.text)}</p></div>'

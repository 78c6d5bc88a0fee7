"""The page of an audit: self-contained HTML, with tokens coloured by their divergence and both models' choices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftlm.evaluation.audit.chats import ChatAnswer, ChatQuestion
from graftlm.evaluation.audit.comparison import Passage
from graftlm.evaluation.results import Results
from graftlm.evaluation.tables import format_metric, metric_names, metric_title
from graftlm.io import fill_page

Conversation = tuple[ChatQuestion, ChatAnswer, ChatAnswer]
"""A question, and the answers of base and tuned."""


def render_page(
    results: Results, passages: Sequence[Passage], conversations: Sequence[Conversation], notes: Sequence[str]
) -> str:
    """The page of an audit as HTML that needs no other file; see `Audit` for the arguments."""
    base, tuned = results.row("base"), results.row("tuned")
    names = metric_names(results)
    cells = {name: [format_metric(name, row.metrics.get(name)) for row in (base, tuned)] for name in names}
    tokens = [token for passage in passages for token in passage.tokens]
    return fill_page(
        Path(__file__).with_suffix(".html"),
        title=f"Audit of {tuned.label.removeprefix('tuned: ')}",
        base=base.label,
        tuned=tuned.label,
        notes=notes,
        rows=[(metric_title(name, names), cells[name]) for name in names],
        aims=results.aims,
        passages=passages,
        largest=max((token.kl for token in tokens), default=0.0),
        conversations=conversations,
        differing=[conversation for conversation in conversations if conversation[1].text != conversation[2].text],
        choices=[[token.kl, token.base, token.tuned] for token in tokens],
    )

"""Render a generation's trace, such as the expert of each token, in the terminal or as an HTML page."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.text import Text

from graftlm.evaluation.plots import PALETTE
from graftlm.files.templates import fill_page
from graftlm.generation.generate import Generation, TracedToken

_GREY = "#8A8A8A"  # the color of the label `none`


def print_trace(generation: Generation, console: Console | None = None) -> None:
    """Print the text, with each token in the color of the label with its largest value, and a legend.

    Args:
        generation: a generation with a trace; without one, only the prompt is printed.
        console: receives the text; None prints to stdout.
    """
    console = console or Console()
    tokens = generation.trace or []
    means = _means(tokens)
    colors = _colors(tokens)
    text = Text(generation.prompt)
    for token in tokens:
        text.append(token.text, style=colors[_largest(token)])
    console.print(text)
    console.print()
    largest = [_largest(token) for token in tokens]
    for label, mean in means.items():
        description = f"{label}  {mean:.0%} on average"
        if len(means) > 1:
            description += f", the largest of {largest.count(label)} of {generation.tokens} tokens"
        line = Text("■ ", style=colors[label])
        line.append(description, style="default")
        console.print(line)


def trace_page(generation: Generation) -> str:
    """Return a self-contained HTML page that shows each token in the color of the label with its largest value.

    All values of a token appear on hover and on focus.

    Args:
        generation: a generation with a trace. Without one, the page has only the prompt.
    """
    tokens = generation.trace or []
    rows = []
    for token in tokens:
        values = ", ".join(f"{name} {value:.2f}" for name, value in token.values.items())
        rows.append((token, _largest(token), values))
    return fill_page(
        Path(__file__).with_name("trace.html"),
        prompt=generation.prompt,
        tokens=rows,
        means=_means(tokens),
        colors=_colors(tokens),
        data=[token.values for token in tokens],
    )


def _labels(tokens: list[TracedToken]) -> list[str]:
    return list(tokens[0].values) if tokens else []


def _means(tokens: list[TracedToken]) -> dict[str, float]:
    """Return the mean over the tokens by label."""
    means = {}
    for label in _labels(tokens):
        total = sum(token.values[label] for token in tokens)
        means[label] = total / len(tokens)
    return means


def _colors(tokens: list[TracedToken]) -> dict[str, str]:
    """Return a color by label; grey for `none`."""
    labels = [label for label in _labels(tokens) if label != "none"]
    colors = dict(zip(labels, cycle(PALETTE), strict=False))
    colors["none"] = _GREY
    return colors


def _largest(token: TracedToken) -> str:
    """Return the label with the largest value."""
    return max(token.values, key=token.values.__getitem__)

"""Render a generation's trace, such as the expert of each token, in the terminal or as an HTML page."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.text import Text

from graftlm.evaluation.plots import PALETTE
from graftlm.files.templates import fill_page
from graftlm.generation.generate import Generation, TracedToken

_GREY = "#8A8A8A"  # of the label `none`


def _means_and_colours(generation: Generation) -> tuple[dict[str, float], dict[str, str]]:
    """Each label's mean over the tokens, and its colour; grey for `none`."""
    tokens = generation.trace or []
    labels = list(tokens[0].values) if tokens else []
    means = {label: sum(token.values[label] for token in tokens) / len(tokens) for label in labels}
    return means, dict(zip([label for label in labels if label != "none"], cycle(PALETTE))) | {"none": _GREY}


def print_trace(generation: Generation, console: Console | None = None) -> None:
    """Print the text, each token in the colour of its largest value, and a legend."""
    console = console or Console()
    means, colours = _means_and_colours(generation)
    text = Text(generation.prompt)
    for token in generation.trace or []:
        text.append(token.text, style=colours[_largest(token)])
    console.print(text)
    console.print()
    for label, mean in means.items():
        count = sum(_largest(token) == label for token in generation.trace or [])
        line = Text("■ ", style=colours[label])
        tokens = f", the largest of {count} of {generation.tokens} tokens" if len(means) > 1 else ""
        line.append(f"{label}  {mean:.0%} on average{tokens}", style="default")
        console.print(line)


def trace_page(generation: Generation) -> str:
    """A self-contained HTML page: tokens in the colour of their largest value, all values on hover."""
    means, colours = _means_and_colours(generation)
    tokens = [
        (token, _largest(token), ", ".join(f"{name} {value:.2f}" for name, value in token.values.items()))
        for token in generation.trace or []
    ]
    values = {"means": means, "colours": colours, "tokens": tokens, "prompt": generation.prompt}
    return fill_page(Path(__file__).with_name("trace.html"), data=[token.values for token, _, _ in tokens], **values)


def _largest(token: TracedToken) -> str:
    return max(token.values, key=lambda label: token.values[label])

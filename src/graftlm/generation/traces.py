"""Render a generation's trace, such as the expert of each token, in the terminal or as an HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import cycle
from string import Template

from rich.console import Console
from rich.text import Text

from graftlm.evaluation.plots import PALETTE
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
    legend = "".join(
        f'<li><span class="dot" style="background:{colours[label]}"></span>{html.escape(label)} {share:.0%}</li>'
        for label, share in means.items()
    )
    template = Template(files("graftlm.generation").joinpath("trace.html").read_text(encoding="utf-8"))
    return template.substitute(
        prompt=html.escape(generation.prompt),
        tokens="".join(_spans(generation, colours)),
        legend=legend,
        data=json.dumps([token.values for token in generation.trace or []]).replace("<", "\\u003c"),
        title=html.escape(generation.prompt[:60]),
    )


def _spans(generation: Generation, colours: dict[str, str]) -> Iterator[str]:
    for token in generation.trace or []:
        label = _largest(token)
        values = ", ".join(f"{name} {value:.2f}" for name, value in token.values.items())
        strength = round(15 + 55 * token.values[label])
        yield (
            f'<span class="token" tabindex="0" style="--c:{colours[label]};--s:{strength}%" '
            f'title="{html.escape(values)}" aria-label="{html.escape(token.text)}: {html.escape(values)}">'
            f"{html.escape(token.text)}</span>"
        )


def _largest(token: TracedToken) -> str:
    return max(token.values, key=lambda label: token.values[label])

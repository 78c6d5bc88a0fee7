"""Made-up proposals with an abstract, as rows of the collections of experiments/summarize."""

from __future__ import annotations

THINGS = ("kettle", "ladder", "window", "garden", "basket", "candle", "bridge", "hammer")


def proposal(corpus: str, number: int) -> dict[str, object]:
    thing = THINGS[number % len(THINGS)]
    head = f"---\ntitle: {thing}\ncreated: 20{10 + number:02d}-03-01\n---\n\n"
    abstract = f"The {thing} of {corpus} gets a new handle. It costs {number + 3} coins."
    start = len(f"{head}## Abstract\n\n")
    body = f"Every {thing} has a handle that breaks. The old handle costs {number + 9} coins. People complain. " * 3
    rest = f"The new handle of {corpus} is made of oak. It costs {number + 3} coins in Paris. Nobody quick. " * 4
    text = f"{head}## Abstract\n\n{abstract}\n\n## Motivation\n\n{body}\n\n## Details\n\n{rest}\n"
    return {
        "id": f"{corpus}/{number:04d}.md",
        "title": f"{corpus} {number}",
        "abstract": abstract,
        "abstract_span": [start, start + len(abstract)],
        "text": text,
    }

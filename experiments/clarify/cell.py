"""One method of one model on one set of examples, an example at a time, each kept at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from experiments.clarify import metrics
from experiments.clarify.data import read_sets, some
from experiments.jobs import Job
from graftlm.evaluation import Metric
from graftlm.evaluation.results import value_of
from graftlm.pipelines.clarify import Chain, Conversation, Cost, Endpoint, EndpointConfig, Simulated, baseline
from graftlm.pipelines.clarify.examples import Example
from graftlm.pipelines.clarify.roles import Writer

RETRIES = 5  # a run of many calls should outlast a short failure
Method = Literal["intercpt", "with_context", "no_extra"]


class Cell(Job):
    """What is done.

    Args:
        url: of the server; not part of what is measured, so a run goes on with another one.
        model: that translates.
        user: that answers; the same where it is None.
        template_sha256: of what the template says.
        examples_sha256: of the examples.
        data: where they are read from; not part of what is measured either.
        limit: examples, at most.
    """

    url: str
    model: str
    user: str | None = None
    method: Method
    template: str
    template_sha256: str
    kind: str
    language: str
    data: str
    examples_sha256: str
    limit: int
    budget: int = 1

    def key(self) -> str:
        """SHA-256 over what is measured."""
        return self.model_copy(update={"url": "", "data": ""}).whole_key()

    def whole_key(self) -> str:
        """As of any job."""
        return super().key()

    @property
    def examples(self) -> list[Example]:
        """Those that are asked about."""
        return some(read_sets(Path(self.data))[self.kind, self.language], self.limit)


def measure(cell: Cell, folder: Path) -> Mapping[str, Any]:
    """All outputs with their conversations, and the metrics of them; goes on with what `folder` keeps.

    Raises:
        EndpointError: the server can't be used; what was done until then is kept.
    """
    examples = cell.examples
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"talks-{cell.key()[:16]}.jsonl"
    talks = _kept(file)
    writers = {
        model: Endpoint(EndpointConfig(url=cell.url, model=model, retries=RETRIES))
        for model in {cell.model, cell.user or cell.model}
    }
    with file.open("a", encoding="utf-8") as lines:
        for one in examples:
            if one.id not in talks:
                talks[one.id] = found = talk(cell, one, writers[cell.model], writers[cell.user or cell.model])
                lines.write(json.dumps({"id": one.id} | found, ensure_ascii=False) + "\n")
                lines.flush()
    return {"talks": [talks[one.id] for one in examples]} | measured(
        cell, examples, [talks[one.id] for one in examples]
    )


def _kept(file: Path) -> dict[str, dict[str, Any]]:
    """What was done before, by example; a line that was cut off by a kill is done again."""
    found: dict[str, dict[str, Any]] = {}
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    for line in lines[:-1]:
        values = json.loads(line)
        found[values.pop("id")] = values
    if lines[-1]:
        file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return found


def talk(cell: Cell, one: Example, translator: Writer, user: Writer) -> dict[str, Any]:
    """One conversation, or one baseline's output, as plain JSON values."""
    context = " ".join(one.context)
    if cell.method != "intercpt":
        given = context if cell.method == "with_context" else None
        written = baseline(translator, one.source, cell.template, cell.language, context=given, any_language=True)
        return _plain(written.output, written.cost)
    begun = Conversation.start(one.source, cell.template, cell.language, budget=cell.budget, any_language=True)
    found = Chain(translator, Simulated(user, context)).run(begun)
    assert found.written is not None, "a chain with a user comes to its end"
    question = next(iter(found.questions), None)
    told = found.told[0][1] if found.told else None
    return _plain(found.written.output, found.cost, question.text if question else None, told)


def _plain(output: str, cost: Cost, question: str | None = None, answer: str | None = None) -> dict[str, Any]:
    return {"output": output, "question": question, "answer": answer, "cost": cost.model_dump()}


def measured(cell: Cell, examples: list[Example], talks: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics and mistakes of outputs, and what they cost."""
    outputs = [one["output"] for one in talks]
    found: dict[str, Metric] = dict(metrics.text_metrics(outputs, examples, cell.language))
    wrong: dict[str, int] = {}
    if cell.kind == "polysemy":
        found = dict(metrics.polysemy_metrics(outputs, examples))
    elif (labels := metrics.labels_of(outputs, cell.kind, cell.language)) is not None:
        found |= metrics.label_metrics(labels, examples)
        wrong = metrics.mistakes(labels, examples, talks, cell.kind) if cell.method == "intercpt" else {}
    cost = sum((Cost.parse(one["cost"]) for one in talks), Cost())
    asked = sum(one["question"] is not None for one in talks)
    return {
        "metrics": {
            name: value if isinstance(value, int | float) else value.model_dump() for name, value in found.items()
        },
        "mistakes": wrong,
        "cost": cost.model_dump() | {"questions": asked, "examples": len(examples)},
        "accuracy": value_of(found["accuracy"]) if "accuracy" in found else None,
    }

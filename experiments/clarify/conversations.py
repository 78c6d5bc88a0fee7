"""The ambiguous sentences of the data folder, and conversations about them, each saved when it ends."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.clarify import metrics
from experiments.clarify.builder import read_examples
from experiments.clarify.datasets import AmbiguousExample, mt_geneval_contexts, read_ambigmt, read_discevalmt
from experiments.clarify.scripted import NAME as SCRIPTED
from experiments.clarify.scripted import ScriptedTranslator
from graftlm.errors import DataError
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.pipelines.clarify import (
    Chain,
    ChatModel,
    Conversation,
    Cost,
    Endpoint,
    EndpointConfig,
    SimulatedUser,
    load_template,
)
from graftlm.pipelines.clarify.conversation import WrittenTurn
from graftlm.pipelines.clarify.prompts import build_prompt
from graftlm.runs.run import Run, RunContext

Key = tuple[str, str]  # kind and language, as ("it", "fr")
LANGUAGES = ("es", "fr", "de", "ja")
TABLES = {"4.2": ("formality", "it", "polysemy"), "4.3": ("name", "profession")}


def baseline(
    translator: ChatModel,
    text: str,
    template: str,
    target: str | None = None,
    *,
    context: str | None = None,
    any_language: bool = False,
) -> WrittenTurn:
    """The output without a conversation: with its context (LLMwCXT), or from the text alone (LLMnoExtra).

    Raises:
        DataError: the text is empty.
        RecipeError: the template does not write the language.
    """
    conversation = Conversation.start(text, template, target, budget=0, any_language=any_language)
    if context is None:
        written = Chain(translator).run(conversation).written
        assert written is not None, "without a budget nothing is asked"
        return written
    prompt = build_prompt(load_template(template), "context", conversation.target, text, context=context)
    reply = translator.generate(prompt)
    values = {"author": translator.name, "truncated": reply.truncated, "cost": reply.cost}
    return WrittenTurn(output=prompt.without_label(reply.text), mode="informed", **values)


def read_sets(data: Path) -> dict[Key, list[AmbiguousExample]]:
    """The sentences with a context and a reference, by kind and language.

    AmbigMT comes from the folder `ambigmt`, sets of the builder from `sets/*.jsonl`. From `ambig` come DiscEvalMT
    ("it", French) and MT-GenEval (professions). If AmbigMT has a kind and language, it is the only source of it.

    Raises:
        DataError: the folder has none of them.
    """
    sets = _by_key(_other_sets(data))
    if (data / "ambigmt").is_dir():
        sets |= _by_key(read_ambigmt(data / "ambigmt")[0])
    if not sets:
        raise DataError(
            f"{data} holds no ambiguous sentences with their contexts: put AmbigMT into its folder ambigmt, sets of "
            "the builder into sets, or DiscEvalMT and MT-GenEval into ambig."
        )
    kinds = [kind for kinds in TABLES.values() for kind in kinds]
    return dict(sorted(sets.items(), key=lambda item: (kinds.index(item[0][0]), LANGUAGES.index(item[0][1]))))


def _other_sets(data: Path) -> Iterable[AmbiguousExample]:
    for path in sorted((data / "sets").glob("*.jsonl")):
        yield from read_examples(path)
    if (data / "ambig" / "discevalmt").is_dir():
        yield from read_discevalmt(data / "ambig" / "discevalmt")
    for language in ("es", "fr", "de"):
        if list((data / "ambig" / "mt_geneval").glob(f"geneval-context-*2to1-test.en_{language}.en")):
            yield from mt_geneval_contexts(data / "ambig" / "mt_geneval", language)


def _by_key(examples: Iterable[AmbiguousExample]) -> dict[Key, list[AmbiguousExample]]:
    sets: defaultdict[Key, list[AmbiguousExample]] = defaultdict(list)
    for example in examples:
        if example.context and example.reference and example.language in LANGUAGES:
            sets[example.kind, example.language].append(example)
    return dict(sets)


def sample(examples: Sequence[AmbiguousExample], limit: int) -> list[AmbiguousExample]:
    """At most `limit` examples in their order, drawn with a fixed seed; duplicates of text and context count once."""
    unique = list({(ex.source, ex.context, ex.label): ex for ex in examples}.values())
    drawn = range(len(unique)) if len(unique) <= limit else random.Random(0).sample(range(len(unique)), limit)
    return [unique[index] for index in sorted(drawn)]


RETRIES = 5  # a run of many calls should survive a short failure
Method = Literal["intercpt", "with_context", "no_extra"]


class ConversationRun(Run):
    """One method and one model on one set.

    Args:
        url: the server, or "scripted"; not part of the key, so that a run can continue on another server.
        model: the translator.
        user: the model that answers; by default the translator.
        template_sha256: hash of the template's content.
        data: the folder of the examples; not part of the key either.
        examples_sha256: hash of the examples.
        limit: largest number of examples.
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

    def settings(self) -> dict[str, Any]:
        """What decides the result."""
        return {name: value for name, value in super().settings().items() if name not in ("url", "data")}

    def measure(self, context: RunContext) -> Measurement:
        """All conversations and their metrics; conversations that the folder already has are not repeated.

        Raises:
            EndpointError: the server fails; finished conversations are kept.
        """
        examples = sample(read_sets(Path(self.data))[self.kind, self.language], self.limit)
        context.folder.mkdir(parents=True, exist_ok=True)
        file = context.folder / f"conversations-{digest(self.settings())[:16]}.jsonl"
        finished = _read_finished(file)
        translator, user = (self._open(model, examples) for model in (self.model, self.user or self.model))
        with file.open("a", encoding="utf-8") as lines:
            for example in examples:
                if example.id not in finished:
                    finished[example.id] = self._converse(example, translator, user)
                    lines.write(json.dumps({"id": example.id} | finished[example.id], ensure_ascii=False) + "\n")
                    lines.flush()
        return self._measurement(examples, [finished[example.id] for example in examples])

    def _open(self, model: str, examples: Sequence[AmbiguousExample]) -> ChatModel:
        if self.url == SCRIPTED:
            return ScriptedTranslator(examples, model)
        return Endpoint(EndpointConfig(url=self.url, model=model, retries=RETRIES))

    def _converse(self, example: AmbiguousExample, translator: ChatModel, user: ChatModel) -> dict[str, Any]:
        """The output of one conversation, or of a baseline, with question, answer and cost as JSON values."""
        context, question, answer = " ".join(example.context), None, None
        text, template, language = example.source, self.template, self.language
        if self.method == "intercpt":
            start = Conversation.start(text, template, language, any_language=True)
            conversation = Chain(translator, SimulatedUser(user, context)).run(start)
            written, cost = conversation.written, conversation.cost
            assert written is not None, "a chain with a user always ends"
            question = conversation.questions[0].text if conversation.questions else None
            answer = conversation.exchanges[0][1] if conversation.exchanges else None
        else:
            given = context if self.method == "with_context" else None
            written = baseline(translator, text, template, language, context=given, any_language=True)
            cost = written.cost
        return {"output": written.output, "question": question, "answer": answer, "cost": cost.model_dump()}

    def _measurement(self, examples: Sequence[AmbiguousExample], conversations: list[dict[str, Any]]) -> Measurement:
        """Metrics, mistakes and cost of all outputs."""
        outputs = [conversation["output"] for conversation in conversations]
        mistakes: dict[str, int] = {}
        if self.kind == "polysemy":
            values = metrics.polysemy_metrics(outputs, examples)
        else:
            values = metrics.text_metrics(outputs, examples, self.language)
            if (labels := metrics.labels_of(outputs, examples, self.kind, self.language)) is not None:
                values |= metrics.label_metrics(labels, examples)
                if self.method == "intercpt":
                    mistakes = metrics.mistakes(labels, examples, conversations, self.kind)
        cost = sum((Cost.parse(conversation["cost"]) for conversation in conversations), Cost()).model_dump()
        cost |= {"questions": sum(c["question"] is not None for c in conversations), "examples": len(examples)}
        row = Row(id=self.id, label=self.id, metrics=values)
        return Measurement(row, {"conversations": conversations, "mistakes": mistakes, "cost": cost})


def _read_finished(file: Path) -> dict[str, dict[str, Any]]:
    """Finished conversations by example id. A line that a kill truncated is removed."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    if lines[-1]:
        file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    values = [json.loads(line) for line in lines[:-1]]
    return {conversation.pop("id"): conversation for conversation in values}

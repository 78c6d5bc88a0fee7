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
    """Write the output without a conversation: with its context (LLMwCXT), or from the text alone (LLMnoExtra).

    Args:
        translator: the model.
        text: the text.
        template: name or YAML file of the template.
        target: code of the output language; optional if the template has a single language.
        context: the context; None uses the text alone.
        any_language: skip the check that the text is in the template's source language.

    Raises:
        DataError: the text is empty.
        RecipeError: the template does not support the output language.
    """
    conversation = Conversation.start(text, template, target, budget=0, any_language=any_language)
    if context is None:
        written = Chain(translator).run(conversation).written
        assert written is not None, "without a budget nothing is asked"
        return written
    prompt = build_prompt(load_template(template), "context", conversation.target, text, context=context)
    reply = translator.generate(prompt)
    return WrittenTurn(
        output=prompt.without_label(reply.text),
        mode="informed",
        author=translator.name,
        truncated=reply.truncated,
        cost=reply.cost,
    )


def read_sets(data: Path) -> dict[Key, list[AmbiguousExample]]:
    """Read the sentences with a context and a reference, by kind and language.

    AmbigMT comes from the folder `ambigmt`, sets of the builder from `sets/*.jsonl`. From `ambig` come DiscEvalMT
    ("it", French) and MT-GenEval (professions). If AmbigMT has a kind and language, it is their only source.

    Args:
        data: folder of the data sets.

    Raises:
        DataError: the folder has none of them.
    """
    sets = _by_key(_other_sets(data))
    if (data / "ambigmt").is_dir():
        examples, _ = read_ambigmt(data / "ambigmt")
        sets.update(_by_key(examples))
    if not sets:
        raise DataError(
            f"{data} has no ambiguous sentences with contexts: put AmbigMT into its folder ambigmt, sets of the "
            "builder into sets, or DiscEvalMT and MT-GenEval into ambig."
        )
    ordered = {}
    for kind in [*TABLES["4.2"], *TABLES["4.3"]]:
        for language in LANGUAGES:
            if (kind, language) in sets:
                ordered[kind, language] = sets[kind, language]
    return ordered


def _other_sets(data: Path) -> Iterable[AmbiguousExample]:
    """Yield the examples of all sets except AmbigMT."""
    for path in sorted((data / "sets").glob("*.jsonl")):
        yield from read_examples(path)
    discevalmt = data / "ambig" / "discevalmt"
    if discevalmt.is_dir():
        yield from read_discevalmt(discevalmt)
    mt_geneval = data / "ambig" / "mt_geneval"
    for language in ("es", "fr", "de"):
        if list(mt_geneval.glob(f"geneval-context-*2to1-test.en_{language}.en")):
            yield from mt_geneval_contexts(mt_geneval, language)


def _by_key(examples: Iterable[AmbiguousExample]) -> dict[Key, list[AmbiguousExample]]:
    sets: defaultdict[Key, list[AmbiguousExample]] = defaultdict(list)
    for example in examples:
        if example.context and example.reference and example.language in LANGUAGES:
            sets[example.kind, example.language].append(example)
    return dict(sets)


def sample(examples: Sequence[AmbiguousExample], limit: int) -> list[AmbiguousExample]:
    """Draw examples with a fixed seed and return them in their order.

    Args:
        examples: the examples; of those with equal text, context and label, the last one is used.
        limit: maximum number of examples.
    """
    by_content = {(example.source, example.context, example.label): example for example in examples}
    unique = list(by_content.values())
    if len(unique) <= limit:
        return unique
    drawn = random.Random(0).sample(range(len(unique)), limit)
    return [unique[index] for index in sorted(drawn)]


RETRIES = 5  # a run of many calls should survive a short failure of the server
Method = Literal["intercpt", "with_context", "no_extra"]


class ConversationRun(Run):
    """A method and a model on a set.

    Args:
        url: URL of the server, or "scripted"; not part of the key, so that a run can continue on another server.
        model: the translator.
        user: the model that answers; the translator by default.
        method: the method: the chain, or a baseline.
        template: name of the template.
        template_sha256: hash of the template's content.
        kind: the kind of ambiguity.
        language: code of the output language.
        data: folder of the data sets; not part of the key either.
        examples_sha256: hash of the examples.
        limit: maximum number of examples.
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
        """Return the settings that determine the result."""
        settings = super().settings()
        return {name: value for name, value in settings.items() if name not in ("url", "data")}

    def measure(self, context: RunContext) -> Measurement:
        """Hold all conversations and measure them; conversations that the folder already has are not repeated.

        Raises:
            EndpointError: the server failed. Finished conversations are saved.
        """
        sets = read_sets(Path(self.data))
        examples = sample(sets[self.kind, self.language], self.limit)
        context.folder.mkdir(parents=True, exist_ok=True)
        file = context.folder / f"conversations-{digest(self.settings())[:16]}.jsonl"
        finished = _read_finished(file)
        translator = self._open(self.model, examples)
        user = self._open(self.user or self.model, examples)
        with file.open("a", encoding="utf-8") as lines:
            for example in examples:
                if example.id in finished:
                    continue
                conversation = self._converse(example, translator, user)
                finished[example.id] = conversation
                line = json.dumps({"id": example.id, **conversation}, ensure_ascii=False)
                lines.write(f"{line}\n")
                lines.flush()
        conversations = [finished[example.id] for example in examples]
        return self._measurement(examples, conversations)

    def _open(self, model: str, examples: Sequence[AmbiguousExample]) -> ChatModel:
        if self.url == SCRIPTED:
            return ScriptedTranslator(examples, model)
        return Endpoint(EndpointConfig(url=self.url, model=model, retries=RETRIES))

    def _converse(self, example: AmbiguousExample, translator: ChatModel, user: ChatModel) -> dict[str, Any]:
        """Return the output of the method, with question, answer and cost, as JSON values."""
        context = " ".join(example.context)
        if self.method == "intercpt":
            return self._ask_first(example, context, translator, user)
        written = baseline(
            translator,
            example.source,
            self.template,
            self.language,
            context=context if self.method == "with_context" else None,
            any_language=True,
        )
        return {
            "output": written.output,
            "question": None,
            "answer": None,
            "cost": written.cost.model_dump(),
        }

    def _ask_first(
        self, example: AmbiguousExample, context: str, translator: ChatModel, user: ChatModel
    ) -> dict[str, Any]:
        """Return the output of the chain, with question, answer and cost, as JSON values."""
        start = Conversation.start(example.source, self.template, self.language, any_language=True)
        conversation = Chain(translator, SimulatedUser(user, context)).run(start)
        assert conversation.written is not None, "a chain with a user always ends"
        question = None
        if conversation.questions:
            question = conversation.questions[0].text
        answer = None
        if conversation.exchanges:
            _, answer = conversation.exchanges[0]
        return {
            "output": conversation.written.output,
            "question": question,
            "answer": answer,
            "cost": conversation.cost.model_dump(),
        }

    def _measurement(self, examples: Sequence[AmbiguousExample], conversations: list[dict[str, Any]]) -> Measurement:
        """Return metrics, mistakes and cost of all outputs."""
        outputs = [conversation["output"] for conversation in conversations]
        mistakes: dict[str, int] = {}
        labels = None
        if self.kind == "polysemy":
            values = metrics.polysemy_metrics(outputs, examples)
        else:
            values = metrics.text_metrics(outputs, examples, self.language)
            labels = metrics.labels_of(outputs, examples, self.kind, self.language)
        if labels is not None:
            values |= metrics.label_metrics(labels, examples)
        if labels is not None and self.method == "intercpt":
            mistakes = metrics.mistakes(labels, examples, conversations, self.kind)
        return Measurement(
            row=Row(id=self.id, label=self.id, metrics=values),
            details={
                "conversations": conversations,
                "mistakes": mistakes,
                "cost": _total_cost(conversations),
            },
        )


def _total_cost(conversations: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the cost of all conversations, and the numbers of questions and of examples."""
    cost = Cost()
    questions = 0
    for conversation in conversations:
        cost = cost + Cost.parse(conversation["cost"])
        if conversation["question"] is not None:
            questions += 1
    return {**cost.model_dump(), "questions": questions, "examples": len(conversations)}


def _read_finished(file: Path) -> dict[str, dict[str, Any]]:
    """Read finished conversations by example id, and remove an incomplete last line."""
    if not file.exists():
        return {}
    *complete, rest = file.read_text(encoding="utf-8").split("\n")
    if rest:  # the process was killed while it wrote this line
        file.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
    finished = {}
    for line in complete:
        conversation = json.loads(line)
        finished[conversation.pop("id")] = conversation
    return finished

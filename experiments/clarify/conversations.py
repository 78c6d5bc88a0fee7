"""The ambiguous sentences of the data folder, and conversations about them, whose replies are kept in a journal."""

from __future__ import annotations

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
from graftlm.pipelines.clarify import (
    Chain,
    ChatModel,
    Conversation,
    Cost,
    Endpoint,
    EndpointConfig,
    Journal,
    SimulatedUser,
    in_order,
    load_template,
    open_model,
)
from graftlm.pipelines.clarify.conversation import WrittenTurn
from graftlm.pipelines.clarify.opening import LOCAL, USER_KEY
from graftlm.pipelines.clarify.prompts import build_prompt
from graftlm.runs.run import Run, RunContext

Key = tuple[str, str]  # kind and language, as ("it", "fr")
LANGUAGES = ("es", "fr", "de", "ja")
TABLES = {"4.2": ("formality", "it", "polysemy"), "4.3": ("name", "profession")}
MAX_NEW_TOKENS = 256


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
        url: URL of the server, "local" for folders of models on this machine, or "scripted"; not part of the key, so
            that a run can continue on another server.
        model: the translator.
        user: the model that answers; the translator by default.
        user_url: URL of the user's server; by default `url`. Not part of the key either.
        method: the method: the chain, or a baseline.
        template: name of the template.
        template_sha256: hash of the template's content.
        kind: the kind of ambiguity.
        language: code of the output language.
        data: folder of the data sets; not part of the key either.
        examples_sha256: hash of the examples.
        limit: maximum number of examples.
        max_new_tokens: maximum number of tokens of a reply; None for 256.
        concurrency: number of conversations at a time with a server; not part of the key.
        device: torch device of models on this machine; not part of the key.
    """

    url: str
    model: str
    user: str | None = None
    user_url: str | None = None
    method: Method
    template: str
    template_sha256: str
    kind: str
    language: str
    data: str
    examples_sha256: str
    limit: int
    max_new_tokens: int | None = None
    concurrency: int = 1
    device: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the result; those without a value are left out, as in earlier runs."""
        settings = super().settings()
        for name in ("url", "user_url", "data", "concurrency", "device"):
            settings.pop(name, None)
        if settings.get("max_new_tokens") is None:
            settings.pop("max_new_tokens", None)
        return settings

    def measure(self, context: RunContext) -> Measurement:
        """Hold all conversations and measure them; replies that the folder already has are not requested again.

        Raises:
            EndpointError: the server failed. All replies so far are kept.
        """
        sets = read_sets(Path(self.data))
        examples = sample(sets[self.kind, self.language], self.limit)
        if self.url == SCRIPTED:
            translator = ScriptedTranslator(examples, self.model)
            user = ScriptedTranslator(examples, self.user or self.model)
            return self._measurement(examples, self._hold(examples, translator, user))
        with Journal(context.folder / f"replies-{context.key[:16]}.jsonl") as journal:
            model = self._open(self.model, self.url, "OPENAI_API_KEY")
            user_model = model
            if self.user is not None:
                is_own_server = self.user_url is None or self.user_url == self.url
                key = "OPENAI_API_KEY" if is_own_server else USER_KEY
                user_model = self._open(self.user, self.user_url or self.url, key)
            limit = self._limit_of_tokens
            translator = journal.wrap(model, f"translator {self.model} {limit}")
            user = journal.wrap(user_model, f"user {self.user or self.model} {limit}")
            return self._measurement(examples, self._hold(examples, translator, user))

    @property
    def _limit_of_tokens(self) -> int:
        return self.max_new_tokens or MAX_NEW_TOKENS

    def _hold(
        self, examples: Sequence[AmbiguousExample], translator: ChatModel, user: ChatModel
    ) -> list[dict[str, Any]]:
        """Return the conversations about all examples, in their order."""
        is_local = self.url == LOCAL or self.user_url == LOCAL  # a model on this machine serves one thread

        def converse(example: AmbiguousExample) -> dict[str, Any]:
            return self._converse(example, translator, user)

        return list(in_order(converse, examples, 1 if is_local else self.concurrency))

    def _open(self, model: str, url: str, key_variable: str) -> ChatModel:
        if url == LOCAL:
            return open_model(backbone=model, device=self.device, max_new_tokens=self._limit_of_tokens)
        config = EndpointConfig(
            url=url,
            model=model,
            key_variable=key_variable,
            retries=RETRIES,
            max_new_tokens=self._limit_of_tokens,
        )
        return Endpoint(config)

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
            "user_cost": Cost().model_dump(),
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
            "user_cost": conversation.user_cost.model_dump(),
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
                "user_cost": _sum(conversations, "user_cost").model_dump(),
            },
        )


def _total_cost(conversations: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the cost of all conversations, and the numbers of questions and of examples."""
    questions = [conversation for conversation in conversations if conversation["question"] is not None]
    cost = _sum(conversations, "cost").model_dump()
    return {**cost, "questions": len(questions), "examples": len(conversations)}


def _sum(conversations: Sequence[dict[str, Any]], name: str) -> Cost:
    """Return the sum of a cost over all conversations."""
    return sum((Cost.parse(conversation[name]) for conversation in conversations), Cost())

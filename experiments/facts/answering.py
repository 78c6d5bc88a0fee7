"""Runs that answer questions greedily, after a graft was trained or with facts in the prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiments.facts.retrieval import Lexicon
from experiments.facts.shared_prefix import SharedPrefix
from graftlm.backbone import Backbone, end_ids, left_padded, padding_id
from graftlm.data.chats import chat_tokens, render_question
from graftlm.data.conversations import read_chat
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.strengths import weights_moved_back
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee
from graftlm.runs.shared import load_shared

_BATCH = 32


class Asked(NamedTuple):
    """A question as a run asks it.

    Attributes:
        id: id of the question.
        text: the question.
        tokens: maximum number of tokens of the answer.
    """

    id: str
    text: str
    tokens: int


class AnsweringRun(GraftRun):
    """A graft's run that answers questions after training; without a graft, the bare backbone answers.

    Args:
        questions: JSON Lines with `id`, `text` and `tokens` of each question.
        statements: text file with one fact per line that is put before each question. Only for the bare backbone.
        nearest: number of facts to put there, those that are most like the question; 0 puts all of them there.
        moved_back: strengths below 1 at which the graft also answers; `evaluation.strengths` must not be empty.
    """

    questions: str
    statements: str | None = None
    nearest: int = 0
    moved_back: tuple[float, ...] = ()

    def artefacts(self) -> tuple[str, ...]:
        return ()  # Only the answers of a run are needed.

    def measure(self, context: RunContext) -> Measurement:
        if self.graft is not None:
            return super().measure(context)
        backbone = load_shared(self.backbone)
        started = time.perf_counter()
        answers = self._bare_answers(backbone)
        metrics: dict[str, Metric] = {"answer_seconds": time.perf_counter() - started}
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics), {"answers": answers})

    def evaluate(self, trainee: Trainee[Any, Any]) -> Measurement:
        at_the_end = replace(trainee, evaluation=replace(trainee.evaluation, start={}))
        measurement = super().evaluate(at_the_end)
        asked = read_questions(self.questions)
        backbone = trainee.evaluation.evaluator.backbone
        started = time.perf_counter()
        measurement.details["answers"] = answer(trainee.model, backbone, asked)
        measurement.add_metrics({"answer_seconds": time.perf_counter() - started})
        weights = trainee.model.trainable_parameters()
        for strength in self.moved_back:
            with weights_moved_back(weights, trainee.evaluation.start, strength):
                measurement.details[f"answers_at_{strength:g}"] = answer(trainee.model, backbone, asked)
        return measurement

    def save(self, *args: Any) -> None:
        """Do not save the graft, which the table does not need."""

    def _bare_answers(self, backbone: Backbone) -> dict[str, str]:
        asked = read_questions(self.questions)
        if self.statements is None:
            return answer(backbone.model, backbone, asked)
        facts = Path(self.statements).read_text(encoding="utf-8").splitlines()
        if not self.nearest:
            return answer(backbone.model, backbone, asked, system="\n".join(facts))
        lexicon = Lexicon(facts)
        with_facts = []
        for question in asked:
            nearest = lexicon.nearest(question.text, self.nearest)
            text = "\n".join([*(facts[number] for number in nearest), "", question.text])
            with_facts.append(question._replace(text=text))
        return answer(backbone.model, backbone, with_facts)


def read_questions(path: str) -> list[Asked]:
    """Read questions from JSON Lines."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Asked(**json.loads(line)) for line in lines]


@torch.inference_mode()
def answer(
    model: Any,
    backbone: Backbone,
    questions: Sequence[Asked],
    system: str | None = None,
    begun: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Answer questions greedily, in batches of questions of similar length.

    Args:
        model: the backbone's model, or a grafted model on it.
        backbone: the backbone.
        questions: the questions.
        system: a system message for all of them. Its keys and values are computed once.
        begun: what the answers begin with, by the id of the question.

    Returns:
        The answers by the id of the question.
    """
    tokenizer = backbone.need_tokenizer()
    begun = begun or {}
    prompts = {}
    for question in questions:
        messages = [{"role": "user", "content": question.text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        rendered = render_question(messages, tokenizer) + begun.get(question.id, "")
        prompts[question.id] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    prefix = _common_prefix(list(prompts.values())) if system is not None else []
    shared = SharedPrefix(model, prefix) if prefix else None
    ends = end_ids(backbone.model, tokenizer)
    answers = {}
    ordered = sorted(questions, key=lambda question: (question.tokens, len(prompts[question.id])))
    for start in range(0, len(ordered), _BATCH):
        batch = ordered[start : start + _BATCH]
        longest = max(question.tokens for question in batch)
        asked = [prompts[question.id] for question in batch]
        if shared is None:
            rows = _generate(model, backbone, asked, longest)
        else:
            rows = shared.continued([prompt[len(prefix) :] for prompt in asked], longest, ends)
        for question, row in zip(batch, rows, strict=True):
            text = tokenizer.decode(row[: question.tokens], skip_special_tokens=True)
            answers[question.id] = (begun.get(question.id, "") + str(text)).strip()
    return {question.id: answers[question.id] for question in questions}


def _common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Return the tokens with which all prompts begin; at least one token of each remains after them."""
    shortest = min(prompts, key=len)
    for position, token in enumerate(shortest[:-1]):
        if any(prompt[position] != token for prompt in prompts):
            return shortest[:position]
    return shortest[:-1]


def _generate(model: Any, backbone: Backbone, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return the tokens of greedy answers to a batch of prompts, which are padded on the left, without their ends."""
    tokenizer = backbone.need_tokenizer()
    inputs = left_padded(prompts, padding_id(tokenizer), model.device)
    ends = sorted(end_ids(backbone.model, tokenizer))
    output = model.generate(
        **inputs,
        eos_token_id=ends or None,
        max_new_tokens=tokens,
        do_sample=False,
    )
    width = inputs["input_ids"].shape[1]
    return [_until_end(row[width:].tolist(), ends) for row in output]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens before the first end."""
    for position, token in enumerate(tokens):
        if token in ends:
            return tokens[:position]
    return tokens


def answer_tokens(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the tokens of each answer after the last token before it."""
    sequences = []
    for row in conversations:
        ids, predicted, _ = chat_tokens(tokenizer, read_chat(row["messages"], "a taught fact"))
        positions = np.flatnonzero(predicted)
        first = positions[0] - 1
        sequences.append(ids[first : positions[-1] + 1].tolist())
    return sequences


def answers_of(measurement: Measurement, strength: float = 1.0) -> Mapping[str, str]:
    """Return the answers of a run, at full strength or at one of its strengths."""
    key = "answers" if strength == 1 else f"answers_at_{strength:g}"
    return measurement.details[key]

"""The behaviour of a chat model: answers to multiple-choice questions, and answers that end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.study import write_lines
from graftlm.backbone import Backbone
from graftlm.data.own_text import OwnText
from graftlm.data.sources import Document
from graftlm.evaluation import Interval, score
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.strengths import weights_moved_back
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext, Trainee

_ANSWER_TOKENS = 128
_CHOICE = re.compile(r"Answer(\d): (.*?)(?= Answer\d: |$)", re.DOTALL)


def write_choices(data: Path, files: Mapping[str, str], folder: Path, limit: int) -> dict[str, str]:
    """Write the first questions of each file as JSON Lines.

    A line has `question`, `choices` and `right`, the index of the right choice.

    Args:
        data: the data folder.
        files: files of questions, by name.
        folder: folder to write to.
        limit: number of questions of each file.

    Returns:
        The written paths, by name.
    """
    written = {}
    for name, file in files.items():
        rows = json.loads((data / file).read_text(encoding="utf-8"))[:limit]
        path = folder / f"{name}.jsonl"
        write_lines(path, [_question(row) for row in rows])
        written[name] = str(path)
    return written


def _question(row: Mapping[str, str]) -> dict[str, Any]:
    question, choices, _ = row["instruction"].split("\n\n")
    texts = dict(_CHOICE.findall(choices))
    return {
        "question": question.removeprefix("Please choose the correct answer to the question: "),
        "choices": list(texts.values()),
        "right": list(texts).index(row["answer"].removeprefix("answer")),
    }


class BehaviourRun(GraftRun):
    """A graft's run that also counts right choices and answers that end.

    Args:
        choices: files of questions, by name.
        chats: number of the backbone's own conversations that the model answers again.
    """

    choices: dict[str, str] = {}
    chats: int = 16

    def artefacts(self) -> tuple[str, ...]:
        return ()  # Only the measurement of a run is needed.

    def measure(self, context: RunContext) -> Measurement:
        if self.graft is not None:
            return super().measure(context)
        evaluator = self.evaluator(context.dependencies)
        measurement = super().measure(context)
        measurement.add_metrics(self.behaviour(evaluator.backbone.model, evaluator))
        return measurement

    def needs(self) -> Sequence[Run]:
        return self._test_samples() if self.graft is None else super().needs()

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        measurement.add_metrics(self.behaviour(trainee.model, trainee.evaluation.evaluator))
        return measurement

    def save(self, *args: Any) -> None:
        """Do not save the graft, which the table does not need."""

    def behaviour(self, model: Any, evaluator: Any) -> dict[str, Any]:
        """Return the shares of right choices by file, and of greedy answers that end."""
        metrics: dict[str, Any] = {}
        for name, path in self.choices.items():
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            questions = [json.loads(line) for line in lines]
            metrics[name] = right_choices(model, evaluator, questions)
        conversations = [text for text in evaluator.own_text if text.is_chat]
        chats = conversations[: self.chats]
        if chats:
            metrics["stops"] = share_that_stops(model, evaluator.backbone, chats)
        return metrics


class MovedBackRun(BehaviourRun):
    """A run that measures its model with the weights moved back to the only strength in `evaluation.strengths`."""

    def evaluate(self, trainee: Trainee) -> Measurement:
        (strength,) = self.evaluation.strengths
        evaluation = trainee.evaluation
        at_the_start = replace(trainee, evaluation=replace(evaluation, start={}))
        with weights_moved_back(trainee.model.trainable_parameters(), evaluation.start, strength):
            return super().evaluate(at_the_start)


def right_choices(model: Any, evaluator: Any, questions: Sequence[Mapping[str, Any]]) -> Interval:
    """Return the share of questions whose right choice is the most probable one per byte, with Wilson's interval."""
    from scipy.stats import binomtest

    documents = []
    for question in questions:
        prompt = f"Question: {question['question']}\nAnswer:"
        documents.extend(Document(f" {choice}", prompt=prompt) for choice in question["choices"])
    settings = evaluator.evaluation
    scores = score(
        model,
        evaluator.tokenizer,
        documents,
        length=512,
        batch_size=4 * settings.batch_size,
        precision=settings.precision,
    )
    nats = np.bincount(scores.document, scores.nats)
    nats_per_byte = nats / np.bincount(scores.document, scores.bytes)
    ends = np.cumsum([len(question["choices"]) for question in questions])[:-1]
    right = 0
    for question, losses in zip(questions, np.split(nats_per_byte, ends), strict=True):
        if int(losses.argmin()) == question["right"]:
            right += 1
    interval = binomtest(right, len(questions)).proportion_ci(method="wilson")
    return Interval(mean=right / len(questions), low=interval.low, high=interval.high)


def share_that_stops(model: Any, backbone: Backbone, chats: Iterable[OwnText]) -> float:
    """Return the share of greedy answers to the backbone's own questions that end within 128 tokens."""
    tokenizer = backbone.need_tokenizer()
    prompts = []
    for chat in chats:
        end_of_question = chat.turns[1][0]
        prompts.append(torch.tensor(chat.ids[:end_of_question]))
    width = max(len(prompt) for prompt in prompts)
    end: Any = tokenizer.eos_token_id
    ids = torch.full((len(prompts), width), end)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        ids[row, start:] = prompt
        mask[row, start:] = 1
    output = model.generate(
        ids.to(backbone.device),
        attention_mask=mask.to(backbone.device),
        max_new_tokens=_ANSWER_TOKENS,
        do_sample=False,
    )
    ended = (output[:, width:] == tokenizer.eos_token_id).any(dim=1)
    return float(ended.float().mean())

"""How a chat model behaves: does it still answer questions of choice, and end its answers?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.study import write_lines
from graftlm.data.own_text import OwnText
from graftlm.data.sources import Document
from graftlm.evaluation import Interval, score
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.strengths import weights_moved_back
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee

_ANSWER_TOKENS = 128
_CHOICE = re.compile(r"Answer(\d): (.*?)(?= Answer\d: |$)", re.DOTALL)


def write_choices(data: Path, files: Mapping[str, str], folder: Path, limit: int) -> dict[str, str]:
    """Write the first questions of each file as one JSON line each; gives the paths by name.

    A line has `question`, `choices` and `right`, the index of the right one.
    """
    written = {}
    for name, file in files.items():
        rows = json.loads((data / file).read_text(encoding="utf-8"))[:limit]
        write_lines(folder / f"{name}.jsonl", map(_question, rows))
        written[name] = str(folder / f"{name}.jsonl")
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
    """A graft's run that also counts right choices and ended answers.

    Args:
        choices: files of questions by name.
        chats: the number of the backbone's own conversations that the model answers anew.
    """

    choices: dict[str, str] = {}
    chats: int = 16

    def artefacts(self) -> tuple[str, ...]:
        return ()  # a measurement is all that is needed of a run

    def measure(self, context: RunContext) -> Measurement:
        if self.graft is not None:
            return super().measure(context)
        evaluator = self.evaluator(context.dependencies)
        measurement = super().measure(context)
        measurement.add_metrics(self.behaviour(evaluator.backbone.model, evaluator))
        return measurement

    def needs(self) -> Any:
        return self._test_samples() if self.graft is None else super().needs()

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        measurement.add_metrics(self.behaviour(trainee.model, trainee.evaluator))
        return measurement

    def save(self, *args: Any) -> None:
        """Leave the graft out: the table needs none."""

    def behaviour(self, model: Any, evaluator: Any) -> dict[str, Any]:
        """Shares of right choices by file, and of greedy answers that end."""
        metrics: dict[str, Any] = {}
        for name, path in self.choices.items():
            questions = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            metrics[name] = right_choices(model, evaluator, questions)
        chats = [text for text in evaluator.own_text if text.is_chat][: self.chats]
        return metrics | ({"stops": share_that_stops(model, evaluator.backbone, chats)} if chats else {})


class MovedBackRun(BehaviourRun):
    """Measures its model with the weights moved back to the one strength under `evaluation.strengths`."""

    def evaluate(self, trainee: Trainee) -> Measurement:
        [strength] = self.evaluation.strengths
        with weights_moved_back(trainee.model.trainable_parameters(), trainee.start, strength):
            return super().evaluate(replace(trainee, start={}))


def right_choices(model: Any, evaluator: Any, questions: Iterable[Mapping[str, Any]]) -> Interval:
    """Share of questions whose right choice has the most probable text, per byte; Wilson's interval."""
    from scipy.stats import binomtest

    questions = list(questions)
    documents = [
        Document(f" {choice}", prompt=f"Question: {each['question']}\nAnswer:")
        for each in questions
        for choice in each["choices"]
    ]
    settings = evaluator.evaluation
    scores = score(
        model,
        evaluator.tokenizer,
        documents,
        length=512,
        batch_size=4 * settings.batch_size,
        precision=settings.precision,
    )
    loss = np.bincount(scores.document, scores.nats) / np.bincount(scores.document, scores.bytes)
    ends = np.cumsum([len(each["choices"]) for each in questions])[:-1]
    chosen = [int(losses.argmin()) for losses in np.split(loss, ends)]
    right = sum(choice == each["right"] for choice, each in zip(chosen, questions, strict=True))
    interval = binomtest(right, len(questions)).proportion_ci(method="wilson")
    return Interval(mean=right / len(questions), low=interval.low, high=interval.high)


def share_that_stops(model: Any, backbone: Any, chats: Iterable[OwnText]) -> float:
    """Share of greedy answers to the backbone's own questions that end within 128 tokens."""
    tokenizer = backbone.need_tokenizer()
    prompts = [torch.tensor(chat.ids[: chat.turns[1][0]]) for chat in chats]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    device = backbone.device
    output = model.generate(
        ids.to(device), attention_mask=mask.to(device), max_new_tokens=_ANSWER_TOKENS, do_sample=False
    )
    ended = (output[:, width:] == tokenizer.eos_token_id).any(dim=1)
    return float(ended.float().mean())

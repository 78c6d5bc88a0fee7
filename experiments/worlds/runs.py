"""The runs: experts that train on their worlds, and mixtures of them that answer questions."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from experiments.facts.answering import Asked, answer
from experiments.routing_smollm2.runs import merged
from experiments.token_routing.runs import build_routing
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data.chats import chat_tokens
from graftlm.data.conversations import read_chat
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext, Trainee
from graftlm.runs.shared import load_shared


class ExpertsRun(GraftRun):
    """Trains new experts of token routing. The artefacts are their folders, which PEFT reads.

    Args:
        experts: names of the experts.
    """

    experts: tuple[str, ...]

    def artefacts(self) -> tuple[str, ...]:
        return self.experts

    def save(self, trainee: Trainee[Any, Any], context: RunContext, *others: Any) -> None:
        """Write the folder of each expert."""
        graft: Any = trainee.model.grafts["graft"]
        for name in self.experts:
            graft.write_adapter(name, context.folder / name)


class AskedOf(NamedTuple):
    """A question with the world that it is about, or the first of two worlds; empty for other questions."""

    question: Asked
    world: str


class MixtureRun(Run):
    """Answers questions with a mixture of experts, whose run it depends on, or with the bare backbone.

    Args:
        backbone: the backbone.
        questions: JSON Lines with `id`, `text`, `tokens` and `world` of each question.
        experts: names of the experts; none for the bare backbone.
        examples: for each expert, a file of conversations, whose texts are its examples.
        routing: the config of the graft without its experts.
        merge: arguments of PEFT's `add_weighted_adapter` with a common `weight`; empty without a merge.
        own: whether the expert of each question's world answers it. Other questions are left out.
        scored: for each world, a file of conversations; the nats per token of their answers are measured.
    """

    backbone: BackboneConfig
    questions: str
    experts: tuple[str, ...] = ()
    examples: dict[str, str] = {}
    routing: dict[str, Any] = {}
    merge: dict[str, Any] = {}
    own: bool = False
    scored: dict[str, str] = {}

    def measure(self, context: RunContext) -> Measurement:
        started = time.perf_counter()
        backbone = load_shared(self.backbone)
        asked = read_asked(Path(self.questions))
        if not self.experts:
            answers = answer(backbone.model, backbone, [each.question for each in asked])
            nats: list[float] = []
        else:
            answers, nats = self._answer(backbone, asked, context)
        metrics: dict[str, Metric] = {"seconds": time.perf_counter() - started}
        if nats:
            metrics["new"] = float(np.mean(nats))
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics), {"answers": answers})

    def _answer(
        self, backbone: Backbone, asked: Sequence[AskedOf], context: RunContext
    ) -> tuple[dict[str, str], list[float]]:
        """Return the answers, and the nats of each token of the scored answers."""
        if not self.own:
            graft = self._graft(backbone, context, self.routing)
            return self._with(graft, backbone, [each.question for each in asked], list(self.scored.values()))
        answers: dict[str, str] = {}
        nats: list[float] = []
        for world in self.experts:
            graft = self._graft(backbone, context, {"fixed": {world: 1.0}})
            questions = [each.question for each in asked if each.world == world]
            scored = [self.scored[world]] if self.scored else []
            more_answers, more_nats = self._with(graft, backbone, questions, scored)
            answers |= more_answers
            nats += more_nats
        return answers, nats

    def _with(
        self,
        graft: Any,
        backbone: Backbone,
        questions: Sequence[Asked],
        scored: Sequence[str],
        begun: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, str], list[float]]:
        with GraftedModel(backbone, {"graft": graft}) as model, evaluation_mode(model):
            answers = answer(model, backbone, questions, begun=begun)
            nats: list[float] = []
            for file in scored:
                nats += answer_nats(model, backbone, read_conversations(Path(file)))
        return answers, nats

    def _graft(self, backbone: Backbone, context: RunContext, routing: Mapping[str, Any]) -> Any:
        (folder,) = context.dependencies.values()
        adapters = {name: folder / name for name in self.experts}
        if self.merge:
            changed = Backbone.wrap(copy.deepcopy(backbone.model), backbone.tokenizer, backbone.name)
            merge = dict(self.merge)
            weight = merge.pop("weight")
            merged_folder = merged(changed, adapters, merge, context.folder, weight)
            return build_routing(backbone, {"merged": merged_folder}, fixed={"merged": 1.0})
        graft = build_routing(backbone, adapters, **routing)
        texts = {}
        for name, file in self.examples.items():
            texts[name] = [_text_of(row) for row in read_conversations(Path(file))]
        graft.fit(texts)
        return graft


class BothRun(MixtureRun):
    """Answers questions for two worlds with both of their experts, of which it is told.

    The worlds of a question are joined by `+`, in the order of its facts.

    Args:
        weight: weight of each of the two experts in their sum; None for a switch, by which the expert of the first
            world writes the first sentence of the answer, and the other expert continues it. The weights of a route add
            up to at most 1, so PEFT adds the experts.
    """

    weight: float | None = None

    def _answer(
        self, backbone: Backbone, asked: Sequence[AskedOf], context: RunContext
    ) -> tuple[dict[str, str], list[float]]:
        answers: dict[str, str] = {}
        for worlds in sorted({each.world for each in asked}):
            questions = [each.question for each in asked if each.world == worlds]
            first, second = worlds.split("+")
            if self.weight is None:
                answers |= self._switched(backbone, questions, context, first, second)
                continue
            merge = {"combination_type": "cat", "weight": self.weight}
            of_two = self.model_copy(update={"experts": (first, second), "merge": merge})
            graft = of_two._graft(backbone, context, {})
            summed, _ = self._with(graft, backbone, questions, [])
            answers |= summed
        return answers, []

    def _switched(
        self, backbone: Backbone, questions: Sequence[Asked], context: RunContext, first: str, second: str
    ) -> dict[str, str]:
        """Return answers of which one expert writes the first sentence, and another one the rest."""
        begun, _ = self._with(self._graft(backbone, context, {"fixed": {first: 1.0}}), backbone, questions, [])
        sentences = {name: first_sentence(text) for name, text in begun.items()}
        graft = self._graft(backbone, context, {"fixed": {second: 1.0}})
        answers, _ = self._with(graft, backbone, questions, [], sentences)
        return answers


def first_sentence(text: str) -> str:
    """Return a text up to the first full stop before a blank, or all of it."""
    sentence, stop, _ = text.partition(". ")
    return sentence + stop.rstrip()


def read_asked(path: Path) -> list[AskedOf]:
    """Read questions from JSON Lines."""
    asked = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        world = row.pop("world")
        asked.append(AskedOf(Asked(**row), world))
    return asked


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Read conversations from JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _text_of(row: Mapping[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"])


@torch.inference_mode()
def answer_nats(model: Any, backbone: Backbone, conversations: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the nats of each token of the answers, one conversation at a time."""
    nats: list[float] = []
    for row in conversations:
        chat = read_chat(row["messages"], "a taught fact")
        ids, predicted, _ = chat_tokens(backbone.need_tokenizer(), chat)
        ids_T = torch.as_tensor(ids, dtype=torch.long, device=backbone.device)
        logits_TV = model(input_ids=ids_T[None]).logits[0].float()
        nats_T = functional.cross_entropy(logits_TV[:-1], ids_T[1:], reduction="none")
        is_answer_T = torch.as_tensor(predicted, dtype=torch.bool, device=backbone.device)[1:]
        nats += nats_T[is_answer_T].tolist()
    return nats

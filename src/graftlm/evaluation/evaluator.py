"""The evaluator of a backbone: measures grafted models next to the bare backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.config import Config
from graftlm.data import Document, SourceConfig, build_documents
from graftlm.data.own_text import OwnText
from graftlm.evaluation import Row, Scores, TaskConfig, TaskResult, measure_task, read_task, score
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metrics import decode_speed, learning_and_forgetting, own_windows, score_windows
from graftlm.evaluation.results import Interval
from graftlm.grafted.model import GraftedModel

OLD_SET, NEW_SET = "old", "new"
BACKBONE_ROW = "backbone"
_OBSERVED_TOKENS = 4096
_TEST_SEED = 2**31 - 1  # of the text that own_kl is measured on, beside the small ones that people choose


class EvaluationConfig(Config):
    """What is measured after training, on test texts and on tasks."""

    length: int | None = Field(None, ge=2, description="Tokens per window; the data's row length when absent.")
    batch_size: int = Field(16, ge=1)
    limit_tokens: int | None = Field(50_000, ge=1, description="Tokens scored per test set; all when null.")
    precision: Literal["fp32", "bf16"] = "fp32"
    decode_prompts: int = Field(2, ge=0, description="Prompts per domain for the decoding speed; 0 leaves it out.")
    decode_tokens: int = Field(32, ge=1, description="Tokens decoded per prompt.")
    tasks: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    own_tokens: int = Field(
        4096,
        ge=0,
        description="Tokens of text that the backbone samples, on which own_kl measures the divergence from it; 0 "
        "leaves it out.",
    )
    own_seed: int = Field(_TEST_SEED, ge=0, description="Seed of that text.")
    strengths: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [],
        description="Measure the model also with its weights moved back: shares of the way from their start to where "
        "training took them.",
    )
    forgetting_budget: float | None = Field(
        None, description="Nats per token of the old domain that the run may lose; more makes it fail."
    )


def load_tests(test: Mapping[str, Sequence[SourceConfig]]) -> dict[str, list[Document]]:
    """Test documents by name of their set."""
    return {name: list(build_documents(sources)) for name, sources in test.items()}


@dataclass(eq=False)
class BackboneEvaluator:
    """Measures models that are built on one backbone, beside the bare backbone.

    Args:
        tests: test documents by set. `old` and `new` give `forgotten` and `learned`; other sets stand beside them.
        evaluation: what is measured; the files of its tasks are read now.
        length: tokens per window.
        own_text: texts that the backbone sampled, for own_kl and chat_kl.
    """

    backbone: Backbone
    tests: Mapping[str, Sequence[Document]]
    evaluation: EvaluationConfig
    length: int
    own_text: Sequence[OwnText] = ()

    def __post_init__(self) -> None:
        self.tokenizer = self.backbone.need_tokenizer()
        self.tasks = {name: read_task(task) for name, task in self.evaluation.tasks.items()}

    def measure_backbone(self, label: str = BACKBONE_ROW, row_id: str = BACKBONE_ROW) -> Measurement:
        """Measure the bare backbone."""
        metrics = dict(learning_and_forgetting({}, self.backbone_scores)) | self._speeds(self.backbone.model)
        metrics["total_parameters"] = count_parameters(self.backbone.model.parameters())
        outcomes = self.backbone_outcomes
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name)
        return Measurement(Row(id=row_id, label=label, metrics=metrics), self._details({}, outcomes))

    @cached_property
    def backbone_scores(self) -> dict[str, Scores]:
        """The bare backbone's scores, measured once, while no graft is attached."""
        return self._score(self.backbone.model)

    @cached_property
    def backbone_outcomes(self) -> dict[str, TaskResult]:
        """The bare backbone's results on the tasks, measured once, while no graft is attached."""
        return self._do_tasks(self.backbone.model)

    def measure(
        self, model: GraftedModel, row_id: str, label: str, start: Mapping[str, Tensor] | None = None
    ) -> Measurement:
        """Measure a trained model, with `start`, its weights before training, also at the strengths."""
        scores, own = self._score(model), self._own_scores(model)
        metrics: dict[str, Any] = dict(learning_and_forgetting(self.backbone_scores, scores))
        metrics |= self._own_metrics(own) | self._speeds(model)
        metrics["trainable_parameters"] = count_parameters(model.trainable_parameters().values())
        metrics["total_parameters"] = count_parameters(model.parameters())
        outcomes = self._do_tasks(model)
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name) | outcome.gain(name, self.backbone_outcomes[name])
        details = self._details(self._statistics(model), outcomes)
        if self.evaluation.strengths:
            details["strengths"] = self._at_strengths(model, start or {}, self._point(1.0, scores, own))
        return Measurement(Row(id=row_id, label=label, metrics=metrics), details)

    def _at_strengths(
        self, model: GraftedModel, start: Mapping[str, Tensor], trained: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What a model learned and forgot at each strength, ordered; `trained` is its point at strength 1.

        At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
        (Wortsman et al., 2022, arXiv 2109.01903). What learns without training has that one point.
        """
        points = []
        for strength in sorted(set(self.evaluation.strengths) - {1.0}) if start else []:
            with weights_moved_back(model.trainable_parameters(), start, strength):
                points.append(self._point(strength, self._score(model, divergence=False), self._own_scores(model)))
        return [*points, trained]

    def _point(self, strength: float, scores: Mapping[str, Scores], own: Scores | None) -> dict[str, Any]:
        """`strength`, `metrics` as in a row, and `windows`: the `nats` and `tokens` of each window, by what changed.

        `learned`, `forgotten` and `own_kl` are sums of such nats over sums of tokens, so that anything between two
        points has an interval.
        """
        metrics = learning_and_forgetting(self.backbone_scores, scores) | self._own_metrics(own)
        changes = {"own_kl": (own.kl, own.tokens)} if own and own.kl is not None else {}
        for name, key, sign in (("learned", NEW_SET, -1), ("forgotten", OLD_SET, 1)):
            if key in scores:
                changes[name] = (sign * (scores[key].nats - self.backbone_scores[key].nats), scores[key].tokens)
        return {
            "strength": strength,
            "metrics": {name: value.model_dump(mode="json") for name, value in metrics.items()},
            "windows": {n: {"nats": nats.tolist(), "tokens": tokens.tolist()} for n, (nats, tokens) in changes.items()},
        }

    def _details(self, statistics: Mapping[str, Any], outcomes: Mapping[str, TaskResult]) -> dict[str, Any]:
        tasks = {name: outcome.describe(self.tasks[name]) for name, outcome in outcomes.items()}
        details = {"statistics": dict(statistics), "tasks": tasks}
        return {name: value for name, value in details.items() if value}

    def _own_scores(self, model: Any) -> Scores | None:
        """Scores of the backbone's own text with the divergence from it; None without such text."""
        if not self.own_text:
            return None
        options = self.evaluation.model_dump(include={"batch_size", "precision"})
        windows, reference = own_windows(self.own_text), self.backbone.bare_model
        return score_windows(model, self.tokenizer, windows, reference=reference, **options).by_document()

    def _own_metrics(self, scores: Scores | None) -> dict[str, Interval]:
        """`own_kl` on all of the backbone's own text, and `chat_kl` on its conversations, in nats per token."""
        if scores is None:
            return {}
        chats = np.array([self.own_text[number].is_chat for number in scores.document])
        metrics = {"own_kl": scores.interval("kl_per_token")}
        if chats.any() and not chats.all():
            metrics["chat_kl"] = scores.subset(chats).interval("kl_per_token")
        return metrics

    def _score(self, model: Any, *, divergence: bool = True) -> dict[str, Scores]:
        """Scores by test set; those of a grafted model have the divergence from the bare backbone on new text."""
        options = self.evaluation.model_dump(include={"batch_size", "precision", "limit_tokens"})
        references = {NEW_SET: self.backbone.bare_model} if divergence and model is not self.backbone.model else {}
        return {
            name: score(model, self.tokenizer, documents, length=self.length, reference=references.get(name), **options)
            for name, documents in self.tests.items()
        }

    def _do_tasks(self, model: Any) -> dict[str, TaskResult]:
        options = self.evaluation.model_dump(include={"batch_size", "precision"})
        return {name: measure_task(model, self.tokenizer, task, **options) for name, task in self.tasks.items()}

    def _speeds(self, model: Any) -> dict[str, Any]:
        count, tokens = self.evaluation.decode_prompts, self.evaluation.decode_tokens
        sets = [name for name in (OLD_SET, NEW_SET) if name in self.tests] if count else []
        prompts = {name: _prompts(self.tests[name], count) for name in sets}
        return {
            f"decode_{name}_tokens_per_s": decode_speed(model, self.tokenizer, texts, tokens)
            for name, texts in prompts.items()
        }

    def _statistics(self, model: GraftedModel) -> dict[str, Any]:
        graft = model.grafts["graft"]
        statistics: dict[str, Any] = dict(graft.describe(self.backbone))  # type: ignore[operator]
        for name in (OLD_SET, NEW_SET):
            for key, value in self.observe(model, name).items():
                statistics.setdefault(key, {})[name] = value
        return statistics

    def observe(self, model: GraftedModel, name: str) -> dict[str, list[float]]:
        """What the graft shows on the start of a test set, such as shares of open gates: one number a layer."""
        text = "\n".join(document.full_text[: 8 * _OBSERVED_TOKENS] for document in list(self.tests.get(name, ()))[:8])
        ids = self.tokenizer(text[: 8 * _OBSERVED_TOKENS], add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            return {}
        length = min(len(ids), self.length)
        rows = max(1, min(len(ids), _OBSERVED_TOKENS) // length)
        inputs = torch.tensor(ids[: rows * length], device=self.backbone.device).view(rows, length)
        return {key: value.tolist() for key, value in model.observe(input_ids=inputs, use_cache=False)["graft"].items()}


@contextmanager
def weights_moved_back(
    weights: Mapping[str, torch.nn.Parameter], start: Mapping[str, Tensor], strength: float
) -> Iterator[None]:
    """Weights at start + strength (weight - start) in the block, and as they were behind it."""
    trained = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(torch.lerp(start[name], trained[name], strength))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(trained[name])


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Total number of elements."""
    return sum(parameter.numel() for parameter in parameters)


def _prompts(documents: Sequence[Document], count: int) -> list[str]:
    """`count` prompts of 400 characters, evenly spaced in the texts."""
    text = "\n".join(document.full_text[:100_000] for document in list(documents)[:8])
    return [text[start : start + 400] for start in range(0, len(text), max(1, len(text) // count))][:count]

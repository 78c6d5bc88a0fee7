"""The runs of routing on a chat model: X-LoRA's router, and the questions that each mixture answers.

Shape suffixes: B questions, R rows (B x choices), T tokens, E experts, d the backbone's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from experiments.routing_smollm2.programs import check_programs_allowed, passes
from experiments.routing_smollm2.texts import normalised
from experiments.token_routing.runs import RoutingRun, build_routing, load_arrow
from experiments.token_routing.texts import DOMAINS, RoutingQuestion, read_questions
from graftlm.backbone import Backbone, left_padded, padding_id
from graftlm.evaluation import Row
from graftlm.evaluation.examples import generate_answers
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import graft_config
from graftlm.grafts.token_routing import TokenRouting
from graftlm.runs.run import RunContext

ROUTER = "router.safetensors"
# The router of X-LoRA reads the last state of the bare backbone at each token.
LAST_STATE = {"layers": -1, "whiten": False, "centre": False}
XLORA = {"embedder": LAST_STATE, "window": 1, "every": 1, "prompt": "causal"}
NEW_TOKENS = {"code": 64}
SHORT = 16  # new tokens of an answer of any other domain
Answered = dict[str, list[Any]]
"""What is measured on each question of a domain: `nll`, `chosen`, `leader`, `led` and `right`."""


class RouterRun(RoutingRun):
    """Trains the router of X-LoRA with PEFT, over experts whose runs it depends on.

    The artefact is the linear layer of the router.

    Args:
        learning_rate: learning rate of the training.
    """

    learning_rate: float

    def artefacts(self) -> tuple[str, ...]:
        return (ROUTER,)

    def measure(self, context: RunContext) -> Measurement:
        adapters = list(context.dependencies.values())
        model = self.train_xlora(self.load_backbone(), adapters, self.learning_rate, context)
        router = model.base_model.internal_xlora_classifier.layers[-1]
        tensors = {name: value.detach().contiguous() for name, value in router.named_parameters()}
        context.folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, context.folder / ROUTER)
        return Measurement(Row(id=self.id, label=self.id, metrics={}))


class LearnedRouting(TokenRouting):
    """The mixture of X-LoRA: a softmax of a linear layer at each token. In contrast to PEFT's, it runs with a cache."""

    router: dict[str, Tensor]

    def _updated_weights(self, call: Any, spans: Any, running_sum: Any) -> Tensor:
        weights_BTE = self._need_embedder().scores(call, spans, running_sum, self._weights_of)
        return functional.pad(weights_BTE, (0, 1))

    def _weights_of(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.router["weight"], self.router["bias"]).softmax(-1)


class AnswerRun(RoutingRun):
    """Answers questions with one mixture. It depends on the runs of the experts, in the order of `domains`.

    With `mixture_kind: xlora`, the last run that it depends on is that of the router.

    Args:
        mixture_kind: `none` for the bare backbone, `oracle` for the expert of each question's domain, `merge` for
            PEFT's merge of all experts.
        routing: the config of the graft without its experts.
        merge: arguments of PEFT's `add_weighted_adapter`.
        examples: text of the training questions that is embedded for the centroids.
        part: part of the questions: `validation`, or the test of a seed.
        asks: domains of the questions.
        generated: number of questions of each domain that are answered freely.
        questions: number of questions of each domain.
    """

    mixture_kind: Literal["none", "routing", "oracle", "xlora", "arrow", "merge"] = "routing"
    routing: dict[str, Any] = {}
    merge: dict[str, Any] = {}
    examples: Literal["prompt", "whole", "both"] = "prompt"
    part: str = "validation"
    asks: tuple[str, ...] = DOMAINS
    generated: int = 0
    questions: int = 1000

    def measure(self, context: RunContext) -> Measurement:
        answered: dict[str, Answered] = {}
        if self.mixture_kind == "oracle":
            for domain in self.asks:
                answered |= self._answer_domains(context, (domain,), fixed={domain: 1.0})
        else:
            answered = self._answer_domains(context, self.asks)
        row = Row(id=self.id, label=self.id, metrics={**metrics_of(answered)})
        return Measurement(row, {"answered": answered})

    def _answer_domains(self, context: RunContext, domains: Sequence[str], **routing: Any) -> dict[str, Answered]:
        answered = {}
        with self.open_model(context, **routing) as (model, graft, backbone), evaluation_mode(model):
            for domain in domains:
                answered[domain] = self.answer(model, graft, backbone, domain)
        return answered

    def answer(self, model: Any, graft: Any, backbone: Backbone, domain: str) -> Answered:
        """Measure each question of a domain."""
        questions = self._questions(domain)
        answered = read_choices(model, graft, backbone, questions)
        if self._routes:
            answered["led"] = [int(name == domain) for name in answered["leader"]]
        answered["right"] = answer_freely(model, backbone, domain, questions[: self.generated])
        return answered

    def _questions(self, domain: str) -> list[RoutingQuestion]:
        return read_questions(Path(self.texts), domain, self.part)[: self.questions]

    @property
    def _routes(self) -> bool:
        """Whether the text decides between experts."""
        return self.mixture_kind in ("routing", "xlora") and "fixed" not in self.routing and len(self.domains) > 1

    @contextmanager
    def open_model(self, context: RunContext, **routing: Any) -> Iterator[tuple[Any, Any, Backbone]]:
        """Open the mixture, and yield the model, its graft (None without one) and the backbone.

        Args:
            context: the context of the run.
            **routing: settings that replace those of the run's `routing`.
        """
        backbone = self.load_backbone()
        folders = list(context.dependencies.values())
        if self.mixture_kind == "none":
            yield backbone.model, None, backbone
        elif self.mixture_kind == "arrow":
            yield load_arrow(backbone, folders, self.seed), None, backbone
        else:
            graft = self._graft(backbone, folders, context, routing)
            with GraftedModel(backbone, {"graft": graft}) as model:
                yield model, graft, backbone

    def _graft(self, backbone: Backbone, folders: Sequence[Path], context: RunContext, routing: dict[str, Any]) -> Any:
        adapters = dict(zip(self.domains, folders, strict=False))
        if self.mixture_kind == "merge":
            folder = merged(self.load_backbone(), adapters, self.merge, context.folder)
            return build_routing(backbone, {"merged": folder})
        if self.mixture_kind == "xlora":
            return _learned_routing(backbone, adapters, folders[-1] / ROUTER)
        graft = build_routing(backbone, adapters, **(self.routing | routing))
        graft.fit({domain: self._examples(domain) for domain in adapters})
        return graft

    def _examples(self, domain: str) -> list[str]:
        """Return the training text that is embedded for the centroids of a domain."""
        if domain not in self.asks:
            return []
        questions = read_questions(Path(self.texts), domain, "train")[: self.sizes.centroids]
        examples = []
        if self.examples != "prompt":
            examples += [question.text for question in questions]
        if self.examples != "whole":
            examples += [question.prompt for question in questions]
        return examples


def _learned_routing(backbone: Backbone, adapters: dict[str, Path], router: Path) -> LearnedRouting:
    """Return the mixture of X-LoRA with a trained router."""
    experts = {name: {"path": str(folder)} for name, folder in adapters.items()}
    config: Any = graft_config({"kind": "token-routing", "experts": experts, **XLORA})
    graft = LearnedRouting(config, backbone)
    graft.router = {name: tensor.to(backbone.device) for name, tensor in load_file(router).items()}
    return graft


class FreeAnswerRun(AnswerRun):
    """Freely answers all questions after the first `generated`, which the `AnswerRun` of the row answers."""

    def answer(self, model: Any, graft: Any, backbone: Backbone, domain: str) -> Answered:
        remaining = self._questions(domain)[self.generated :]
        return {"right": answer_freely(model, backbone, domain, remaining)}


def merged(
    backbone: Backbone, adapters: dict[str, Path], merge: dict[str, Any], folder: Path, weight: float = 1.0
) -> Path:
    """Merge several adapters with PEFT, each with the same weight, and return the folder of the merged adapter."""
    first, *others = adapters
    model = PeftModel.from_pretrained(backbone.model, str(adapters[first]), adapter_name=first)
    for name in others:
        model.load_adapter(str(adapters[name]), adapter_name=name)
    torch.manual_seed(0)  # DARE drops at random
    model.add_weighted_adapter(list(adapters), [weight] * len(adapters), "merged", **merge)
    model.save_pretrained(str(folder), selected_adapters=["merged"])
    return folder / "merged"


def metrics_of(answered: dict[str, Answered]) -> dict[str, float]:
    """Return means over the questions of each domain, and their means over the domains; shares are percentages."""
    metrics: dict[str, float] = {}
    columns = {"accuracy": "right", "likelihood_accuracy": "chosen", "nll": "nll", "routing_accuracy": "led"}
    for name, column in columns.items():
        unit = 1 if name == "nll" else 100
        means = []
        for domain, values in answered.items():
            if values.get(column):
                mean = float(np.mean(values[column])) * unit
                metrics[f"{name}_{domain}"] = mean
                means.append(mean)
        if means:
            average = "nll_average" if name == "nll" else name
            metrics[average] = float(np.mean(means))
    return metrics


@torch.inference_mode()
def read_choices(
    model: Any,
    graft: Any,
    backbone: Backbone,
    questions: Sequence[RoutingQuestion],
    batch_size: int = 8,
) -> Answered:
    """Measure the likelihoods of the choices of questions.

    Each prompt is read once; its choices continue its keys and values. A route reads the prompt and the choice so far.

    Returns:
        For each question: `nll`, the nats per token of the right answer; `chosen`, whether it has the smallest nats per
        byte; and `leader`, the expert with the largest weight at the end of the prompt.
    """
    result: Answered = {"nll": [], "chosen": [], "leader": []}
    for first in range(0, len(questions), batch_size):
        batch = questions[first : first + batch_size]
        nats_R, tokens_R, leaders = _read_batch(model, graft, backbone, batch)
        nats_per_token_R = nats_R / np.array(tokens_R)
        result["leader"] += leaders
        start = 0
        for question in batch:
            stop = start + len(question.choices)
            byte_counts = np.array([len(choice.encode()) for choice in question.choices])
            nats_per_byte = nats_R[start:stop] / byte_counts
            result["nll"].append(round(float(nats_per_token_R[start]), 4))
            result["chosen"].append(int(nats_per_byte.argmin() == 0))
            start = stop
    return result


def _read_batch(
    model: Any,
    graft: Any,
    backbone: Backbone,
    batch: Sequence[RoutingQuestion],
) -> tuple[np.ndarray, list[int], list[str]]:
    """Return the nats (R,) and the number of tokens of all choices, and the leading experts at the prompts' ends."""
    tokenizer = backbone.need_tokenizer()
    device = backbone.device

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    prompts = [encode(question.prompt) for question in batch]
    prompt = left_padded(prompts, padding_id(tokenizer), device)
    mask_BT = prompt["attention_mask"]
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=backbone.model.config)
    first = model(
        input_ids=prompt["input_ids"],
        attention_mask=mask_BT,
        position_ids=positions_BT,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    leaders = _leaders(graft, cache)
    choices: list[Tensor] = []
    rows: list[int] = []
    for number, question in enumerate(batch):
        choices += [torch.tensor(encode(choice), device=device) for choice in question.choices]
        rows += [number] * len(question.choices)
    rows_R = torch.tensor(rows, device=device)
    cache.batch_select_indices(rows_R)
    ids_RT = pad_sequence(choices, batch_first=True)
    own_RT = pad_sequence([torch.ones_like(ids) for ids in choices], batch_first=True)
    offsets = torch.arange(ids_RT.shape[1], device=device)
    later = model(
        input_ids=ids_RT,
        attention_mask=torch.cat([mask_BT[rows_R], own_RT], dim=1),
        position_ids=positions_BT[rows_R, -1:] + 1 + offsets,
        past_key_values=cache,
        use_cache=True,
    ).logits
    logits = torch.cat([first[rows_R], later[:, :-1]], dim=1).float()
    nats = functional.cross_entropy(logits.transpose(1, 2), ids_RT, reduction="none") * own_RT
    return nats.sum(-1).cpu().numpy(), own_RT.sum(-1).tolist(), leaders


def _leaders(graft: Any, cache: DynamicCache) -> list[str]:
    """Return the expert with the largest weight at the last token of each row; nothing without a graft."""
    trace = None if graft is None else graft.cache_trace(cache)
    if trace is None:
        return []
    largest = trace.values[:, -1, :-1].argmax(-1)
    return [trace.labels[number] for number in largest.tolist()]


def answer_freely(model: Any, backbone: Backbone, domain: str, questions: Sequence[RoutingQuestion]) -> list[int]:
    """Return 1 for each greedy answer that is right: programs pass their tests, other answers have the same words."""
    if domain == "code" and questions:
        check_programs_allowed()
    answers = generate_answers(
        model,
        backbone.need_tokenizer(),
        [question.prompt for question in questions],
        max_new_tokens=NEW_TOKENS.get(domain, SHORT),
        stop=("\n\n",) if domain == "code" else ("\n",),
        batch_size=48,
    )
    right = []
    for answer, question in zip(answers, questions, strict=True):
        if domain == "code":
            is_right = passes(answer, question.tests)
        else:
            is_right = normalised(answer) == normalised(question.answer)
        right.append(int(is_right))
    return right

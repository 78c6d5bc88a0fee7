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

from experiments.routing_smollm2.texts import normalised
from experiments.token_routing.runs import RoutingRun, build_routing, load_arrow
from experiments.token_routing.texts import DOMAINS, RoutingQuestion, read_questions
from graftlm.backbone import Backbone, left_padded, padding_id
from graftlm.evaluation import Row
from graftlm.evaluation.examples import Example, generate_answers, pass_at_1
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import graft_config
from graftlm.grafts.token_routing import TokenRouting
from graftlm.runs.run import RunContext

ROUTER = "router.safetensors"
# X-LoRA's router reads each token's own last state of the bare backbone.
LAST_STATE = {"layers": -1, "whiten": False, "centre": False}
XLORA = {"embedder": LAST_STATE, "window": 1, "every": 1, "prompt": "causal"}
NEW_TOKENS = {"code": 64}
SHORT = 16  # new tokens of any other answer


class RouterRun(RoutingRun):
    """Train X-LoRA's router by PEFT, over experts whose runs it depends on; the artefact holds its linear layer."""

    learning_rate: float

    def artefacts(self) -> tuple[str, ...]:
        return (ROUTER,)

    def measure(self, context: RunContext) -> Measurement:
        model = self.train_xlora(self.load_backbone(), list(context.dependencies.values()), self.learning_rate, context)
        router = model.base_model.internal_xlora_classifier.layers[-1]
        context.folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.detach().contiguous() for name, value in router.named_parameters()}, context.folder / ROUTER
        )
        return Measurement(Row(id=self.id, label=self.id, metrics={}))


class LearnedRouting(TokenRouting):
    """X-LoRA's mixture: one softmax of a linear layer at each token. It runs with a cache, as PEFT's own does not."""

    router: dict[str, Tensor]

    def _updated_weights(self, call: Any, spans: Any, running_sum: Any) -> Tensor:
        states_BTd = self._need_embedder().prefixes(call, spans, running_sum)
        weights = functional.linear(states_BTd, self.router["weight"], self.router["bias"]).softmax(-1)
        return functional.pad(weights, (0, 1))


class AnswerRun(RoutingRun):
    """Answer questions by one mixture. It depends on the experts' runs, in the order of `domains`, and on a router.

    Args:
        mixture: `none` for the bare backbone; `oracle` for each domain's own expert; `merge` for PEFT's merge of all.
        routing: the graft's config without its experts.
        merge: arguments of PEFT's `add_weighted_adapter`.
        examples: training text in the centroids.
        part: the questions: `validation`, or a seed's test.
        asks: domains of the questions.
        generated: questions of each domain that are answered freely.
        questions: of each domain.
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
        answered: dict[str, dict[str, list[Any]]] = {}
        changes: list[tuple[tuple[str, ...], dict[str, Any]]] = [(self.asks, {})]
        if self.mixture_kind == "oracle":
            changes = [((domain,), {"fixed": {domain: 1.0}}) for domain in self.asks]
        for domains, routing in changes:
            with self.open_model(context, **routing) as (model, graft, backbone), evaluation_mode(model):
                for domain in domains:
                    answered[domain] = self.answer(model, graft, backbone, domain)
        return Measurement(Row(id=self.id, label=self.id, metrics={**metrics_of(answered)}), {"answered": answered})

    def answer(self, model: Any, graft: Any, backbone: Backbone, domain: str) -> dict[str, list[Any]]:
        """What is measured on each question of a domain."""
        questions = self._questions(domain)
        answered = read_choices(model, graft, backbone, questions)
        if self._routes:
            answered["led"] = [int(name == domain) for name in answered["leader"]]
        return answered | {"right": answer_freely(model, backbone, domain, questions[: self.generated])}

    def _questions(self, domain: str) -> list[RoutingQuestion]:
        return read_questions(Path(self.texts), domain, self.part)[: self.questions]

    @property
    def _routes(self) -> bool:
        """Whether the text decides between experts."""
        return self.mixture_kind in ("routing", "xlora") and "fixed" not in self.routing and len(self.domains) > 1

    @contextmanager
    def open_model(self, context: RunContext, **routing: Any) -> Iterator[tuple[Any, Any, Backbone]]:
        """The model, its graft where it has one, and the backbone. `routing` overrides the run's own."""
        backbone, folders = self.load_backbone(), list(context.dependencies.values())
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
            return build_routing(
                backbone, {"merged": merged(self.load_backbone(), adapters, self.merge, context.folder)}
            )
        if self.mixture_kind == "xlora":
            experts = {name: {"path": str(folder)} for name, folder in adapters.items()}
            config: Any = graft_config({"kind": "token-routing", "experts": experts, **XLORA})
            graft = LearnedRouting(config, backbone)
            graft.router = {k: v.to(backbone.device) for k, v in load_file(folders[-1] / ROUTER).items()}
            return graft
        graft = build_routing(backbone, adapters, **self.routing | routing)
        graft.fit({domain: self._examples(domain) for domain in adapters})
        return graft

    def _examples(self, domain: str) -> list[str]:
        questions = read_questions(Path(self.texts), domain, "train") if domain in self.asks else []
        questions = questions[: self.sizes.centroids]
        whole = [each.text for each in questions] if self.examples != "prompt" else []
        return whole + ([each.prompt for each in questions] if self.examples != "whole" else [])


class FreeAnswerRun(AnswerRun):
    """Answer freely all questions behind the first `generated`, which the row's own run answers."""

    def answer(self, model: Any, graft: Any, backbone: Backbone, domain: str) -> dict[str, list[Any]]:
        return {"right": answer_freely(model, backbone, domain, self._questions(domain)[self.generated :])}


def merged(backbone: Backbone, adapters: dict[str, Path], merge: dict[str, Any], folder: Path) -> Path:
    """The folder of one adapter that PEFT merges from several, each with weight 1."""
    first, *others = adapters
    model = PeftModel.from_pretrained(backbone.model, str(adapters[first]), adapter_name=first)
    for name in others:
        model.load_adapter(str(adapters[name]), adapter_name=name)
    torch.manual_seed(0)  # DARE drops at random
    model.add_weighted_adapter(list(adapters), [1.0] * len(adapters), "merged", **merge)
    model.save_pretrained(str(folder), selected_adapters=["merged"])
    return folder / "merged"


def metrics_of(answered: dict[str, dict[str, list[Any]]]) -> dict[str, float]:
    """Means over each domain's questions, then over domains; shares are percentages."""
    metrics: dict[str, float] = {}
    columns = {"accuracy": "right", "likelihood_accuracy": "chosen", "nll": "nll", "routing_accuracy": "led"}
    for name, column in columns.items():
        means = {
            domain: float(np.mean(values[column])) * (1 if name == "nll" else 100)
            for domain, values in answered.items()
            if values.get(column)
        }
        if means:
            metrics |= {f"{name}_{domain}": value for domain, value in means.items()}
            metrics["nll_average" if name == "nll" else name] = float(np.mean(list(means.values())))
    return metrics


@torch.inference_mode()
def read_choices(
    model: Any, graft: Any, backbone: Backbone, questions: Sequence[RoutingQuestion], batch_size: int = 8
) -> dict[str, list[Any]]:
    """For each question: nats per token of the right answer, whether it is the likeliest by byte, the leading expert.

    Each prompt is read once; its choices continue its keys and values. A route reads the prompt and the choice so far.
    """
    result: dict[str, list[Any]] = {"nll": [], "chosen": [], "leader": []}
    for first in range(0, len(questions), batch_size):
        batch = questions[first : first + batch_size]
        nats_R, tokens_R, leaders = _read_batch(model, graft, backbone, batch)
        sizes = [len(choice.encode()) for each in batch for choice in each.choices]
        ends = np.cumsum([len(each.choices) for each in batch])[:-1]
        per_byte, per_token = (np.split(nats_R / np.array(d), ends) for d in (sizes, tokens_R))
        result["nll"] += [round(float(of_choices[0]), 4) for of_choices in per_token]
        result["chosen"] += [int(of_choices.argmin() == 0) for of_choices in per_byte]
        result["leader"] += leaders
    return result


def _read_batch(
    model: Any, graft: Any, backbone: Backbone, batch: Sequence[RoutingQuestion]
) -> tuple[np.ndarray, list[int], list[str]]:
    """Nats (R,) and tokens of all choices, and the experts that lead at the prompts' ends."""
    tokenizer, device = backbone.need_tokenizer(), backbone.device

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    prompt = left_padded([encode(each.prompt) for each in batch], padding_id(tokenizer), device)
    mask_BT, cache = prompt["attention_mask"], DynamicCache(config=backbone.model.config)
    positions = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    given = {"input_ids": prompt["input_ids"], "attention_mask": mask_BT, "position_ids": positions}
    first = model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    trace = None if graft is None else graft.cache_trace(cache)
    leaders = [] if trace is None else [trace.labels[n] for n in trace.values[:, -1, :-1].argmax(-1).tolist()]
    choices = [torch.tensor(encode(choice), device=device) for each in batch for choice in each.choices]
    rows = torch.tensor([n for n, each in enumerate(batch) for _ in each.choices], device=device)
    cache.batch_select_indices(rows)
    ids_RT = pad_sequence(choices, batch_first=True)
    own_RT = pad_sequence([torch.ones_like(ids) for ids in choices], batch_first=True)
    after = positions[rows, -1:] + 1 + torch.arange(ids_RT.shape[1], device=device)
    mask = torch.cat([mask_BT[rows], own_RT], dim=1)
    later = model(
        input_ids=ids_RT, attention_mask=mask, position_ids=after, past_key_values=cache, use_cache=True
    ).logits
    logits = torch.cat([first[rows], later[:, :-1]], dim=1).float()
    nats = functional.cross_entropy(logits.transpose(1, 2), ids_RT, reduction="none") * own_RT
    return nats.sum(-1).cpu().numpy(), own_RT.sum(-1).tolist(), leaders


def answer_freely(model: Any, backbone: Backbone, domain: str, questions: Sequence[RoutingQuestion]) -> list[int]:
    """1 for each greedy answer that is right: programs pass their tests, other answers have the same words."""
    prompts = [each.prompt for each in questions]
    stop = ("\n\n",) if domain == "code" else ("\n",)
    count = NEW_TOKENS.get(domain, SHORT)
    answers = generate_answers(
        model, backbone.need_tokenizer(), prompts, max_new_tokens=count, stop=stop, batch_size=48
    )
    if domain == "code":
        examples = [Example("", each.answer, each.tests) for each in questions]
        return pass_at_1(answers, examples).astype(int).tolist() if examples else []
    return [int(normalised(a) == normalised(each.answer)) for a, each in zip(answers, questions, strict=True)]

"""The runs of token routing: one LoRA expert per domain, PEFT's own mixtures of them, and the measurement of mixtures.

Mixtures are measured on questions, on documents that change domain, and under both cache modes.
Shape suffixes: T predicted tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import set_seed
from peft import ArrowConfig, XLoraConfig, create_arrow_model, get_peft_model
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from experiments.study import losses, training_config
from experiments.token_routing.texts import (
    DOMAINS,
    QUICK_TEXT_SIZES,
    RoutingQuestion,
    RoutingTextSizes,
    read_changing,
    read_questions,
)
from graftlm.backbone import Backbone, leading_bos
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, Mixture, SourceConfig, build_mixture
from graftlm.evaluation import Row
from graftlm.evaluation.examples import Example, score_answers
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingSummary, train
from graftlm.training.language_model import LanguageModel

TARGETS = ("attention", "ffn")  # chosen by `--table choices`, as are the learning rates


class RoutingSizes(Config):
    """Sizes of one reproduction.

    Args:
        amounts: of text.
        vocabulary, width, layers, heads: of the backbone.
        length: tokens of a row, for the backbone and the experts.
        backbone_batch: batch size of the backbone's training, which reads its texts once.
        rank: of every expert.
        steps, batch_size: of every expert, and of X-LoRA's router.
        centroids: number of examples in an expert's centroid, drawn anew for every seed.
    """

    amounts: RoutingTextSizes = Field(default_factory=RoutingTextSizes)
    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 320
    backbone_batch: int = Field(6, ge=1)
    rank: int = Field(16, ge=1)
    steps: int = Field(80, ge=1)
    batch_size: int = Field(6, ge=1)
    centroids: int = Field(300, ge=1)


QUICK_SIZES = RoutingSizes(
    amounts=QUICK_TEXT_SIZES,
    vocabulary=320,
    width=16,
    layers=2,
    heads=2,
    length=128,
    backbone_batch=2,
    rank=2,
    steps=2,
    batch_size=2,
    centroids=4,
)


class RoutingRun(Run):
    """What all runs of token routing share.

    Args:
        domains: of the experts; training reads their questions and predicts all of their text.
        backbone: a model's folder or hub name.
        texts: folder of the texts.
        seed: of training, and of the examples in centroids.
        device: the fastest device where it is None.
    """

    domains: tuple[str, ...] = ()
    backbone: str
    texts: str
    sizes: RoutingSizes
    seed: int = 0
    device: str | None = None

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in super().settings().items() if key != "device"}

    def load_backbone(self) -> Backbone:
        return BackboneConfig(name=self.backbone, device=self.device).load()

    def mixture(self, backbone: Backbone) -> Mixture:
        """The training batches."""
        sources = [SourceConfig(path=str(Path(self.texts) / f"{domain}-train.jsonl")) for domain in self.domains]
        data = DataConfig(new=sources, replay_fraction=0, length=self.sizes.length, boundaries="whole", seed=self.seed)
        return build_mixture(data, backbone.need_tokenizer(), self.sizes.batch_size)

    def train(self, model: Any, batches: Mixture, learning_rate: float, context: RunContext) -> TrainingSummary:
        steps = self.sizes.steps
        more: dict[str, Any] = {"warmup_steps": max(1, min(10, steps // 4)), "checkpoint_every": max(1, steps // 2)}
        config = training_config(steps, self.sizes.batch_size, learning_rate, self.seed, precision="bf16", **more)
        return train(model, batches, config, context.folder / "training", identity={"run": context.key}, progress=False)


class ExpertRun(RoutingRun):
    """Train plain LoRA on one domain. The artefact is a folder that PEFT reads.

    Args:
        targets: the modules that the expert changes.
    """

    learning_rate: float
    targets: tuple[str, ...] = TARGETS

    def artefacts(self) -> tuple[str, ...]:
        return ("adapter_config.json", "adapter_model.safetensors")

    def measure(self, context: RunContext) -> Measurement:
        (domain,) = self.domains
        backbone = self.load_backbone()
        mixture = self.mixture(backbone)
        set_seed(self.seed)
        started = time.process_time()
        graft = build_routing(backbone, {domain: {"rank": self.sizes.rank, "targets": list(self.targets)}})
        with GraftedModel(backbone, {"graft": graft}) as model:
            summary = self.train(model, mixture, self.learning_rate, context)
            graft.write_adapter(domain, context.folder)
            metrics = {
                "parameters": count_parameters(model.trainable_parameters().values()),
                "tokens": summary.tokens,
                "cpu_s": round(time.process_time() - started, 1),
            }
        row = Row(id=self.id, label=self.id, metrics=metrics)
        return Measurement(row, {"losses": losses(summary.history)})


def build_routing(backbone: Backbone, experts: Mapping[str, Any], **routing: Any) -> Any:
    """A token-routing graft; `routing` is its config without the experts, whose folders may stand for their configs."""
    configs = {name: {"path": str(expert)} if isinstance(expert, Path) else expert for name, expert in experts.items()}
    return build_graft(graft_config({"kind": "token-routing", "experts": configs, **routing}), backbone)


def load_xlora(backbone: Backbone, adapters: Sequence[str | Path]) -> Any:
    """X-LoRA over frozen experts, with PEFT's defaults: a linear router on the backbone's last hidden states."""
    model: Any = backbone.model
    model.config.use_cache = False  # X-LoRA cannot use a cache
    # X-LoRA looks its adapters up by number, whatever their names are.
    numbered = {str(number): str(path) for number, path in enumerate(adapters)}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=model.config.hidden_size, adapters=numbered)
    return get_peft_model(model, config)


def load_arrow(backbone: Backbone, adapters: Sequence[str | Path], seed: int) -> Any:
    """Arrow over frozen experts, with PEFT's defaults: each token of each layer takes its three closest experts."""
    config = ArrowConfig(top_k=min(3, len(adapters)), rng_seed=seed)
    return create_arrow_model(backbone.model, [str(path) for path in adapters], config)


CENTROIDS = "centroids.safetensors"
FIRST, SECOND = "code", "reading"  # domains of the halves of a document that changes domain
STABLE_TOKENS = 8  # a route has switched when the second half's expert leads for so many tokens

PromptedIds = tuple[Sequence[int], int]
"""Token ids, and the number of given tokens; the tokens after those are predicted."""
Documents = Sequence[Mapping[str, Any]]


class CentroidRun(RoutingRun):
    """Embed the training examples of all experts. It depends on their runs; the artefact holds the router's tensors.

    Args:
        embedder: of the graft's config.
        examples: the text of the centroids: `whole` examples as in the paper, their `prompt`, or `both`.
    """

    embedder: dict[str, Any] = {}
    examples: Literal["whole", "prompt", "both"] = "whole"

    def artefacts(self) -> tuple[str, ...]:
        return (CENTROIDS,)

    def measure(self, context: RunContext) -> Measurement:
        adapters = dict(zip(self.domains, context.dependencies.values(), strict=True))
        routing = {"embedder": self.embedder} if self.embedder else {}
        graft = build_routing(self.load_backbone(), adapters, **routing)
        graft.fit({domain: self._draw_examples(domain) for domain in self.domains})
        context.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in graft.tensors().items()}
        save_file(tensors, context.folder / CENTROIDS)
        return Measurement(Row(id=self.id, label=self.id, metrics={}))

    def _draw_examples(self, domain: str) -> list[str]:
        """Texts for a centroid, of training examples alone, drawn by the seed."""
        questions = read_questions(Path(self.texts), domain, "train")
        count = min(self.sizes.centroids, len(questions))
        drawn = random.Random(f"{domain} {self.seed}").sample(questions, count)
        texts = [question.text for question in drawn] if self.examples != "prompt" else []
        return texts + ([question.prompt for question in drawn] if self.examples != "whole" else [])


class MixtureRun(RoutingRun):
    """Measure one mixture of experts. It depends on the experts' runs, in the order of `domains`.

    A routing of several experts depends on a `CentroidRun` as well.

    Args:
        mixture_kind: `none` for the bare backbone, our `routing`, or a method of PEFT.
        routing: the graft's config without its experts.
        router_learning_rate: of X-LoRA's router.
        part: the questions to answer.
        trace: measure the fraction of prompts at which the right expert has the largest weight.
        reads: questions, documents that change domain, or how far `cache: keep` is from `recompute` on either.
    """

    mixture_kind: Literal["none", "routing", "xlora", "arrow"] = "routing"
    routing: dict[str, Any] = {}
    router_learning_rate: float = 0.0
    part: Literal["validation", "test"] = "test"
    trace: bool = False
    reads: Literal["questions", "documents", "cache-questions", "cache-documents"] = "questions"

    def measure(self, context: RunContext) -> Measurement:
        details: dict[str, Any] = {}
        if self.reads.startswith("cache"):
            metrics = self._compare_caches(context)
        else:
            with self.open_model(context) as (model, graft, backbone):
                if self.reads == "questions":
                    metrics = self._answer_questions(model, graft, backbone)
                else:
                    details = self._read_documents(model, graft, backbone)
                    metrics = document_metrics(details["documents"], details["names"])
        return Measurement(Row(id=self.id, label=self.id, metrics=dict(metrics)), details)

    @contextmanager
    def open_model(self, context: RunContext, **routing: Any) -> Iterator[tuple[Any, Any, Backbone]]:
        """The model, its graft where it has one, and the backbone. `routing` overrides the run's own."""
        backbone, folders = self.load_backbone(), list(context.dependencies.values())
        adapters = dict(zip(self.domains, folders, strict=False))
        if self.mixture_kind == "xlora":
            yield self._train_xlora(backbone, folders, context), None, backbone
        elif self.mixture_kind == "arrow":
            yield load_arrow(backbone, folders, self.seed), None, backbone
        elif self.mixture_kind == "none":
            yield backbone.model, None, backbone
        else:
            graft = build_routing(backbone, adapters, **self.routing | routing)
            for folder in folders[len(self.domains) :]:
                graft.load_tensors(load_file(folder / CENTROIDS))
            with GraftedModel(backbone, {"graft": graft}) as model:
                yield model, graft, backbone

    def _train_xlora(self, backbone: Backbone, adapters: Sequence[Path], context: RunContext) -> Any:
        """X-LoRA with a router trained on all domains, for as many steps and rows as one expert."""
        mixture = self.mixture(backbone)
        set_seed(self.seed)
        model = load_xlora(backbone, adapters)
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trainee = LanguageModel(model)
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.train(trainee, mixture, self.router_learning_rate, context)
        return model

    def _questions(self, domain: str) -> list[RoutingQuestion]:
        return read_questions(Path(self.texts), domain, self.part)

    def _answer_questions(self, model: Any, graft: Any, backbone: Backbone) -> dict[str, float]:
        """Nats per token of the right answers, by domain, and accuracy on ARC."""
        amounts, tokenizer = self.sizes.amounts, backbone.need_tokenizer()
        questions = {domain: self._questions(domain)[: amounts.tested] for domain in DOMAINS}
        answers = {d: [Example(question.prompt, question.answer) for question in questions[d]] for d in DOMAINS}
        metrics = {f"nll_{d}": score_answers(model, tokenizer, answers[d]).nats_per_token for d in DOMAINS}
        metrics["nll_average"] = float(np.mean(list(metrics.values())))
        if self.part == "test":
            multiple_choice = self._questions("science")[: amounts.chosen]
            metrics["arc_accuracy"] = choice_accuracy(model, tokenizer, multiple_choice)
        if self.trace:
            metrics["routing_accuracy"] = routing_accuracy(model, graft, backbone, questions)
        return metrics

    def _read_documents(self, model: Any, graft: Any, backbone: Backbone) -> dict[str, Any]:
        """Nats and expert weights of every token of the documents that change domain."""
        documents = []
        for halves in read_changing(Path(self.texts), self.part):
            nats, weights = read_tokens(model, graft, backbone, halves)
            first = len(token_ids(backbone, halves[:1]))
            documents.append({"nats": nats.tolist(), "first": first, "weights": np.round(weights, 4).tolist()})
        return {"documents": documents, "names": list(graft.names) if graft is not None else []}

    def _compare_caches(self, context: RunContext) -> dict[str, float]:
        """Distance of `keep` from `recompute`: on right answers after their prompts, or on documents."""
        logits, texts = [], []
        for cache in ("keep", "recompute"):
            with self.open_model(context, cache=cache) as (model, _, backbone):
                texts = list(self._cache_texts(backbone))
                logits.append(predicted_logits(model, backbone, texts, prompts=self.reads == "cache-questions"))
        return cache_distance(logits[0], logits[1], texts)

    def _cache_texts(self, backbone: Backbone) -> Iterator[PromptedIds]:
        """The documents, or a sixth of the questions with answers: `recompute` takes a pass for each route."""
        if self.reads == "cache-documents":
            yield from ((token_ids(backbone, halves), 1) for halves in read_changing(Path(self.texts), self.part))
            return
        for domain in DOMAINS:
            for question in self._questions(domain)[: max(1, self.sizes.amounts.tested // 6)]:
                given = len(token_ids(backbone, [question.prompt]))
                yield token_ids(backbone, [question.prompt, question.answer]), given


def choice_accuracy(model: Any, tokenizer: Any, questions: Sequence[RoutingQuestion]) -> float:
    """The fraction of questions whose right answer is the likeliest of its choices, in nats per byte."""
    examples = [Example(question.prompt, choice) for question in questions for choice in question.choices]
    scores = score_answers(model, tokenizer, examples)
    nats = iter(scores.nats / scores.bytes)
    pairs = [min(zip(question.choices, nats, strict=False), key=lambda pair: pair[1]) for question in questions]
    return mean(choice == question.answer for (choice, _), question in zip(pairs, questions, strict=True))


def routing_accuracy(
    model: Any, graft: Any, backbone: Backbone, questions: Mapping[str, Sequence[RoutingQuestion]]
) -> float:
    """The fraction of prompts whose last token gives the domain's own expert the largest weight."""

    def leader(prompt: str) -> str:
        _, weights = read_tokens(model, graft, backbone, [prompt])
        return graft.names[int(weights[-1, :-1].argmax())]

    return float(np.mean([leader(q.prompt) == domain for domain, of_domain in questions.items() for q in of_domain]))


def read_tokens(model: Any, graft: Any, backbone: Backbone, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Nats (T - 1,) of every token but the first of the joined texts, and weights (T, experts + 1)."""
    ids = torch.tensor([token_ids(backbone, texts)], device=backbone.device)
    cache = DynamicCache(config=backbone.model.config)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, :-1].float()
        nats = functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().cpu().numpy()
    trace = graft.cache_trace(cache) if graft is not None else None
    return nats, np.zeros((ids.shape[1], 0)) if trace is None else trace.values[0].cpu().numpy()


def token_ids(backbone: Backbone, texts: Sequence[str]) -> list[int]:
    """The tokens of texts, each tokenised separately, after the BOS token that the tokenizer expects."""
    tokenizer = backbone.need_tokenizer()
    bos = leading_bos(tokenizer)
    parts = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [*([] if bos is None else [bos]), *(token for part in parts for token in part)]


def predicted_logits(model: Any, backbone: Backbone, texts: Sequence[PromptedIds], *, prompts: bool) -> list[Tensor]:
    """(T, V) logits of each text's predicted tokens. With `prompts`, the given tokens are a prompt."""
    of_texts = []
    for ids, given in texts:
        ids_1S = torch.tensor([ids], device=backbone.device)
        prompt_1S = (torch.arange(len(ids), device=backbone.device) < given)[None] if prompts else None
        with evaluation_mode(model), torch.inference_mode():
            logits = model(ids_1S, prompt=prompt_1S, use_cache=False).logits[0, given - 1 : -1]
        of_texts.append(logits.float().cpu())
    return of_texts


def cache_distance(kept: Sequence[Tensor], again: Sequence[Tensor], texts: Sequence[PromptedIds]) -> dict[str, float]:
    """Distance between the logits of `keep` and `recompute`, over all predicted tokens.

    Gives nats per token of both, the mean distance of a token's nats, the largest distance of a logit, and the
    fraction of tokens whose likeliest token differs.
    """
    targets = torch.cat([torch.tensor(ids[given:]) for ids, given in texts])[:, None]
    kept_TV, again_TV = torch.cat(list(kept)), torch.cat(list(again))
    nats_keep, nats_again = (-logits.log_softmax(-1).gather(-1, targets) for logits in (kept_TV, again_TV))
    return {
        "nats_keep": float(nats_keep.mean()),
        "nats_recompute": float(nats_again.mean()),
        "nats_apart": float((nats_keep - nats_again).abs().mean()),
        "largest_logit": float((kept_TV - again_TV).abs().max()),
        "changed_tokens": float((kept_TV.argmax(-1) != again_TV.argmax(-1)).float().mean()),
    }


def document_metrics(documents: Documents, names: Sequence[str]) -> dict[str, float]:
    """Nats per token of both halves and of whole documents; for routes also when they switch."""
    metrics = half_nats(documents, documents)
    if len(names) > 1:
        tokens = [switched_after(document, names) for document in documents]
        metrics["switch_tokens"] = float(np.median(tokens))
        metrics["switched_within_32"] = float(np.mean([count <= 32 for count in tokens]))
    return metrics


def half_nats(first: Documents, second: Documents) -> dict[str, float]:
    """Nats of tokens before the boundary in `first`, without the first token, and after it in `second`.

    With one expert's documents and another's, the boundary is known by hand.
    """
    before = np.concatenate([np.array(document["nats"])[: document["first"] - 1] for document in first])
    after = np.concatenate([np.array(document["nats"])[document["first"] - 1 :] for document in second])
    halves = {"nll_code_half": before, "nll_prose_half": after, "nll_document": np.concatenate([before, after])}
    return {name: float(nats.mean()) for name, nats in halves.items()}


def switched_after(document: Mapping[str, Any], names: Sequence[str]) -> int:
    """Tokens after the boundary until the second half's expert leads and stays; all of them where it never does."""
    weights = np.array(document["weights"])[document["first"] :, : len(names)]
    right = weights.argmax(-1) == names.index(SECOND)
    stable = (token for token in range(len(right)) if right[token : token + STABLE_TOKENS].all())
    return next(stable, len(right))

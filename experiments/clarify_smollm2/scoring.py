"""Runs that also score pairs: log p of both forms under every condition, in one pass per pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from graftlm.evaluation.inference import device_of, evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee


class PairRun(GraftRun):
    """A run that also scores pairs, which become `pairs` in the details.

    Args:
        pairs: a file of pairs as JSON lines; empty for none.
    """

    pairs: str = ""

    def artefacts(self) -> tuple[str, ...]:
        """Return no files: the experiment needs only the measurement."""
        return ()

    def measure(self, context: RunContext) -> Measurement:
        """Measure the backbone or train and measure the graft."""
        measurement = super().measure(context)
        if self.graft is None:
            backbone = self.evaluator().backbone
            measurement.details["pairs"] = self._score_pairs(backbone.model, backbone.need_tokenizer())
        return measurement

    def evaluate(self, trainee: Trainee) -> Measurement:
        """Measure the trained graft."""
        measurement = super().evaluate(trainee)
        measurement.details["pairs"] = self._score_pairs(trainee.model, trainee.evaluation.evaluator.tokenizer)
        return measurement

    def save(self, *args: Any) -> None:
        """Save nothing: the experiment does not need the graft."""

    def _score_pairs(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """Return `id`, `group`, `part` and `right` of each pair, the forms' `tokens`, and `nats` by condition."""
        if not self.pairs:
            return []
        lines = Path(self.pairs).read_text(encoding="utf-8").splitlines()
        return [_score_pair(model, tokenizer, json.loads(line)) for line in lines]


def _score_pair(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: dict[str, Any]) -> dict[str, Any]:
    """Score both forms of a pair under every condition."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    told: dict[str, str] = pair.pop("told")
    system = {"role": "system", "content": pair.pop("system")}
    forms = [encode(form) for form in pair.pop("forms")]
    sequences = []
    for text in told.values():
        messages = [system, {"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = encode(str(prompt))
        sequences.extend((prompt_ids, form) for form in forms)
    nats = iter(sequence_nats(model, sequences))
    nats_by_condition = {}
    for condition in told:
        first = next(nats)
        second = next(nats)
        nats_by_condition[condition] = [first, second]
    return {
        **pair,
        "tokens": [len(form) for form in forms],
        "nats": nats_by_condition,
    }


def sequence_nats(model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """Compute log p(target | prompt) of several sequences in one pass over their prefix tree.

    Common beginnings are computed once: by a (T, T) mask, each of the T tokens of the tree attends only to the tokens
    before it in its own sequence.

    Args:
        model: a `GraftedModel` or any transformers model.
        sequences: prompts and targets, as token ids.

    Returns:
        The log-probability of each target, in nats.
    """
    tree = _PrefixTree()
    targets = [tree.add(prompt, target) for prompt, target in sequences]
    parents = torch.tensor(tree.parents)
    tokens = torch.tensor(tree.tokens)
    size = len(tokens)
    inputs = {
        "input_ids": tokens[None],
        "attention_mask": tree.attention_mask(next(model.parameters()).dtype),
        "position_ids": torch.tensor([[len(path) - 1 for path in tree.paths]]),
    }
    if isinstance(model, GraftedModel):
        inputs["token_mask"] = torch.ones(1, size, dtype=torch.bool)
    device = device_of(model)
    target_nodes: set[int] = set()
    for path in targets:
        target_nodes.update(path)
    scored = torch.tensor(sorted(target_nodes))
    with evaluation_mode(model), torch.inference_mode():
        on_device = {name: value.to(device) for name, value in inputs.items()}
        logits = model(**on_device, use_cache=False).logits[0]
        predictions = logits[parents[scored]].float().cpu()
        losses = F.cross_entropy(predictions, tokens[scored], reduction="none")
    nats = torch.zeros(size, dtype=torch.float64)
    nats = nats.index_put((scored,), -losses.double())
    return [float(nats[path].sum()) for path in targets]


class _PrefixTree:
    """The prefix tree of token sequences; its nodes are numbered in order of appearance.

    Attributes:
        tokens: token of each node.
        parents: node before each node; -1 for the first token of a sequence.
        paths: nodes from the root to each node, which is the last.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.paths: list[list[int]] = []
        self._nodes: dict[tuple[int, int], int] = {}  # node by parent and token

    def add(self, prompt: Sequence[int], target: Sequence[int]) -> list[int]:
        """Add a sequence and return the nodes of its target."""
        path: list[int] = []
        for token in (*prompt, *target):
            parent = path[-1] if path else -1
            node = self._nodes.setdefault((parent, token), len(self.tokens))
            path.append(node)
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
                self.paths.append(list(path))
        return path[len(prompt) :]

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return an additive mask, (1, 1, T, T): 0 where a token attends, else the lowest number."""
        size = len(self.tokens)
        mask = torch.full((1, 1, size, size), torch.finfo(dtype).min, dtype=dtype)
        for node, path in enumerate(self.paths):
            mask[..., node, path] = 0
        return mask

"""Runs that also score pairs: log p of both forms under every condition, in one pass for a pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graftlm.evaluation.inference import device_of, evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee


class PairRun(GraftRun):
    """A run that also scores the pairs of a file of JSON lines, if there is one: `pairs` in the details."""

    pairs: str = ""

    def artefacts(self) -> tuple[str, ...]:
        return ()  # a measurement is all that is needed of a run

    def measure(self, context: RunContext) -> Measurement:
        measurement = super().measure(context)
        if self.graft is None:
            backbone = self.evaluator().backbone
            measurement.details["pairs"] = list(self._scored(backbone.model, backbone.need_tokenizer()))
        return measurement

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        measurement.details["pairs"] = list(self._scored(trainee.model, trainee.evaluator.tokenizer))
        return measurement

    def save(self, *args: Any) -> None:
        """Leave the graft out: the table needs none."""

    def _scored(self, model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """`id`, `group`, `part`, `right`, the forms' `tokens`, and by condition `nats`: log p of both forms."""
        for line in Path(self.pairs).read_text(encoding="utf-8").splitlines() if self.pairs else ():
            pair = json.loads(line)
            forms = [tokenizer(form, add_special_tokens=False)["input_ids"] for form in pair.pop("forms")]
            system, by_condition, prompts = {"role": "system", "content": pair.pop("system")}, pair.pop("told"), []
            for text in by_condition.values():
                messages = [system, {"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                prompts.append(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            nats = iter(sequence_nats(model, [(prompt, form) for prompt in prompts for form in forms]))
            yield pair | {
                "tokens": [*map(len, forms)],
                "nats": {name: [next(nats), next(nats)] for name in by_condition},
            }


def sequence_nats(model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """log p(target | prompt) in nats of each (prompt, target) of token ids, in one pass over their tree.

    Equal beginnings are computed once: each of the T tokens sees those before it in its own sequence, by a (T, T) mask.
    """
    nodes: dict[tuple[int, int], int] = {}  # in the tree, by the node before and the token
    seen: list[list[int]] = []  # nodes that each token sees, by node
    paths = []
    for prompt, target in sequences:
        path = [-1]
        for token in (*prompt, *target):
            path.append(nodes.setdefault((path[-1], token), len(nodes)))
            seen += [path[1:]] * (len(nodes) - len(seen))
        paths.append(path[1 + len(prompt) :])
    (before, tokens), size = torch.tensor(list(nodes)).T, len(nodes)
    mask = torch.full((1, 1, size, size), torch.finfo(dtype := next(model.parameters()).dtype).min, dtype=dtype)
    for node, visible in enumerate(seen):
        mask[..., node, visible] = 0
    inputs = {"input_ids": tokens[None], "attention_mask": mask}
    inputs["position_ids"] = torch.tensor([[len(visible) - 1 for visible in seen]])
    if isinstance(model, GraftedModel):
        inputs["token_mask"] = torch.ones(1, size, dtype=torch.bool)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(**{n: value.to(device_of(model)) for n, value in inputs.items()}, use_cache=False).logits[0]
        scored = torch.tensor(sorted({node for path in paths for node in path}))
        losses = F.cross_entropy(logits[before[scored]].float().cpu(), tokens[scored], reduction="none")
    nats = torch.zeros(size, dtype=torch.float64).index_put((scored,), -losses.double())
    return [float(nats[path].sum()) for path in paths]

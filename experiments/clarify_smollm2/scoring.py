"""Runs that also score pairs: log p of both forms under every condition, in one pass for a pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graftlm.evaluation.metrics import device_of, evaluation_mode
from graftlm.grafts import GraftedModel
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Measurement, RunContext, Trainee


class PairRun(GraftRun):
    """A graft's run that also scores the pairs of a file of JSON lines, if there is one: `pairs` in the details."""

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
            system, told = {"role": "system", "content": pair.pop("system")}, pair.pop("told")
            prompts = []
            for text in told.values():
                messages = [system, {"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                prompts.append(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            nats = iter(sequence_nats(model, [(prompt, form) for prompt in prompts for form in forms]))
            yield pair | {"tokens": [*map(len, forms)], "nats": {name: [next(nats), next(nats)] for name in told}}


def sequence_nats(model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """log p(target | prompt) in nats of each (prompt, target) of token ids, in one pass over their tree.

    What sequences begin with alike is computed once: each of the tree's T tokens sees those before it in its own
    sequence alone, by a mask of (T, T).
    """
    index: dict[tuple[int, int], int] = {}  # place in the tree by the place before it and the token
    positions, paths, length = [], [], sum(len(prompt) + len(target) for prompt, target in sequences)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for prompt, target in sequences:
        path = [-1]
        for position, token in enumerate([*prompt, *target]):
            path.append(index.setdefault((path[-1], token), len(index)))
            if len(positions) < len(index):
                positions.append(position)
                seen[path[-1], path[1:]] = True
        paths.append(path[1 + len(prompt) :])
    (before, tokens), size = torch.tensor(list(index)).T, len(index)
    dtype, device = next(model.parameters()).dtype, device_of(model)
    mask = torch.zeros(1, 1, size, size, dtype=dtype).masked_fill(~seen[:size, :size], torch.finfo(dtype).min)
    inputs = {"input_ids": tokens[None], "attention_mask": mask, "position_ids": torch.tensor([positions])}
    if isinstance(model, GraftedModel):
        inputs["token_mask"] = torch.ones(1, size, dtype=torch.bool)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(**{name: value.to(device) for name, value in inputs.items()}, use_cache=False).logits[0]
        scored = torch.tensor(sorted({place for path in paths for place in path}))
        losses = F.cross_entropy(logits[before[scored].to(device)].float(), tokens[scored].to(device), reduction="none")
    nats = torch.zeros(size, dtype=torch.float64).index_put((scored,), -losses.cpu().double())
    return [float(nats[path].sum()) for path in paths]

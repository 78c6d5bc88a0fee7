"""The training rows of the GPU benchmark: tokens per second, peak memory and model FLOPs utilisation (MFU).

A step of a frozen model of N weights with n trained ones takes 4 N + 6 n FLOPs per token: 2 N forward, 2 N for the
gradients of activations, 2 n forward and 4 n for both gradients. N counts the output layer, and not the lookup of
embeddings. Causal attention adds 6 L T D per token, for L layers, T tokens of a row and D widths of all heads together:
2 T D forward, since a token sees half of the others on average, and twice as much backward. MFU is this number times
tokens per second, over the dense bfloat16 peak of the card.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_decoding import alternate, parameter_count, peft_lora, seconds_of
from gpu_models import SEED, Measured, Shape, Sizes, random_ids, random_llama, shared_copy, wrap
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from turns import interval

from graftlm.data import Batch
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.training import TrainingConfig
from graftlm.training.loop import train

PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "B200": 2250e12,
}
"""Dense bfloat16 FLOPs per second by words of a card's name, from the vendor's data sheets; the first match counts."""
BOUND = "train_bound"
LORA = "train_lora"
NEUTRAL = "train_neutral"
OURS_LORA = "train_lora_ours"
COMPILED = "train_neutral_compiled"
LABELS = {
    BOUND: "forward and backward of the bare frozen model, without anything that trains",
    LORA: "LoRA of PEFT with the Trainer of transformers",
    NEUTRAL: "neutral residues with our training loop",
    OURS_LORA: "LoRA with our training loop",
    COMPILED: "neutral residues with our training loop and training.compile",
}


def peak_flops(card: str) -> float | None:
    """Return the dense bfloat16 peak of a card in FLOPs per second; None if it is unknown, as for a part of a card."""
    words = set(re.split(r"[^A-Za-z0-9]+", card))
    if "MIG" in words:
        return None
    for name, peak in PEAKS.items():
        if words.issuperset(name.split()):
            return peak
    return None


def flops_per_token(shape: Shape, length: int, trained: int) -> int:
    """Return the FLOPs of a training step per token.

    Args:
        shape: the frozen model.
        length: tokens of a row.
        trained: number of trained weights.
    """
    attention = shape.heads * shape.head_width
    keys = shape.kv_heads * shape.head_width
    layer = 2 * shape.width * attention + 2 * shape.width * keys + 3 * shape.width * shape.ffn
    frozen = shape.layers * layer + shape.width * shape.vocabulary
    return 4 * frozen + 6 * trained + 6 * shape.layers * length * attention


class Training:
    """Trainings of models that share their frozen weights.

    Args:
        sizes: the sizes.
        device: the device.
        folder: a folder for the files of trainings.
    """

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path) -> None:
        self._sizes = sizes
        self._device = device
        self._folder = folder
        self._shape = sizes.models["1b"]
        self._base = random_llama(self._shape, sizes.dtype, device)
        self._ids = random_ids(self._shape, sizes.train_rows, sizes.train_length, device)
        self._tokens = self._ids.numel()
        self._trained: dict[str, int] = {BOUND: 0}
        self._peaks: dict[str, list[int]] = {}

    def measure(self, names: tuple[str, ...]) -> Measured:
        """Measure trainings in rounds of alternating order.

        Args:
            names: the rows to measure, one of which is that of PEFT.
        """
        problems: dict[str, str] = {}
        details: dict[str, Any] = {}
        ready: dict[str, Callable[[], float]] = {}
        for name in names:
            turn = partial(self._speed, name, self._step_runner(name))
            duration = seconds_of(turn, self._device, problems, name)
            if duration is not None:
                ready[name] = turn
                details[f"warm_up_seconds_{name}"] = duration
        self._peaks.clear()
        speeds = alternate(ready, self._sizes.train_rounds)
        details |= {"tokens_per_s": dict(speeds), "trained_parameters": dict(self._trained)}
        rows = []
        for name, values in speeds.items():
            if name != LORA or NEUTRAL in names:  # the item of compiled training measures LoRA only to compare with
                rows.append(Row(id=name, label=f"{LABELS[name]}, 1B", metrics=self._metrics(name, values, speeds)))
        return Measured(rows, problems, details)

    def _metrics(self, name: str, values: list[float], speeds: dict[str, list[float]]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if name != LORA and LORA in speeds:
            metrics["ratio"] = interval([own / lora for own, lora in zip(values, speeds[LORA], strict=True)])
        metrics["tokens_per_s"] = interval(values)
        if self._device.type == "cuda":
            metrics["peak_memory_bytes"] = max(self._peaks[name])
            peak = peak_flops(torch.cuda.get_device_name(self._device))
            if peak is not None:
                flops = flops_per_token(self._shape, self._sizes.train_length, self._trained[name])
                metrics["mfu"] = interval([value * flops / peak for value in values])
        return metrics

    def _speed(self, name: str, run: Callable[[], float]) -> float:
        """Run a training, and note its peak memory: what it allocates beyond its model's weights, and these."""
        before = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        with MemoryWatch() as watch:
            speed = run()
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self._base.parameters())
        self._peaks.setdefault(name, []).append(watch.peak - before + weights + 4 * self._trained[name])
        return speed

    def _step_runner(self, name: str) -> Callable[[], float]:
        """Return a function that trains for some steps and returns their tokens per second."""
        torch.manual_seed(SEED + 2)
        if name == BOUND:
            return partial(self._run_bound, shared_copy(self._base))
        if name == LORA:
            peft = peft_lora(shared_copy(self._base), self._sizes)
            self._trained[name] = parameter_count(peft)
            return partial(self._run_trainer, peft)
        backbone = wrap(shared_copy(self._base))
        values = {"kind": "lora", "capacity": self._sizes.capacity}
        if name != OURS_LORA:
            values = {"kind": "neutral-residues", "capacity": self._sizes.capacity, "gate_init": "random"}
        config = graft_config(values)
        model = GraftedModel(backbone, {"graft": build_graft(config, backbone)})
        self._trained[name] = parameter_count(model)
        return partial(self._run_ours, model, name == COMPILED)

    def _run_bound(self, model: PreTrainedModel) -> float:
        forward_and_backward(model, self._ids)
        start = self._now()
        for _ in range(self._sizes.train_steps):
            forward_and_backward(model, self._ids)
        return self._sizes.train_steps * self._tokens / (self._now() - start)

    def _run_trainer(self, model: nn.Module) -> float:
        """Train with transformers' Trainer; the first step is not timed, as in our loop."""
        on_gpu = self._device.type == "cuda"
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=1 + self._sizes.train_steps,
                per_device_train_batch_size=self._sizes.train_rows,
                learning_rate=1e-4,
                optim="adamw_torch_fused" if on_gpu else "adamw_torch",
                bf16=self._sizes.dtype == "bfloat16",
                use_cpu=not on_gpu,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=SEED,
            )
            clock = StepClock(self._now)
            rows = [{"input_ids": row, "labels": row} for row in self._ids.cpu()]
            trainer = Trainer(model=model, args=arguments, train_dataset=RepeatedRows(rows), callbacks=[clock])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            model.zero_grad()
        return self._sizes.train_steps * self._tokens / (clock.last - clock.first)

    def _run_ours(self, model: GraftedModel, compiles: bool) -> float:
        config = TrainingConfig(
            steps=1 + self._sizes.train_steps,
            batch_size=self._sizes.train_rows,
            learning_rate=1e-4,
            precision="bf16" if self._sizes.dtype == "bfloat16" else "fp32",
            compile=compiles,
            keep_checkpoints=0,
            seed=SEED,
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            summary = train(model, SameRows(self._ids), config, folder, progress=False, resume=False)
        return summary.tokens_per_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def forward_and_backward(model: Any, ids: Tensor) -> None:
    """Compute the gradients of all activations of a frozen model, row by row in its output layer.

    Args:
        model: a causal model of transformers.
        ids: (B, T) token ids.
    """
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    leaves = hidden.detach().requires_grad_()
    for row, targets in zip(leaves, ids, strict=True):
        logits = model.get_output_embeddings()(row[:-1])
        loss = functional.cross_entropy(logits.float(), targets[1:], reduction="sum")
        (loss / ids.numel()).backward()
    hidden.backward(leaves.grad)


class StepClock(TrainerCallback):
    """Notes the time after the first and after the last step of a Trainer.

    Args:
        now: returns the time, once the device has done its work.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.first = 0.0
        self.last = 0.0

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time of the first and the last step."""
        if state.global_step == 1:
            self.first = self._now()
        if state.global_step == state.max_steps:
            self.last = self._now()


class RepeatedRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same rows again and again, as a data set of the Trainer.

    Args:
        rows: the rows of a batch.
    """

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return 1000 * len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self._rows[number % len(self._rows)]


class SameRows:
    """The same batch in every step of our loop; one row in ten, and at least one, is old text.

    Args:
        ids: (B, T) token ids.
    """

    def __init__(self, ids: Tensor) -> None:
        rows = ids.cpu()
        labels = rows.clone()
        labels[:, 0] = -100
        domain = torch.ones(len(rows), dtype=torch.long)
        domain[: max(1, len(rows) // 10)] = 0
        self.batch_size = len(rows)
        self._batch = Batch(input_ids=rows, labels=labels, attention_mask=None, position_ids=None, domain=domain)

    def batch(self, step: int) -> Batch:
        """Return the batch."""
        return self._batch

    def fingerprint(self) -> str:
        """Return a name, since the batch never changes."""
        return "the same rows"

    def state_dict(self) -> dict[str, object]:
        """Return no position."""
        return {}

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns no position."""
        return dict

    def load_state_dict(self, state: object) -> None:
        """Do nothing."""

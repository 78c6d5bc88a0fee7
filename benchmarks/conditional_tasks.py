"""What conditional tasks cost: a training step, choosing its rows by uncertainty, and serving twenty tasks at once.

    python benchmarks/conditional_tasks.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

What is compared runs in one process, turn by turn, in rounds of alternating order, so that whatever else the machine
does falls on both sides of a ratio. A row's `ratio` is the median over rounds, its interval the smallest and the
largest. The encoder is a random BERT of MiniLM's size: what is timed does not depend on what its weights say.
"""

from __future__ import annotations

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
from transformers import AutoModel, BertConfig, BertModel
from turns import AT_MOST, Clock, Turns, command, made_aim, rounds, seconds

from composition import ratios
from graftlm.artifact import load_graft, save_graft
from graftlm.backbone import Backbone, load_backbone
from graftlm.evaluation import Metric, Results, Row, value_of
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.grafts.heads import TaskSpec, uncertainty
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer

NAME = "bench-conditional-tasks"
OFF: dict[str, Any] = {"attention": "none", "alignment": False, "norm": False, "bottleneck": "none"}
ROWS = {  # row id -> label, aim of its ratio
    "train_step": ("a training step with all modules, over one with none", (AT_MOST, 1.25)),
    "selection": ("choosing a batch by uncertainty, over training on it", (AT_MOST, 0.35)),
    "serve_20_tasks": ("rows per second of 20 tasks in a batch, over PEFT's mixed batches of LoRA", None),
}
# Passes through all layers that a step takes at least: forward; backward to activations and to weights of the upper
# half; and, where a module stands before the first layer, backward to activations of the lower half.
NONE, ALL = 1 + 2 / 2, 1 + 2 / 2 + 1 / 2
HOW = {
    "train_step": "forward, loss, backward and AdamW of eight tasks' rows; on both sides the upper half of the layers "
    "and the heads train. ratio_half_precision: with bfloat16 autocast. bound: by the layers that both compute, as the "
    "alignment stands before the first one. parameters: those trained",
    "selection": "the pass over b rows of each of eight tasks, without gradients, in batches of b, and their "
    "uncertainties, over the step that trains on b. ratio_one_task: over b rows alone. bound: by the layers "
    "that both compute, backward passes to weights and to activations counted as one each",
    "serve_20_tasks": "the peer: one LoRA of rank 8 on query and value for each task, chosen row by row by "
    "adapter_names, and the same heads. ratio_one_task: a batch of one task on both sides. memory_ratio: bytes of "
    "weights of the encoder with one graft, over those of 20 fine-tuned encoders. load_ratio: seconds of loading "
    "encoder and graft from a folder, over loading 20 fine-tuned encoders, from memory that the system has them in",
}


@dataclass(frozen=True)
class Size:
    """How large the encoder and the work are."""

    width: int = 384
    ffn: int = 1536
    layers: int = 6
    heads: int = 12
    vocabulary: int = 30_522
    tasks: int = 8
    served: int = 20
    labels: int = 10
    rows: int = 16
    length: int = 32
    train_rounds: int = 11
    select_rounds: int = 7
    serve_rounds: int = 11
    load_rounds: int = 3


QUICK = Size(64, 128, 2, 4, 512, tasks=3, served=4, rows=4, length=8, train_rounds=3, select_rounds=3, serve_rounds=3)


class BackboneEvaluator:
    """Random encoders and batches of one size."""

    def __init__(self, size: Size, device: torch.device, clock: Clock) -> None:
        self.size, self.device = size, device
        self._clock: Clock = clock

    def encoder(self) -> BertModel:
        """A random encoder, the same each time."""
        s = self.size
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=s.vocabulary,
            hidden_size=s.width,
            intermediate_size=s.ffn,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
        )
        return BertModel(config).to(self.device).eval()  # type: ignore[arg-type]  # hidden by a wrapper

    def grafted(self, tasks: int, **changes: Any) -> GraftedModel:
        """An encoder with a graft for so many tasks, its zeros filled so that nothing is computed for free."""
        backbone = Backbone.wrap(self.encoder(), name="a random BERT", kind="encoder")
        torch.manual_seed(1)
        graft = build_graft(graft_config(self.config(tasks) | changes), backbone)
        with torch.no_grad():
            for parameter in graft.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return GraftedModel(backbone, {"graft": graft})

    def config(self, tasks: int) -> dict[str, Any]:
        """Of a graft with all modules."""
        return {"kind": "conditional-tasks", "tasks": {f"task{n}": self.spec.model_dump() for n in range(tasks)}}

    @property
    def spec(self) -> TaskSpec:
        """What every head says."""
        return TaskSpec(type="classification", labels=[f"label {n}" for n in range(self.size.labels)])

    def batch(self, tasks: int) -> dict[str, Any]:
        """Rows of so many tasks in turn."""
        s, draw = self.size, torch.Generator().manual_seed(2)
        ids = torch.randint(5, s.vocabulary, (s.rows, s.length), generator=draw)
        mask = torch.ones_like(ids)
        task = torch.arange(s.rows) % tasks
        return {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device), "extras": {"task": task}}

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes."""
        return seconds(work, self.device, self._clock)


class Training:
    """Training of one model, step by step on one batch."""

    def __init__(self, bench: BackboneEvaluator, half: bool = False, **changes: Any) -> None:
        self.model = bench.grafted(bench.size.tasks, **changes).train()
        parameters = self.model.trainable_parameters()
        self.parameters = sum(parameter.numel() for parameter in parameters.values())
        self.optimiser = make_optimizer(parameters, TrainingConfig(steps=1, learning_rate=1e-5))
        self.batch = bench.batch(bench.size.tasks)
        self.targets = [torch.tensor(n % bench.size.labels) for n in range(bench.size.rows)]
        self.half = half

    def step(self) -> None:
        """One update."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.half):
            loss = self.model(**self.batch, targets=self.targets).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def measure_training(bench: BackboneEvaluator) -> tuple[dict[str, Any], dict[str, Metric]]:
    """Seconds of a step with all modules and with none, in both precisions; and the row."""
    sides = {
        f"{name}{suffix}": Training(bench, half, **changes)
        for half, suffix in ((False, ""), (True, "_half_precision"))
        for name, changes in (("all", {}), ("none", OFF))
    }
    taken = rounds({name: partial(bench.seconds, one.step) for name, one in sides.items()}, bench.size.train_rounds)
    parameters = {name: sides[name].parameters for name in ("all", "none")}
    return {"seconds": taken, "parameters": parameters}, {
        "ratio": ratios(taken["all"], taken["none"]),
        "ratio_half_precision": ratios(taken["all_half_precision"], taken["none_half_precision"]),
        "bound": ALL / NONE,
    }


def measure_selection(bench: BackboneEvaluator) -> tuple[dict[str, Any], dict[str, Metric]]:
    """Seconds of a step, and of the pass that chooses its rows; and the row."""
    trained, s = Training(bench), bench.size
    specs = [bench.spec] * s.rows

    @torch.no_grad()
    def score(times: int) -> None:
        trained.model.eval()
        for _ in range(times):
            uncertainty(trained.model.predict(**trained.batch), specs)
        trained.model.train()

    turns = {"step": trained.step, "selection": partial(score, s.tasks), "one_task": partial(score, 1)}
    taken = rounds({name: partial(bench.seconds, turn) for name, turn in turns.items()}, s.select_rounds)
    return {"seconds": taken}, {
        "ratio": ratios(taken["selection"], taken["step"]),
        "ratio_one_task": ratios(taken["one_task"], taken["step"]),
        "bound": s.tasks / ALL,
    }


class Lora(nn.Module):
    """PEFT's way: an encoder with one LoRA a task, chosen row by row, and a head a task."""

    def __init__(self, bench: BackboneEvaluator, tasks: int) -> None:
        super().__init__()
        config = LoraConfig(r=8, target_modules=["query", "value"], init_lora_weights=False)
        self.encoder: Any = get_peft_model(bench.encoder(), config, adapter_name="task0")
        for task in range(1, tasks):
            self.encoder.add_adapter(f"task{task}", config)
        self.heads = nn.ModuleList(nn.Linear(bench.size.width, bench.size.labels) for _ in range(tasks))
        self.to(bench.device).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, extras: dict[str, Tensor]) -> list[Tensor]:
        """Each row's prediction."""
        task = extras["task"].tolist()
        names = [f"task{one}" for one in task]
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, adapter_names=names)[0]
        return [self.heads[one](row) for one, row in zip(task, hidden[:, 0], strict=True)]


def measure_serving(bench: BackboneEvaluator) -> tuple[dict[str, Any], dict[str, Metric]]:
    """Seconds of a batch, bytes of weights, seconds of loading; and the row."""
    served = bench.size.served
    ours, peer = bench.grafted(served).eval(), Lora(bench, served)
    turns: dict[str, Callable[[], object]] = {}
    for name, tasks in (("mixed", served), ("one_task", 1)):
        batch = bench.batch(tasks)
        turns |= {f"ours_{name}": partial(ours.predict, **batch), f"peer_{name}": partial(peer, **batch)}
    with torch.inference_mode():
        taken = rounds({name: partial(bench.seconds, turn) for name, turn in turns.items()}, bench.size.serve_rounds)
    encoder = bench.encoder()
    one, fine_tuned = weight_bytes(ours), served * (weight_bytes(encoder) + weight_bytes(peer.heads[0]))
    loading = measure_loading(bench, ours)
    memory = {"ours": one, "peer": weight_bytes(peer), "fine_tuned": fine_tuned, "encoder": weight_bytes(encoder)}
    added = {"ours": count(ours.grafts["graft"]), "peer": count(peer) - count(encoder)}
    return {"seconds": taken, "bytes": memory, "loading_seconds": loading, "added_parameters": added}, {
        "ratio": ratios(taken["peer_mixed"], taken["ours_mixed"]),
        "ratio_one_task": ratios(taken["peer_one_task"], taken["ours_one_task"]),
        "memory_ratio": one / fine_tuned,
        "load_ratio": ratios(loading["ours"], loading["fine_tuned"]),
    }


def measure_loading(bench: BackboneEvaluator, model: GraftedModel) -> Turns:
    """Seconds of loading encoder and graft, and of loading as many encoders as there are tasks."""
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

        turns = {"ours": ours, "fine_tuned": fine_tuned}
        return rounds({name: partial(bench.seconds, turn) for name, turn in turns.items()}, bench.size.load_rounds)


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """All rows."""
    size = QUICK if quick else Size()
    bench = BackboneEvaluator(size, device, clock)
    measured = {
        "train_step": measure_training(bench),
        "selection": measure_selection(bench),
        "serve_20_tasks": measure_serving(bench),
    }
    rows = [Row(id=name, label=ROWS[name][0], metrics=metrics) for name, (_, metrics) in measured.items()]
    aims = [
        made_aim(label, "ratio", aim, None if quick else value_of(measured[name][1]["ratio"]))
        for name, (label, aim) in ROWS.items()
        if aim is not None
    ]
    details = {"how": HOW, "size": asdict(size), "clock": clock, "threads": torch.get_num_threads()}
    details |= {name: found for name, (found, _) in measured.items()}
    return Results.here(NAME, rows, aims=aims, details=details)


if __name__ == "__main__":
    command(NAME, "Conditional tasks.", benchmark, {name: aim and aim[1] for name, (_, aim) in ROWS.items()})

"""The decoding rows of the GPU benchmark: tokens per second of `generate`, compiled and eager, beside the bare model.

The bare model and one variant take turns. Compiled steps use a static cache and CUDA graphs: ours as `GraftedModel`
chooses them, others with the same options.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from gpu_models import FFN, SEED, Measured, Sizes, expert_configs, random_ids, random_llama, shared_copy, wrap
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from turns import Turns, in_order, interval, seconds

from graftlm.backbone import Backbone, compiled_decoding
from graftlm.errors import first_line
from graftlm.evaluation import Metric, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.grafts.base import FitsOnText
from graftlm.grafts.baselines.method import rank_for
from graftlm.grafts.composition import Composition, CompositionConfig
from neutral_residues import hold, open_share

BARE = "bare"
LABELS = {
    BARE: "the bare model",
    "neutral_closed": "neutral residues with closed gates",
    "neutral_open": "neutral residues with open gates",
    "lora": "LoRA of PEFT, not merged",
    "lora_merged": "LoRA of PEFT, merged",
    "adapter": "plain adapters",
    "routing_4": "four routed experts",
    "composition": "a composition with a small model",
}
GATE_BIAS = {"neutral_closed": -10.0, "neutral_open": 10.0}
VARIANTS = ("neutral", "lora", "lora_merged", "adapter", "routing_4", "composition")
MODES = ("compiled", "eager")
DYNAMO: dict[str, Any] = {
    "automatic_dynamic_shapes": False,  # fixed shapes, as the first call gets them
    "recompile_limit": 64,  # models of one class share their code
    "fail_on_recompile_limit_hit": True,  # instead of running eagerly without a word
}
Generate = Callable[..., Any]
Turn = Callable[[], float]


def row_id(variant: str, rows: int, model: str) -> str:
    """Return the id of a row; that of the 1B model is the plain one."""
    suffix = "" if model == "1b" else f"_{model}"
    return f"decode_{variant}_{rows}{suffix}"


class Decoding:
    """A bare model, and the variants that are compared with it, at one number of rows.

    All variants are built at once, because a graft that is attached later would make torch forget the compiled code of
    the bare model.

    Args:
        sizes: the sizes.
        model: name of the backbone's shape.
        rows: number of rows that are decoded together.
        variants: the variants, of `VARIANTS`.
        device: the device.
    """

    def __init__(self, sizes: Sizes, model: str, rows: int, variants: tuple[str, ...], device: torch.device) -> None:
        self._sizes = sizes
        self._name = model
        self._rows = rows
        self._device = device
        self._shape = sizes.models[model]
        self._base = random_llama(self._shape, sizes.dtype, device)
        ids = random_ids(self._shape, rows, sizes.prompt, device)
        self._inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self._modes = MODES if sizes.compiles else MODES[1:]
        self._bare = plain_generate(shared_copy(self._base))
        self._built: dict[str, tuple[Generate, Graft | None] | Exception] = {}
        for variant in variants:
            try:
                self._built[variant] = self._build(variant)
            except Exception as error:  # it is raised when the variant is measured
                self._built[variant] = error

    def measure(self, variant: str) -> Measured:
        """Measure a variant beside the bare model."""
        built = self._built.pop(variant)
        if isinstance(built, Exception):
            raise built
        generate, graft = built
        problems: dict[str, str] = {}
        details: dict[str, Any] = {}
        speeds: dict[str, Turns] = {}
        for mode in self._modes:
            turns = {BARE: partial(self._speed, self._bare, mode)} | self._turns(variant, generate, graft, mode)
            with torch._dynamo.config.patch(**DYNAMO):
                ready = self._warm_up(turns, mode, problems, details)
                if len(ready) > 1 and BARE in ready:
                    count = self._sizes.compiled_rounds if mode == "compiled" else self._sizes.eager_rounds
                    speeds[mode] = alternate(ready, count)
        details["tokens_per_s"] = {mode: dict(turns) for mode, turns in speeds.items()}
        if graft is not None and variant == "neutral":
            details["open_share"] = self._open_shares(generate, graft)
        return Measured(self._measured_rows(variant, speeds), problems, details)

    def _turns(
        self, variant: str, generate: Generate, graft: Graft | None, mode: str
    ) -> dict[str, Callable[[], float]]:
        """Return the turns of a variant, of which neutral residues have one for each state of their gates."""
        if variant != "neutral":
            return {variant: partial(self._speed, generate, mode)}
        assert graft is not None
        turns: dict[str, Turn] = {}
        for state, bias in GATE_BIAS.items():
            turns[state] = partial(self._speed, generate, mode, partial(hold, graft, bias))
        return turns

    def _warm_up(
        self,
        turns: Mapping[str, Turn],
        mode: str,
        problems: dict[str, str],
        details: dict[str, Any],
    ) -> dict[str, Turn]:
        """Run each turn once, and return those that work."""
        ready = {}
        graphs = 0
        for name, turn in turns.items():
            before = _compilation()
            duration = seconds_of(turn, self._device, problems, f"{self._id(name)}, {mode}")
            change = {key: value - before[key] for key, value in _compilation().items()}
            graphs += 0 if name == BARE else change["graphs"]
            if duration is not None:
                ready[name] = turn
                details[f"warm_up_{mode}_{name}"] = {"seconds": duration, **change}
            if mode == "compiled" and name not in (BARE, "lora_merged") and graphs == 0:
                problems.setdefault(
                    f"{self._id(name)}, {mode}", "its steps ran code that was compiled for the bare model."
                )
                ready.pop(name, None)
        return ready

    def _speed(self, generate: Generate, mode: str, set_gates: Callable[[], None] | None = None) -> float:
        """Return the new tokens per second of a batch, the prompt's pass included."""
        if set_gates is not None:
            set_gates()
        work = partial(
            generate,
            mode,
            **self._inputs,
            max_new_tokens=self._sizes.new,
            do_sample=False,
            pad_token_id=0,
        )
        return self._rows * self._sizes.new / seconds(work, self._device)

    def _measured_rows(self, variant: str, speeds: Mapping[str, Turns]) -> list[Row]:
        names = [BARE, *GATE_BIAS] if variant == "neutral" else [variant]
        rows = []
        for name in names:
            metrics = self._metrics(name, speeds)
            if metrics:
                count = f"{self._rows} row" if self._rows == 1 else f"{self._rows} rows"
                label = f"{LABELS[name]}, {count}, {self._name.upper()}"
                rows.append(Row(id=self._id(name), label=label, metrics=metrics))
        return rows

    def _metrics(self, name: str, speeds: Mapping[str, Turns]) -> dict[str, Metric]:
        """Return the ratio and the speed of each mode in which a turn was measured."""
        metrics: dict[str, Metric] = {}
        for mode, turns in speeds.items():
            suffix = "" if mode == "compiled" else f"_{mode}"
            if name in turns:
                if name != BARE:
                    pairs = zip(turns[name], turns[BARE], strict=True)
                    metrics[f"ratio{suffix}"] = interval([own / bare for own, bare in pairs])
                metrics[f"tokens{suffix}_per_s"] = interval(turns[name])
        return metrics

    def _id(self, name: str) -> str:
        return row_id(name, self._rows, self._name)

    def _build(self, variant: str) -> tuple[Generate, Graft | None]:
        """Return the function that generates with a variant, and its graft if it is one of ours."""
        torch.manual_seed(SEED + 2)
        if variant == "lora":
            peft = peft_lora(shared_copy(self._base), self._sizes)
            return plain_generate(peft.to(getattr(torch, self._sizes.dtype)).eval()), None
        if variant == "lora_merged":
            merged = peft_lora(copy.deepcopy(self._base), self._sizes).merge_and_unload()
            return plain_generate(merged.eval()), None
        backbone = wrap(shared_copy(self._base))
        graft = self._graft(variant, backbone).eval()
        model = GraftedModel(backbone, {"graft": graft}).eval()
        model.compiles_decoding = True
        return grafted_generate(model), graft

    @torch.no_grad()
    def _graft(self, variant: str, backbone: Backbone) -> Graft:
        """Return a graft whose output matrices are random instead of zero."""
        sizes = self._sizes
        if variant == "composition":
            config = CompositionConfig.parse({"augmenting": {"specialist": {"name": "in memory"}}})
            specialist = wrap(random_llama(sizes.specialist, sizes.dtype, self._device, SEED + 3))
            graft: Graft = Composition(config, backbone, augmenting={"specialist": specialist})
        else:
            configs = {
                "neutral": {"kind": "neutral-residues", "capacity": sizes.capacity, "init": "he"},
                "adapter": {"kind": "adapter", "capacity": sizes.capacity},
                "routing_4": {"kind": "token-routing", "experts": expert_configs(self._shape.vocabulary)},
            }
            graft = build_graft(graft_config(configs[variant]), backbone)
        if isinstance(graft, FitsOnText):
            graft.fit({})
        if variant != "routing_4":  # whose centroids stay in float32
            graft.to(backbone.model.dtype)
        for name, parameter in graft.named_parameters():
            if name.endswith("w_o.weight"):
                parameter.normal_(0, 0.02)
        return graft

    def _open_shares(self, generate: Generate, graft: Graft) -> dict[str, Any]:
        """Return the share of open gates in each state, which shows that they are held."""
        shares: dict[str, Any] = {}
        for state, bias in GATE_BIAS.items():
            hold(graft, bias)
            shares[state] = open_share(generate.args[0], self._inputs["input_ids"])
        return shares


def plain_generate(model: Any) -> Generate:
    """Return a function that generates with a model of transformers or PEFT, with our options of compiled steps."""

    def generate(mode: str, **options: Any) -> None:
        if mode == "compiled":
            options |= _compiled_options(model, options)
        model.generate(**options)

    return generate


def grafted_generate(model: GraftedModel) -> Generate:
    """Return a function that generates with a grafted model, which compiles its steps unless it may not."""
    return partial(_generate_grafted, model)


def _generate_grafted(model: GraftedModel, mode: str, **options: Any) -> None:
    if mode == "compiled":
        _compiled_options(model, options)
        model.generate(**options)
    else:
        model.generate(**options, disable_compile=True)


def _compiled_options(model: PreTrainedModel, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of compiled steps.

    Raises:
        RuntimeError: the step of the model is no single graph, so that it would silently run eagerly.
    """
    compiled = compiled_decoding(model, options, wanted=True)
    if not compiled:
        raise RuntimeError("the decode step is not one graph, so it is not compiled")
    return compiled


def peft_lora(model: PreTrainedModel, sizes: Sizes) -> Any:
    """Return a model with an untrained LoRA of PEFT on all Linears of its FFNs, of the benchmark's capacity."""
    rank = rank_for(sizes.capacity, wrap(model))
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(FFN), task_type="CAUSAL_LM")
    peft: Any = get_peft_model(model, config)
    return peft


def alternate(turns: Mapping[str, Turn], count: int) -> Turns:
    """Run turns that are warm in rounds of alternating order."""
    measured: Turns = {name: [] for name in turns}
    for number in range(count):
        for name in in_order(turns, number):
            measured[name].append(turns[name]())
    return measured


def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    problems: dict[str, str],
    name: str,
) -> float | None:
    """Return the seconds of work. If it fails, note the problem under its name and return None."""
    try:
        return seconds(work, device)
    except Exception as error:  # out of memory, a failing compiler, a missing kernel: the other turns go on
        problems[name] = sentence(error)
        return None


def sentence(error: Exception) -> str:
    """Return an error as one sentence."""
    return f"{type(error).__name__}: {first_line(error)}."


def parameter_count(module: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _compilation() -> dict[str, int]:
    """Return how many graphs were compiled, how often a graph broke, and how often CUDA graphs were left out."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cuda_graph_skips": counters["inductor"]["cudagraph_skips"],
    }

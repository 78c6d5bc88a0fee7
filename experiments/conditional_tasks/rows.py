"""The rows of the experiment: modules and samplers, their controls and rivals, and the table of each row."""

from __future__ import annotations

from typing import Any

TABLES = ("1", "rivals", "uncertainty", "samplers", "few", "rows", "probe")
TRAINED = "trained"
"""The table of rows that are trained to convergence. It has its own data, seeds and results."""
OFF: dict[str, Any] = {
    "attention": "none",
    "alignment": False,
    "norm": False,
    "bottleneck": "none",
    "lora_rank": 0,
}
FINE_TUNING = {**OFF, "frozen": 0}
ALL = {
    **OFF,
    "attention": "blocks",
    "alignment": True,
    "norm": True,
    "bottleneck": "base",
}
EVERYWHERE = "cln_all_layers"
FASTER = "cln_all_layers_faster"
LORA = "lora_per_task"
UNIFORM = (EVERYWHERE, FASTER, LORA)  # the modules that are combined only with uniform sampling
MODULES: dict[str, dict[str, Any]] = {
    "none": OFF,
    "attention": {**OFF, "attention": "blocks"},
    "bottleneck": {**OFF, "bottleneck": "base"},
    "alignment": {**OFF, "alignment": True},
    "cln": {**OFF, "norm": True},
    "all": ALL,
    EVERYWHERE: {**OFF, "norm": True, "modulated": 1.0},
    FASTER: {**OFF, "norm": True, "modulated": 1.0, "module_rate": 3.0},
    # With this rank the LoRAs are as large as all modules.
    LORA: {**OFF, "frozen": 1.0, "modulated": 1.0, "lora_rank": 3, "module_rate": 3.0},
}
NAMES = {"none": "multi_task", "all": "ca_mtl"}  # names of rows that differ from the names of their modules
SAMPLERS = ("uniform", "uncertainty")
OTHER_SAMPLERS = ("size", "temperature", "entropy")  # combined only with no modules
# Controls whose modules do not depend on the task, and how modules are chosen instead.
CONTROLS = {
    "cln_one_vector": ("cln", "first"),
    f"{EVERYWHERE}_one_vector": (EVERYWHERE, "first"),
    "lora_by_row": (LORA, "row"),
}
RIVALS: dict[str, dict[str, Any]] = {
    "adapters": {"form": "bottleneck", "frozen": 1},
    "adapters_half": {"form": "bottleneck"},
    "lora": {"form": "lora", "shared": True, "frozen": 1},
    "lora_rank3": {"form": "lora", "shared": True, "frozen": 1, "inner": 3},
    "hyper": {"form": "hyper", "frozen": 1},
}
PLAIN = {"heads": {**OFF, "frozen": 1}, "all_layers": FINE_TUNING}  # rows without modules
FEW: dict[str, tuple[str, dict[str, Any]]] = {
    "few_added": ("added to a trained graft: what is its own trains", {"adapts": "added"}),
    "few_whole": ("added to a trained graft: the whole model trains", {"adapts": "all"}),
    "few_finetune": ("fine-tuning of the encoder", FINE_TUNING),
}
SIMILAR = ("multi_task", "ca_mtl")


def cell_id(modules: str, sampler: str) -> str:
    """Return the row of a combination of modules and sampler.

    The name without a sampler means uniform sampling, except for ca_mtl, which samples by uncertainty as published.
    """
    default = "uncertainty" if modules == "all" else "uniform"
    name = NAMES.get(modules, modules)
    return name if sampler == default else f"{name}_{sampler}"


CELLS = {
    cell_id(modules, sampler): (modules, sampler)
    for modules in MODULES
    for sampler in SAMPLERS
    if modules not in UNIFORM or sampler == "uniform"
}
MODULE_LABELS = {
    "none": "multi-task fine-tuning, half the layers frozen",
    "attention": "conditional attention",
    "bottleneck": "conditional bottleneck",
    "alignment": "conditional alignment",
    "cln": "conditional layer norm",
    "all": "all modules",
    EVERYWHERE: "conditional layer norm in the frozen layers as well",
    FASTER: "conditional layer norm in all layers, at the rate of LoRA",
    LORA: "a LoRA for each task, frozen encoder",
}
BLIND = {"first": "one vector for all tasks", "row": "but chosen by the row's tokens"}
LABELS = {
    "single_task": "single-task fine-tuning, one model each",
    **{row: f"{MODULE_LABELS[modules]}, {sampler}" for row, (modules, sampler) in CELLS.items()},
    **{f"multi_task_{sampler}": f"{MODULE_LABELS['none']}, {sampler}" for sampler in OTHER_SAMPLERS},
    **{row: f"{MODULE_LABELS[modules]}, {BLIND[by]}, uniform" for row, (modules, by) in CONTROLS.items()},
    "adapters": "adapters, parallel bottleneck, frozen encoder",
    "adapters_half": "the same adapters, upper half trained as well",
    "lora": "one LoRA for all tasks, frozen encoder",
    "lora_rank3": "one LoRA of rank 3 for all tasks, frozen encoder",
    "hyper": "adapters that a hypernetwork makes, frozen encoder",
    "heads": "heads alone, the encoder as it is",
    "all_layers": "multi-task fine-tuning of all layers",
}


def table_of(row: str) -> str:
    """Return the table of a row."""
    if row.removeprefix("multi_task_") in OTHER_SAMPLERS:
        return "samplers"
    if row in ("adapters", "hyper", "lora_rank3", "lora_by_row", FASTER, *PLAIN):
        return "rivals"
    if row in ("attention_uncertainty", "bottleneck_uncertainty", "alignment_uncertainty"):
        return "uncertainty"
    return "1"

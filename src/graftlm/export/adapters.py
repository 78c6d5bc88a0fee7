"""Export a backbone with adapters next to its FFNs, as a model with its own code."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from graftlm.backbone import Backbone, Site
from graftlm.backbone.families import Family, Sublayer
from graftlm.backbone.modules import is_norm, linear_sizes
from graftlm.errors import ArtifactError
from graftlm.export.code import copy_module, is_own, model_classes, save_unchanged, write_config
from graftlm.grafts import ExportedAdapter
from graftlm.version import __version__

TEMPLATE_MODULE = "modeling_grafted"
"""Name of the file with the code of a backbone with adapters."""

_TEMPLATE = Path(__file__).with_name("model_template.py")
_TEMPLATE_WITH_NORM = Path(__file__).with_name("residue_template.py")
_REMEDY = "load it with graftlm, or serve it with graft serve."


def save_with_adapters(adapter: ExportedAdapter, backbone: Backbone, folder: Path) -> None:
    """Write the backbone with adapters as weights, config and code.

    Args:
        adapter: the module that is parallel to each FFN.
        backbone: the backbone.
        folder: an existing folder.

    Raises:
        ArtifactError: the backbone is not a causal language model, has no FFNs to which adapters can be added, or has
            unknown code.
        OSError: the folder can't be written.
    """
    model = backbone.model
    _check_backbone(backbone)
    state = _state_with_adapters(adapter, backbone)
    save_unchanged(model, folder, state_dict=state, save_original_format=False)
    code = _fill_template(adapter, backbone, folder)
    (folder / f"{TEMPLATE_MODULE}.py").write_text(code, encoding="utf-8")
    names = [f"Grafted{cls.__name__}" for cls in model_classes(model)]
    write_config(
        folder,
        [f"{TEMPLATE_MODULE}.{name}" for name in names],
        architectures=[names[-1]],
        adapter_width=adapter.width,
        model_type=f"grafted_{_identifier(backbone.sites.model_type)}",
    )


def _check_backbone(backbone: Backbone) -> None:
    """Raise `ArtifactError` if the template can't describe a backbone with adapters."""
    ffn = backbone.sites.family.ffn
    ends = {_end_of_ffn(backbone, layer) for layer in range(backbone.sites.n_layers)}
    has_known_code = all(
        cls.__module__.startswith("transformers.") or is_own(cls) for cls in model_classes(backbone.model)
    )
    if backbone.kind != "causal-lm":
        problem = f"is loaded as {backbone.kind}, but a causal language model is expected"
    elif len(ends) > 1:
        problem = "normalizes what its FFN writes in some layers only"
    elif "other" in ends:
        problem = f"has no module that computes its FFN alone ({ffn.entry} to {ffn.exit}), where an adapter fits"
    elif not has_known_code:
        problem = "has code that is neither transformers' nor GraftLM's"
    else:
        return
    raise ArtifactError(f"This {backbone.sites.model_type} model {problem}, so the graft can't be exported: {_REMEDY}")


def _state_with_adapters(adapter: ExportedAdapter, backbone: Backbone) -> dict[str, Tensor]:
    """Return the weights of the backbone, with those of its FFNs under their new names, and of the adapters."""
    family = backbone.sites.family
    layers = f"{backbone.model.base_model_prefix}.{family.layers}"
    state: dict[str, Tensor] = {}
    for name, tensor in backbone.model.state_dict().items():
        state[moved_path(name, backbone)] = tensor
    for layer, tensors in enumerate(adapter.tensors):
        for name, tensor in tensors.items():
            state[f"{layers}.{layer}.{family.ffn.entry}.adapter.{name}"] = tensor
    return state


def moved_path(path: str, backbone: Backbone) -> str:
    """Return the path that a module or weight of a backbone has in the exported model with adapters."""
    family = backbone.sites.family
    layers = f"{backbone.model.base_model_prefix}.{family.layers}"
    in_layer = re.match(rf"{re.escape(layers)}\.\d+\.", path)
    if in_layer is None:
        return path
    return in_layer[0] + _moved_in_layer(path[in_layer.end() :], backbone)


def _moved_in_layer(path: str, backbone: Backbone) -> str:
    """Return the path that a module or weight of a layer has in the exported layer with an adapter."""
    ffn = backbone.sites.family.ffn
    wrapped = {ffn.entry: "ffn"}
    if _end_of_ffn(backbone) == "norm":
        wrapped[ffn.exit] = "norm"
    for module, name in wrapped.items():
        if path == module or path.startswith(f"{module}."):
            return f"{module}.{name}{path.removeprefix(module)}"
    return path


def _end_of_ffn(backbone: Backbone, layer: int = 0) -> Literal["itself", "norm", "other"]:
    """Return where the FFN of a layer ends: at the one module that it is, at a norm after this, or elsewhere."""
    entry, end = backbone.sites.module(Site("ffn", layer))
    if entry is end:
        return "itself"
    is_one_module = linear_sizes(entry) is None and end not in set(entry.modules())
    return "norm" if is_one_module and is_norm(end) else "other"


def _fill_template(adapter: ExportedAdapter, backbone: Backbone, folder: Path) -> str:
    """Return the code of the exported model, made from the template. Code of GraftLM's own models is copied."""
    family = backbone.sites.family
    classes = model_classes(backbone.model)
    config_name, base_name, model_name = [cls.__name__ for cls in classes]
    code = _TEMPLATE.read_text(encoding="utf-8")
    _, _, code = code.partition('"""\n\n')  # drops the template's docstring
    code = _replace_names(
        code,
        {
            "LlamaConfig": config_name,
            "LlamaForCausalLM": model_name,
            "LlamaModel": base_name,
            "grafted_llama": f"grafted_{_identifier(backbone.sites.model_type)}",
            "layer.mlp": f"layer.{family.ffn.entry}",
            "self.layers": f"self.{family.layers}",
            "self.model": f"self.{backbone.model.base_model_prefix}",
        },
    )
    code = _replace_section(code, r"(?:^from transformers\.models\.llama.*\n)+", _imports(classes, folder))
    code = _replace_section(code, _class_pattern("Adapter"), adapter.source.strip() + "\n")
    ends_at_norm = _end_of_ffn(backbone) == "norm"
    if ends_at_norm:
        code = _with_norm(code, family.ffn)
    code = _replace_section(code, r"    adapter_width: int = 64\n", _plans(adapter, classes[0], backbone))
    code = _replace_section(code, r"    graft_sites = \{\}\n", _graft_sites(backbone))
    ffn = "norm(FFN(x))" if ends_at_norm else "FFN(x)"
    lines = [
        f'"""{model_name} with an adapter next to every FFN.',
        "",
        f"{ffn} + adapter(x) replaces {ffn}; all other code is that of the original model.",
        f"Exported by GraftLM {__version__}. Needs torch and transformers only.",
        '"""',
        "",
        code,
    ]
    return "\n".join(lines)


def _with_norm(code: str, ffn: Sublayer) -> str:
    """Return the code with adapters whose outputs are added after the norm of their FFNs.

    Args:
        code: the code of adapters that are added to the output of their FFNs.
        ffn: the FFN of a layer, which ends at a norm.
    """
    _, _, classes = _TEMPLATE_WITH_NORM.read_text(encoding="utf-8").partition("class FFNWithAdapter")
    code = _replace_section(code, _class_pattern("FFNWithAdapter"), f"class FFNWithAdapter{classes}")
    ffn_line = f"            layer.{ffn.entry} = FFNWithAdapter(layer.{ffn.entry}, config)\n"
    norm_line = f"            layer.{ffn.exit} = NormWithAdapter(layer.{ffn.exit})\n"
    return _replace_section(code, re.escape(ffn_line), ffn_line + norm_line)


def _replace_names(code: str, names: dict[str, str]) -> str:
    """Replace names of the template, alone or after the prefix `Grafted`, in one pass."""
    alternatives = "|".join(re.escape(name) for name in names)
    pattern = rf"(?<![A-Za-z_.])(Grafted)?({alternatives})\b"

    def replacement(match: re.Match[str]) -> str:
        prefix, name = match.groups(default="")
        return prefix + names[name]

    return re.sub(pattern, replacement, code)


def _replace_section(code: str, pattern: str, text: str) -> str:
    """Replace the single match of a pattern."""
    result, count = re.subn(pattern, lambda _: text, code, flags=re.MULTILINE)
    assert count == 1, f"the template has {count} sections {pattern}"
    return result


def _class_pattern(name: str) -> str:
    """Return the pattern of the code of a module's class."""
    return rf"^class {name}\(nn\.Module\):\n(?:.+\n|\n(?=    ))*"


def _identifier(model_type: str) -> str:
    return re.sub(r"\W", "_", model_type)


def _imports(classes: list[type], folder: Path) -> str:
    """Return the imports of a model's classes."""
    modules: dict[str, list[str]] = defaultdict(list)
    for cls in classes:
        module = f".{copy_module(cls.__module__, folder)}" if is_own(cls) else cls.__module__
        modules[module].append(cls.__name__)
    lines = [f"from {module} import {', '.join(sorted(names))}\n" for module, names in modules.items()]
    return "".join(lines)


def _plans(adapter: ExportedAdapter, config: type, backbone: Backbone) -> str:
    """Return the fields of the config: its plans of parallel computation, and the width of the adapters.

    Args:
        adapter: the exported adapter.
        config: the class of the backbone's config.
        backbone: the backbone.
    """
    family = backbone.sites.family
    layers = f"{family.layers}.*."
    adapter_plan = {f"{layers}{family.ffn.entry}.adapter.{key}": value for key, value in adapter.parallel.items()}
    lines = []
    for name, additions in (("base_model_tp_plan", adapter_plan), ("base_model_ep_plan", {})):
        plan = getattr(config, name, None)
        if not plan:
            continue
        moved = {}
        for key, value in plan.items():
            in_layer = key.removeprefix(layers)
            moved[key if in_layer == key else layers + _moved_in_layer(in_layer, backbone)] = value
        lines.append(f"    {name} = {{\n")
        for key, value in (moved | additions).items():
            lines.append(f'        "{key}": "{value}",\n')
        lines.append("    }\n")
    lines.append(f"    adapter_width: int = {adapter.width}\n")
    return "".join(lines)


def _graft_sites(backbone: Backbone) -> str:
    """Return the class attribute with the fields of the exported model's `Family`, as code."""
    family = backbone.sites.family
    moved = replace(
        family,
        ffn_in=tuple(_moved_in_layer(path, backbone) for path in family.ffn_in),
        ffn_out=_moved_in_layer(family.ffn_out, backbone),
        norms=tuple(_moved_in_layer(path, backbone) for path in family.norms),
    )
    defaults = Family.__dataclass_fields__
    lines = ["    graft_sites = {\n"]
    for key, value in asdict(moved).items():
        if value != defaults[key].default:
            lines.append(f"        {key!r}: {value!r},\n")
    lines.append("    }\n")
    return "".join(lines)

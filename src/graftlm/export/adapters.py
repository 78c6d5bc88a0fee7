"""Export a backbone with adapters next to its FFNs, as a model with its own code."""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.backbone.families import Family
from graftlm.errors import ArtifactError, first_line
from graftlm.export.code import copy_module, is_own, model_classes, save_unchanged, write_config
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import ExportedAdapter, ExportsAdapter, Graft
from graftlm.version import __version__

_TEMPLATE = Path(__file__).with_name("model_template.py")
_MODULE = "modeling_grafted"
_REMEDY = "load it with graftlm, or serve it with graft serve."

_RELATIVE_ERROR = 1e-4
"""Largest difference of logits, relative to the largest logit, that counts as rounding in float32."""


def save_with_adapters(graft: Graft, backbone: Backbone, folder: Path) -> None:
    """Write the backbone with a graft's adapters as weights, config and code, and verify the written model.

    The model is loaded again, and its logits for a short prompt are compared with those of the grafted model.

    Args:
        graft: a detached graft of a kind that is `ExportsAdapter`.
        backbone: the backbone that it was trained on.
        folder: an existing folder.

    Raises:
        ArtifactError: the backbone is not a causal language model, has no FFNs to which adapters can be added, or has
            unknown code; or the saved model can't be loaded, or computes other logits than the grafted model.
        OSError: the folder can't be written.
    """
    assert isinstance(graft, ExportsAdapter)
    adapter = graft.exported_adapter(backbone)
    model = backbone.model
    _check_backbone(backbone)
    state = _state_with_adapters(adapter, backbone)
    save_unchanged(model, folder, state_dict=state, save_original_format=False)
    code = _fill_template(adapter, backbone, folder)
    (folder / f"{_MODULE}.py").write_text(code, encoding="utf-8")
    names = [f"Grafted{cls.__name__}" for cls in model_classes(model)]
    write_config(
        folder,
        [f"{_MODULE}.{name}" for name in names],
        architectures=[names[-1]],
        adapter_width=adapter.width,
        model_type=f"grafted_{_identifier(backbone.sites.model_type)}",
    )
    difference = _difference(folder, graft, backbone)
    if difference:
        raise ArtifactError(
            f"The exported {backbone.sites.model_type} model does not reproduce the grafted model ({difference}): "
            f"{_REMEDY}"
        )


def _check_backbone(backbone: Backbone) -> None:
    """Raise `ArtifactError` if the template can't describe a backbone with adapters."""
    ffn = backbone.sites.family.ffn
    has_known_code = all(
        cls.__module__.startswith("transformers.") or is_own(cls) for cls in model_classes(backbone.model)
    )
    if backbone.kind != "causal-lm":
        problem = f"is loaded as {backbone.kind}, but a causal language model is expected"
    elif ffn.exit not in ("", ffn.entry):
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
    ffn_prefix = re.compile(rf"^{re.escape(layers)}\.\d+\.{re.escape(family.ffn.entry)}\.")
    state: dict[str, Tensor] = {}
    for name, tensor in backbone.model.state_dict().items():
        state[ffn_prefix.sub(r"\g<0>ffn.", name)] = tensor
    for layer, tensors in enumerate(adapter.tensors):
        for name, tensor in tensors.items():
            state[f"{layers}.{layer}.{family.ffn.entry}.adapter.{name}"] = tensor
    return state


def _fill_template(adapter: ExportedAdapter, backbone: Backbone, folder: Path) -> str:
    """Return the code of the exported model, made from the template. Code of GraftLM's own models is copied."""
    family = backbone.sites.family
    classes = model_classes(backbone.model)
    config_name, base_name, model_name = [cls.__name__ for cls in classes]
    ffn_pattern = f"{family.layers}.*.{family.ffn.entry}"

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
    code = _replace_section(code, r"^class Adapter\(nn\.Module\):\n(?:.+\n|\n(?=    ))*", adapter.source.strip() + "\n")
    code = _replace_section(code, r"    adapter_width: int = 64\n", _plans(adapter, classes[0], ffn_pattern))
    code = _replace_section(code, r"    graft_sites = \{\}\n", _graft_sites(family))
    lines = [
        f'"""{model_name} with an adapter next to every FFN.',
        "",
        "FFN(x) + adapter(x) replaces FFN(x); all other code is that of the original model.",
        f"Exported by GraftLM {__version__}. Needs torch and transformers only.",
        '"""',
        "",
        code,
    ]
    return "\n".join(lines)


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


def _plans(adapter: ExportedAdapter, config: type, ffn: str) -> str:
    """Return the fields of the config: its plans of parallel computation, and the width of the adapters.

    Args:
        adapter: the exported adapter.
        config: the class of the backbone's config.
        ffn: pattern of the FFNs' paths in the plans.
    """
    adapter_plan = {f"{ffn}.adapter.{key}": value for key, value in adapter.parallel.items()}
    lines = []
    for name, additions in (("base_model_tp_plan", adapter_plan), ("base_model_ep_plan", {})):
        plan = getattr(config, name, None)
        if not plan:
            continue
        moved = {re.sub(rf"^{re.escape(ffn)}(?=\.|$)", f"{ffn}.ffn", key): value for key, value in plan.items()}
        lines.append(f"    {name} = {{\n")
        for key, value in (moved | additions).items():
            lines.append(f'        "{key}": "{value}",\n')
        lines.append("    }\n")
    lines.append(f"    adapter_width: int = {adapter.width}\n")
    return "".join(lines)


def _graft_sites(family: Family) -> str:
    """Return the class attribute with the fields of the exported model's `Family`, as code."""
    ffn_prefix = re.compile(rf"^{re.escape(family.ffn.entry)}\.")
    moved = replace(
        family,
        ffn_in=tuple(ffn_prefix.sub(r"\g<0>ffn.", path) for path in family.ffn_in),
        ffn_out=ffn_prefix.sub(r"\g<0>ffn.", family.ffn_out),
    )
    defaults = Family.__dataclass_fields__
    lines = ["    graft_sites = {\n"]
    for key, value in asdict(moved).items():
        if value != defaults[key].default:
            lines.append(f"        {key!r}: {value!r},\n")
    lines.append("    }\n")
    return "".join(lines)


@torch.no_grad()
def _difference(folder: Path, graft: Graft, backbone: Backbone) -> str:
    """Describe the difference between the logits of the saved and of the grafted model, or the error at loading.

    Returns:
        A clause; empty if the logits are equal except for rounding.
    """
    vocabulary = backbone.config.get_text_config().vocab_size
    ids = torch.arange(1, 6, device=backbone.device)[None] * vocabulary // 6
    bare = backbone.bare_model(input_ids=ids, use_cache=False).logits
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = model.eval()(input_ids=ids).logits
    try:
        saved = _load_saved(folder).to(backbone.device)
        logits = saved(input_ids=ids, use_cache=False).logits
    except Exception as error:  # The code of a model may raise anything.
        return first_line(error)
    gap = (logits - expected).abs().max()
    largest = expected.abs().max()
    effect = (bare - expected).abs().max()
    rounding = max(_RELATIVE_ERROR, 16 * torch.finfo(expected.dtype).eps)
    is_equal = gap <= _RELATIVE_ERROR * largest
    is_rounding = gap <= rounding * largest and gap <= effect / 4  # Without the graft the gap would be `effect`.
    if is_equal or is_rounding:
        return ""
    return f"logits differ by {gap:.2g} where the largest is {largest:.2g}, and the graft changes them by {effect:.2g}"


def _load_saved(folder: Path) -> nn.Module:
    """Load an exported model, and remove the copy of its code that transformers makes in its cache."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    module = sys.modules[type(saved).__module__]
    # The module's name begins with transformers_modules and the name of the copy's folder, which may have subfolders.
    depth = len(module.__name__.split("."))
    code = Path(str(module.__file__))
    shutil.rmtree(code.parents[depth - 3])
    return saved

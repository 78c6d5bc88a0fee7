"""The code of an exported model: modelling files beside its weights, which need torch and transformers alone."""

from __future__ import annotations

import ast
import copy
import json
import re
import shutil
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.backbone.families import Family
from graftlm.errors import ArtifactError, first_line
from graftlm.grafts.base import ExportedAdapter, ExportsAdapter, Graft
from graftlm.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEM, _OWN = "modeling_grafted", "graftlm"
_TEMPLATE = Path(__file__).with_name("grafted_model.txt")
_REMEDY = "load it with graftlm, or serve it with graft serve."
_PLANS = ("base_model_tp_plan", "base_model_ep_plan")
_NOT_COPIED = ("model_type", "architectures", "auto_map", "_name_or_path", "quantization_config")


def copy_code(model: PreTrainedModel, folder: Path) -> bool:
    """Copy the code of a model that is GraftLM's own into the folder of its weights; returns whether it is."""
    if not _is_own(type(model)):
        return False
    heads = {"AutoModel": type(model.base_model), "AutoModelForCausalLM": type(model)}
    classes = {"AutoConfig": type(model.config), **heads}
    auto_map = {auto: f"{_copied(cls.__module__, folder)}.{cls.__name__}" for auto, cls in classes.items()}
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"auto_map": auto_map}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return True


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith(f"{_OWN}.")


def _copied(module: str, folder: Path) -> str:
    """Copy a module of GraftLM, and those that it imports, side by side into a folder; returns its new name."""
    name, spec = module.rpartition(".")[2], find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    path = folder / f"{name}.py"
    if path.exists():
        return name
    source = Path(spec.origin).read_text(encoding="utf-8")
    path.write_text(re.sub(rf"(?m)^from {_OWN}\.(?:\w+\.)*(\w+) import", r"from .\1 import", source), encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{_OWN}."):
            _copied(str(node.module), folder)
    return name


def save_with_adapters(graft: Graft, backbone: Backbone, folder: Path) -> None:
    """Write the backbone with a graft's adapters: weights, config and modelling file; then load and compare them.

    Raises:
        ArtifactError: the backbone has no place for adapters, or the saved model does not compute what the graft does.
    """
    assert isinstance(graft, ExportsAdapter)
    adapter = graft.exported_adapter(backbone)
    (folder / f"{_STEM}.py").write_text(_modelling_file(adapter, backbone, folder), encoding="utf-8")
    with _imported(folder) as module:
        model_class = getattr(module, f"Grafted{type(backbone.model).__name__}")
        try:
            _built(model_class, adapter, backbone).save_pretrained(folder)
            difference = _difference(model_class.from_pretrained(folder), graft, backbone)
        except (OSError, ArtifactError):
            raise
        except Exception as error:  # whatever a model's code raises
            difference = first_line(error)
    if difference:
        raise ArtifactError(
            f"A {backbone.sites.model_type} model with adapters in a file does not compute what the graft computes "
            f"({difference}): {_REMEDY}"
        )


def _modelling_file(adapter: ExportedAdapter, backbone: Backbone, folder: Path) -> str:
    model, sites = backbone.model, backbone.sites
    classes: dict[str, type] = {"config": type(model.config), "base": type(model.base_model), "model": type(model)}
    names = {key: cls.__name__ for key, cls in classes.items()}
    ffn, problem = sites.family.ffn, ""
    if backbone.kind != "causal-lm":
        problem = f"is loaded as {backbone.kind}, and a causal language model is expected"
    elif ffn.exit not in ("", ffn.entry):
        problem = f"has no module that computes its FFN alone ({ffn.entry} to {ffn.exit}), beside which an adapter fits"
    elif not all(cls.__module__.startswith("transformers.") or _is_own(cls) for cls in classes.values()):
        problem = "has its own code, which is neither transformers' nor GraftLM's"
    if problem:
        raise ArtifactError(f"This {sites.model_type} model {problem}, so the graft can't be exported: {_REMEDY}")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        **names,
        adapter=adapter.source.strip(),
        ffn=ffn.entry,
        imports="\n".join(_imports(classes.values(), folder)),
        layers=sites.family.layers,
        model_type=re.sub(r"\W", "_", sites.model_type),
        plans=_plans(adapter, classes["config"], f"{sites.family.layers}.*.{ffn.entry}"),
        prefix=model.base_model_prefix,
        sites=_sites(sites.family),
        version=__version__,
        width=adapter.width,
    )


def _imports(classes: Any, folder: Path) -> list[str]:
    """The lines that import a model's classes; code of GraftLM's own is copied into the folder."""
    modules = defaultdict(list)
    for cls in classes:
        modules[f".{_copied(cls.__module__, folder)}" if _is_own(cls) else cls.__module__].append(cls.__name__)
    return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items())]


def _plans(adapter: ExportedAdapter, config: Any, ffn: str) -> str:
    """The config's plans of parallel computation for the FFNs in their new place, and for the adapters."""
    lines, own = [], {f"{ffn}.adapter.{key}": value for key, value in adapter.parallel.items()}
    for name in _PLANS:
        if plan := getattr(config, name, None):
            moved = {re.sub(rf"^{re.escape(ffn)}(?=\.|$)", f"{ffn}.ffn", key): value for key, value in plan.items()}
            values = moved | (own if name == _PLANS[0] else {})
            lines += [f"    {name} = {{", *(f'        "{key}": "{value}",' for key, value in values.items()), "    }"]
    return "".join(f"{line}\n" for line in lines)


def _sites(family: Family) -> str:
    """The lines of the family's row for the model with adapters, by which GraftLM finds its parts as a backbone's."""
    entry = re.compile(rf"^{re.escape(family.ffn.entry)}\.")
    *ffn_in, ffn_out = (entry.sub(r"\g<0>ffn.", path) for path in (*family.ffn_in, family.ffn_out))
    row, defaults = asdict(replace(family, ffn_in=tuple(ffn_in), ffn_out=ffn_out)), Family.__dataclass_fields__
    lines = [f"        {key!r}: {value!r},\n" for key, value in row.items() if value != defaults[key].default]
    return "".join(lines).replace("'", '"')


@contextmanager
def _imported(folder: Path) -> Iterator[ModuleType]:
    """The folder's modelling file as a module, which no other import finds and which leaves no files."""
    package = ModuleType(f"_exported_{uuid.uuid4().hex}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    try:
        yield import_module(f"{package.__name__}.{_STEM}")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
            del sys.modules[name]
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def _built(model_class: Any, adapter: ExportedAdapter, backbone: Backbone) -> PreTrainedModel:
    """The model of the modelling file, on the very tensors of backbone and graft."""
    model, sites = backbone.model, backbone.sites
    values = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_COPIED}
    config = model_class.config_class.from_dict(values | {"adapter_width": adapter.width})
    heads = {"AutoModel": f"Grafted{type(model.base_model).__name__}", "AutoModelForCausalLM": model_class.__name__}
    classes = {"AutoConfig": type(config).__name__, **heads}
    config.auto_map = {auto: f"{_STEM}.{name}" for auto, name in classes.items()}
    with torch.device("meta"):
        grafted = model_class(config)
    path = f"{model.base_model_prefix}.{sites.family.layers}"
    ffn = re.compile(rf"^({re.escape(path)}\.\d+\.{re.escape(sites.family.ffn.entry)})\.")
    state = {ffn.sub(r"\1.ffn.", name): tensor for name, tensor in model.state_dict().items()}
    for layer, tensors in enumerate(adapter.tensors):
        state |= {f"{path}.{layer}.{sites.family.ffn.entry}.adapter.{name}": t for name, t in tensors.items()}
    grafted.load_state_dict(state, assign=True)
    grafted.generation_config = copy.deepcopy(model.generation_config)
    return grafted


@torch.no_grad()
def _difference(saved: Any, graft: Graft, backbone: Backbone) -> str:
    """How far five tokens' logits of the saved model are from the grafted one's, if it is more than rounding."""
    from graftlm.grafts.model import GraftedModel

    size = backbone.config.get_text_config().vocab_size
    ids = torch.arange(1, 6, device=backbone.device)[None] * size // 6
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected: Tensor = model.eval()(input_ids=ids).logits
    actual: Tensor = saved.to(backbone.device).eval()(input_ids=ids, use_cache=False).logits
    gap, scale = (actual - expected).abs().max(), expected.abs().max()
    rounding = max(1e-4, 16 * torch.finfo(expected.dtype).eps)
    return "" if gap <= rounding * scale else f"logits differ by {gap:.2g} where the largest is {scale:.2g}"

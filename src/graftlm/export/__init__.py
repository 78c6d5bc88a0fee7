"""A graft as a plain model: a folder that transformers loads where graftlm is not installed.

Where transformers lacks the architecture, its code lies beside the weights, and needs torch and transformers alone.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.backbone.families import Family
from graftlm.errors import ArtifactError, first_line
from graftlm.files.writing import staged_folder
from graftlm.grafts import Exportable, ExportedAdapter, ExportsAdapter, Graft
from graftlm.version import __version__

_CARD = Template(Path(__file__).with_name("card.txt").read_text(encoding="utf-8"))
_STEM, _OWN = "modeling_grafted", "graftlm"
_TEMPLATE = Path(__file__).with_name("grafted_model.txt")
_REMEDY = "load it with graftlm, or serve it with graft serve."


def export_graft(graft: Graft, backbone: Backbone, folder: str | Path) -> Path:
    """Write the backbone with a graft as one model that needs transformers alone, with its tokenizer and a card.

    Args:
        graft: the graft, detached; its kind must be `Exportable` or `ExportsAdapter`.
        backbone: the backbone that it was trained on, which stays as it is.
        folder: a new or empty folder.

    Raises ArtifactError if a plain model can't express the graft, the backbone is quantised or has an adapter of its
    own, or the folder holds other files or can't be written, and WrongBackboneError if the graft was built for another
    backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    if not isinstance(graft, Exportable | ExportsAdapter):
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} adds modules that {type(backbone.model).__name__} of transformers"
            " lacks: load it with graftlm, or serve it with graft serve."
        )
    if any(isinstance(module, BaseTunerLayer) for module in backbone.model.modules()):
        raise ArtifactError(
            "The backbone carries a PEFT adapter, which would not be in the exported model: merge it first "
            "(merge_and_unload)."
        )
    if any(type(weight.data) is not Tensor or weight.is_quantized for weight in backbone.model.parameters()):
        raise ArtifactError(
            "The backbone is quantised, and a graft can't be added to packed weights: load the backbone without "
            "quantisation."
        )
    with _new_model(Path(folder), backbone, f"a graft of the kind {graft.config.kind}") as draft:
        if isinstance(graft, Exportable):
            model = graft.merged(backbone)
            model.save_pretrained(draft)
            copy_code(model, draft)
        else:
            save_with_adapters(graft, backbone, draft)
    return Path(folder)


def export_model(backbone: Backbone, folder: str | Path) -> Path:
    """Write a model of one of GraftLM's own architectures with its code, so that it needs transformers alone.

    Raises ArtifactError if the model is one of transformers', or the folder holds other files or can't be written.
    """
    with _new_model(Path(folder), backbone, "the code of its architecture") as draft:
        save_unchanged(backbone.model, draft)
        if not copy_code(backbone.model, draft):
            raise ArtifactError(
                f"{backbone.name} is a {backbone.sites.model_type} model of transformers, which loads without graftlm "
                "as it is: name the folder of a graft."
            )
    return Path(folder)


@contextmanager
def _new_model(folder: Path, backbone: Backbone, content: str) -> Iterator[Path]:
    """Yield the draft of a model's folder; tokenizer and card are added at the end, when all of it takes its place."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is not an empty folder, so it is left alone: name a new one.")
    model = type(backbone.model)
    for name in (backbone.model.config.architectures or ()) if _is_own(model) else ():
        if name != model.__name__:  # its head was not loaded
            problem = f"and only {model.__name__} can be exported: load it where graftlm is installed."
            raise ArtifactError(f"{backbone.name} holds a {name}, {problem}")
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            yield draft
            if backbone.tokenizer is not None:
                backbone.tokenizer.save_pretrained(draft)
            values = {"name": backbone.name, "content": content, "loader": type(backbone.model).__name__, "option": ""}
            if any(draft.glob("*.py")):
                values |= {"loader": "AutoModelForCausalLM", "option": ", trust_remote_code=True"}
            (draft / "README.md").write_text(_CARD.substitute(values), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The model could not be written to {folder} ({first_line(error)}): free space or name another folder."
        ) from error


def save_unchanged(model: Any, folder: Path, **options: Any) -> None:
    """Write a model by transformers, which notes class and dtype in its config: in a copy."""
    model = copy.copy(model)
    model.config = copy.deepcopy(model.config)
    model.save_pretrained(folder, **options)


def copy_code(model: Any, folder: Path) -> bool:
    """Copy the code of a model that is GraftLM's own into the folder of its weights; returns whether it is."""
    if not _is_own(type(model)):
        return False
    _write_config(folder, [f"{_copied(cls.__module__, folder)}.{cls.__name__}" for cls in _classes(model)])
    return True


def _classes(model: Any) -> list[type]:
    return [type(model.config), type(model.base_model), type(model)]


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith(f"{_OWN}.")


def _copied(module: str, folder: Path) -> str:
    """Copy a module of GraftLM, and those that it imports, side by side into a folder; returns its new name."""
    name, spec = module.rpartition(".")[2], find_spec(module)
    assert spec is not None and spec.origin is not None, "it is imported already"  # noqa: PT018  # one fact
    path = folder / f"{name}.py"
    if not path.exists():
        source = Path(spec.origin).read_text(encoding="utf-8")
        flat = re.sub(rf"(?m)^from {_OWN}\.(?:\w+\.)*(\w+) import", r"from .\1 import", source)
        path.write_text(flat, encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{_OWN}."):
                _copied(str(node.module), folder)
    return name


def _write_config(folder: Path, classes: Iterable[str], **changes: Any) -> None:
    """Name the classes of config, base model and model in `config.json`, and change further keys."""
    path = folder / "config.json"
    auto_map = dict(zip(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), classes, strict=True))
    values = json.loads(path.read_text(encoding="utf-8")) | {"auto_map": auto_map} | changes
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_with_adapters(graft: Graft, backbone: Backbone, folder: Path) -> None:
    """Write the backbone with a graft's adapters: weights, config and modelling file; then load and compare them.

    Raises ArtifactError if the backbone has no place for adapters, or the saved model computes something else.
    """
    assert isinstance(graft, ExportsAdapter)
    adapter, model, family = graft.exported_adapter(backbone), backbone.model, backbone.sites.family
    values = _values(adapter, backbone, folder)
    layers = f"{model.base_model_prefix}.{family.layers}"
    ffn = re.compile(rf"^{re.escape(layers)}\.\d+\.{re.escape(family.ffn.entry)}\.")
    state = {ffn.sub(r"\g<0>ffn.", name): tensor for name, tensor in model.state_dict().items()}
    for layer, tensors in enumerate(adapter.tensors):
        state |= {f"{layers}.{layer}.{family.ffn.entry}.adapter.{name}": tensor for name, tensor in tensors.items()}
    save_unchanged(model, folder, state_dict=state, save_original_format=False)
    code = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    (folder / f"{_STEM}.py").write_text(code, encoding="utf-8")
    names = [f"Grafted{cls.__name__}" for cls in _classes(model)]
    changes = {"adapter_width": adapter.width, "model_type": f"grafted_{values['model_type']}"}
    _write_config(folder, [f"{_STEM}.{name}" for name in names], architectures=names[-1:], **changes)
    if difference := _difference(folder, graft, backbone):
        raise ArtifactError(
            f"A {backbone.sites.model_type} model with adapters in a file does not compute what the graft computes "
            f"({difference}): {_REMEDY}"
        )


def _values(adapter: ExportedAdapter, backbone: Backbone, folder: Path) -> dict[str, Any]:
    """What the template is filled with; the code of a model of GraftLM's own is copied into the folder."""
    model, family, model_type = backbone.model, backbone.sites.family, backbone.sites.model_type
    ffn, classes, problem = family.ffn, _classes(model), ""
    if backbone.kind != "causal-lm":
        problem = f"is loaded as {backbone.kind}, and a causal language model is expected"
    elif ffn.exit not in ("", ffn.entry):
        problem = f"has no module that computes its FFN alone ({ffn.entry} to {ffn.exit}), beside which an adapter fits"
    elif not all(cls.__module__.startswith("transformers.") or _is_own(cls) for cls in classes):
        problem = "has its own code, which is neither transformers' nor GraftLM's"
    if problem:
        raise ArtifactError(f"This {model_type} model {problem}, so the graft can't be exported: {_REMEDY}")
    modules = defaultdict(list)
    for cls in classes:
        modules[f".{_copied(cls.__module__, folder)}" if _is_own(cls) else cls.__module__].append(cls.__name__)
    lines = {"imports": [f"from {module} import {', '.join(sorted(names))}" for module, names in modules.items()]}
    lines |= {"plans": _plans(adapter, classes[0], f"{family.layers}.*.{ffn.entry}"), "sites": _sites(family)}
    names = dict(zip(("config", "base", "model"), (cls.__name__ for cls in classes), strict=True))
    values = {"adapter": adapter.source.strip(), "ffn": ffn.entry, "layers": family.layers, "width": adapter.width}
    values |= {"model_type": re.sub(r"\W", "_", model_type), "prefix": model.base_model_prefix, "version": __version__}
    return names | values | {name: "".join(f"{line}\n" for line in own) for name, own in lines.items()}


def _plans(adapter: ExportedAdapter, config: Any, ffn: str) -> list[str]:
    """The config's plans of parallel computation for the FFNs in their new place, and for the adapters."""
    lines, own = [], {f"{ffn}.adapter.{key}": value for key, value in adapter.parallel.items()}
    for name, adapters in (("base_model_tp_plan", own), ("base_model_ep_plan", {})):
        if plan := getattr(config, name, None):
            moved = {re.sub(rf"^{re.escape(ffn)}(?=\.|$)", f"{ffn}.ffn", key): value for key, value in plan.items()}
            entries = [f'        "{key}": "{value}",' for key, value in (moved | adapters).items()]
            lines += [f"    {name} = {{", *entries, "    }"]
    return lines


def _sites(family: Family) -> list[str]:
    """The lines of the family's row for the model with adapters, by which GraftLM finds its parts as a backbone's."""
    entry = re.compile(rf"^{re.escape(family.ffn.entry)}\.")
    *ffn_in, ffn_out = (entry.sub(r"\g<0>ffn.", path) for path in (*family.ffn_in, family.ffn_out))
    row, defaults = asdict(replace(family, ffn_in=tuple(ffn_in), ffn_out=ffn_out)), Family.__dataclass_fields__
    return [f"        {key!r}: {value!r}," for key, value in row.items() if value != defaults[key].default]


@torch.no_grad()
def _difference(folder: Path, graft: Graft, backbone: Backbone) -> str:
    """How far five tokens' logits of the saved model are from the grafted one's, if it is more than rounding."""
    from transformers import AutoModelForCausalLM

    from graftlm.grafted.model import GraftedModel

    ids = torch.arange(1, 6, device=backbone.device)[None] * backbone.config.get_text_config().vocab_size // 6
    bare = backbone.bare_model(input_ids=ids, use_cache=False).logits
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = model.eval()(input_ids=ids).logits
    try:
        saved: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        saved.to(backbone.device)
        parts, file = type(saved).__module__.split("."), Path(str(sys.modules[type(saved).__module__].__file__))
        shutil.rmtree(file.parents[len(parts) - 3])  # transformers' copy of the code: all but its cache's own package
        gap, largest = (saved(input_ids=ids, use_cache=False).logits - expected).abs().max(), expected.abs().max()
    except Exception as error:  # whatever a model's code raises
        return first_line(error)
    rounding, effect = max(1e-4, 16 * torch.finfo(expected.dtype).eps), (bare - expected).abs().max()
    if gap <= 1e-4 * largest or (gap <= rounding * largest and gap <= effect / 4):  # without the graft it is `effect`
        return ""
    return f"logits differ by {gap:.2g} where the largest is {largest:.2g}, and the graft changes them by {effect:.2g}"

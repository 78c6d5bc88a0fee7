"""The verb that writes grafts as models, as GGUF files, or as adapters of PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graftlm.cli.common import print_result
from graftlm.cli.inputs import AsJson, BackboneName, Changes, Device, Trust, argument, flag, option
from graftlm.errors import ArtifactError, GraftError

if TYPE_CHECKING:
    from graftlm.backbone import Backbone


Server = Literal["vllm"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]


@dataclass(frozen=True)
class _Source:
    """Where the backbone of grafts comes from, and what the export is for.

    Attributes:
        name: name or folder of the backbone; None for the one that a graft records.
        device: torch device.
        trust_remote_code: run model code that comes with the backbone.
        target: the server that the export is for.
    """

    name: str | None
    device: str | None
    trust_remote_code: bool
    target: Server | None

    def load(self, graft: Path) -> Backbone:
        """Return the backbone of a graft, or the model in its place."""
        from graftlm.store.artifact import backbone_of

        return backbone_of(graft, self.name, device=self.device, trust_remote_code=self.trust_remote_code)


def export(
    graft: Annotated[
        list[str],
        argument("[NAME=]GRAFT...", "Folder of a graft, or a model of GraftLM or in a GGUF file."),
    ],
    to: Annotated[
        Path, option("PLACE", "New or empty folder for the model, or a new file FILE.gguf.", show_default=False)
    ],
    many: Annotated[
        bool,
        flag("--many", "Write adapters that one vLLM server holds together."),
    ] = False,
    mix: Annotated[
        list[str] | None,
        option("NAME=A:X+B:Y", "With --many: also this sum of grafts. Repeatable."),
    ] = None,
    to_peft: Annotated[bool, flag("--to-peft", "Write LoRA as an adapter of PEFT.")] = False,
    target: Annotated[Server | None, option("SERVER", "Refuse what this server can't run.", "--for")] = None,
    gguf_type: Annotated[
        GgufType | None,
        option("TYPE", "Weights of a GGUF file: f32, f16, bf16 or q8_0. By default those of the backbone."),
    ] = None,
    backbone: BackboneName = None,
    changes: Changes = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write grafts for transformers, vLLM, llama.cpp or PEFT."""
    _check_options(graft, changes, mix, many=many, to_peft=to_peft, target=target)
    is_file = _is_gguf(to, gguf_type, many=many, to_peft=to_peft, target=target)
    source = _Source(backbone, device, trust_remote_code, target)
    if is_file:
        (folder,) = named_grafts(graft).values()
        written = _export_file(folder, to, changes or (), source, gguf_type)
    elif many:
        written = _export_many(graft, to, mix or (), changes or (), source)
    else:
        (folder,) = named_grafts(graft).values()
        written = _export_one(folder, to, changes or (), source, to_peft=to_peft)
    print_result(
        {"file" if is_file else "folder": str(written)}, as_json=as_json, show=lambda: typer.echo(f"wrote {written}")
    )


def _check_options(
    grafts: Sequence[str],
    changes: Sequence[str] | None,
    mix: Sequence[str] | None,
    *,
    many: bool,
    to_peft: bool,
    target: Server | None,
) -> None:
    """Raise `GraftError` if options don't go together."""
    if to_peft and target is not None:
        raise GraftError("--for was given with --to-peft, but PEFT's adapters depend on no server: leave it out.")
    if many and to_peft:
        raise GraftError("--many and --to-peft were given, but one form is written: leave out one of them.")
    if mix and not many:
        raise GraftError("--mix adds to the adapters of --many, which was not given: add it, or leave --mix out.")
    if len(grafts) > 1 and not many:
        raise GraftError(
            f"{len(grafts)} grafts were given, but one is written as a model: add --many, or export them one by one."
        )
    if len(grafts) > 1 and changes:
        raise GraftError(
            "--set was given with several grafts, but it changes the config of one: export that graft alone, or train "
            "it with these keys."
        )


def _is_gguf(to: Path, gguf_type: GgufType | None, *, many: bool, to_peft: bool, target: Server | None) -> bool:
    """Return whether a GGUF file is written; raise `GraftError` if the options don't go together."""
    if to.suffix.lower() != ".gguf":
        if gguf_type is not None:
            raise GraftError(
                f"--gguf-type was given, but --to {to} names no GGUF file: name a file such as {to}.gguf, or leave "
                "--gguf-type out."
            )
        return False
    given = [name for name, value in (("--many", many), ("--to-peft", to_peft), ("--for", target)) if value]
    if given:
        raise GraftError(
            f"{' and '.join(given)} was given, but --to {to} names a GGUF file, which is one model for llama.cpp: name "
            f"a folder, or leave {' and '.join(given)} out."
        )
    return True


def _export_file(graft: Path, to: Path, changes: Sequence[str], source: _Source, gguf_type: GgufType | None) -> Path:
    """Write a graft that is merged into its backbone, or a model, as a GGUF file. Return the file."""
    from graftlm.export import export_gguf, export_model_gguf
    from graftlm.store.artifact import is_model, load_graft
    from graftlm.store.manifest import read_manifest

    if is_model(graft):
        _check_model_alone(graft, changes, source)
        return export_model_gguf(source.load(graft), to, weight_type=gguf_type)
    read_manifest(graft).check_alone(graft, "a GGUF file")
    loaded = source.load(graft)
    return export_gguf(load_graft(graft, loaded, changes), loaded, to, weight_type=gguf_type)


def _check_model_alone(model: Path, changes: Sequence[str], source: _Source, *, to_peft: bool = False) -> None:
    """Raise `ArtifactError` if options that are for grafts were given with a model."""
    values = (("--backbone", source.name), ("--set", changes), ("--to-peft", to_peft))
    given = " and ".join(name for name, value in values if value)
    if given:
        raise ArtifactError(f"{model} is a complete model, but {given} was given, which is for grafts: leave it out.")


def _export_one(
    graft: Path,
    to: Path,
    changes: Sequence[str],
    source: _Source,
    *,
    to_peft: bool,
) -> Path:
    """Write a graft, or a model that transformers can't load otherwise. Return the folder."""
    from graftlm.export import check_model, export_graft, export_model, export_peft
    from graftlm.store.artifact import is_model, load_graft
    from graftlm.store.manifest import read_manifest
    from graftlm.store.stages import load_model_of

    is_graft = not is_model(graft)
    if is_graft:
        if to_peft or changes:
            read_manifest(graft).check_alone(graft, "--to-peft" if to_peft else "--set")
    else:
        _check_model_alone(graft, changes, source, to_peft=to_peft)
        check_model(str(graft), trust_remote_code=source.trust_remote_code)
    loaded = source.load(graft)
    if not is_graft:
        return export_model(loaded, to, target=source.target)
    if to_peft or changes:
        own = load_graft(graft, loaded, changes)
    else:
        own = load_model_of(graft, loaded)
    if to_peft:
        return export_peft(own, loaded, to)
    return export_graft(own, loaded, to, target=source.target)


def _export_many(
    grafts: Sequence[str],
    to: Path,
    mix: Sequence[str],
    changes: Sequence[str],
    source: _Source,
) -> Path:
    """Write grafts of one backbone as adapters. Return the folder."""
    from graftlm.export import export_many
    from graftlm.store.artifact import is_model, load_graft
    from graftlm.store.manifest import read_manifest

    folders = named_grafts(grafts)
    mixtures = read_mixtures(mix)
    for folder in folders.values():
        if is_model(folder):
            raise ArtifactError(f"{folder} is a complete model, but --many writes grafts: name the folder of a graft.")
        read_manifest(folder).check_alone(folder, "an export")
    first = next(iter(folders.values()))
    loaded = source.load(first)
    own = {name: load_graft(folder, loaded, changes) for name, folder in folders.items()}
    return export_many(own, loaded, to, mixtures, target=source.target)


def named_grafts(texts: Sequence[str]) -> dict[str, Path]:
    """Return folders of grafts by name, from `[NAME=]DIR`. Without a name it is that of the folder or of its run.

    The folder of a run stands for the graft in it.

    Raises:
        GraftError: two folders have the same name.
    """
    from graftlm.store.names import name_of
    from graftlm.store.stages import chosen_graft

    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            name, folder = name_of(Path(text)), text
        if name in folders:
            raise GraftError(
                f"Both {folders[name]} and {folder} have the name {name}: give one another name, as in "
                f"{name}2={folder}."
            )
        folders[name] = chosen_graft(Path(folder))
    return folders


def read_mixtures(texts: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Return the weights of each mixture's grafts, from `NAME=A:X+B:Y`. A weight that is left out is 1.

    Raises:
        GraftError: a text has another form, a weight is wrong, or a name is not unique.
    """
    from graftlm.grafts.sums import read_term

    mixtures: dict[str, dict[str, float]] = {}
    for text in texts:
        name, _, sum_of_grafts = text.partition("=")
        weights: dict[str, float] = {}
        if not name or not sum_of_grafts:
            raise GraftError(f"--mix is {text!r}, but NAME=A:X+B:Y is expected, as in both=da:0.7+law:0.3.")
        for part in sum_of_grafts.split("+"):
            graft, weight = read_term(part)
            if graft in weights:
                raise GraftError(f"--mix {text} names {graft} twice: add up its weights.")
            weights[graft] = weight
        if name in mixtures:
            raise GraftError(f"--mix has the name {name} twice: give the mixtures different names.")
        mixtures[name] = weights
    return mixtures

"""Export several grafts of one backbone: a model that a server loads once, and an adapter of PEFT for each graft."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from string import Template
from typing import NamedTuple

from safetensors import SafetensorError

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError, first_line
from graftlm.export.adapters import save_with_adapters
from graftlm.export.added_rows import check_no_rows
from graftlm.export.carrier import Carrier
from graftlm.export.code import add_older_rope_keys
from graftlm.export.folder import check_new_folder, check_weights, export_plain, new_model
from graftlm.export.low_rank import Updates, largest_rank, write_peft
from graftlm.export.shared import SharedGraft, carrier_for, updates_of
from graftlm.export.verifying import verify_adapters
from graftlm.export.vllm import Server, check_server, vllm_variables
from graftlm.files.model_files import names_gguf_file
from graftlm.files.writing import staged_folder
from graftlm.grafts import Graft
from graftlm.grafts.sums import WEIGHT_RANGE, is_weight
from graftlm.store.names import GRAFT_NAME, NAME_RULE

CARRIER = "carrier"
"""Name of the folder of the carrier, and so of no graft."""
SETTINGS = "vllm.json"
"""Name of the file with vLLM's settings for the folder."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""
_CARD = Path(__file__).with_name("many_card.md")

Mixtures = Mapping[str, Mapping[str, float]]
"""By the name of each mixture, the weight of each graft."""


class VllmSettings(NamedTuple):
    """vLLM's settings for LoRA adapters.

    Attributes:
        max_lora_rank: the largest rank of an adapter.
        max_loras: number of adapters in one batch. One more than there are: with as many as there are, the CPU
            build of vLLM 0.32 lets an adapter act on rows of the bare model.
        target_modules: the last parts of the names of the modules that adapters change.
    """

    max_lora_rank: int
    max_loras: int
    target_modules: list[str]

    @classmethod
    def of(cls, entries: Collection[Updates]) -> VllmSettings:
        """Return the settings for the updates of some adapters."""
        rank = max(largest_rank(updates) for updates in entries)
        paths = {path for updates in entries for path in updates}
        return cls(
            max_lora_rank=next(allowed for allowed in RANKS if allowed >= rank),
            max_loras=len(entries) + 1,
            target_modules=sorted({path.rpartition(".")[2] for path in paths}),
        )

    def arguments(self, *, has_carrier: bool) -> list[str]:
        """Return the arguments of vLLM's server."""
        arguments = ["--trust-remote-code", "--model-impl", "transformers"] if has_carrier else []
        arguments += ["--enable-lora", "--max-loras", str(self.max_loras), "--max-lora-rank", str(self.max_lora_rank)]
        return [*arguments, "--lora-target-modules", *self.target_modules]


def export_many(
    grafts: Mapping[str, Graft],
    backbone: Backbone,
    folder: str | Path,
    mixtures: Mixtures | None = None,
    *,
    target: Server | None = None,
) -> Path:
    """Write grafts of one backbone so that one server of LoRA adapters, such as vLLM, serves them all.

    The folder gets an adapter of PEFT for each graft and each mixture; if a graft has adapters next to the FFNs, a
    carrier, which is the backbone with blank adapters; vLLM's settings; and a card with the command that serves it. A
    backbone of a GGUF file is written, too, since vLLM can't load it.
    Each graft's adapter is loaded again by PEFT, and its logits for a short text are compared with the graft's.

    Args:
        grafts: detached grafts by name, at least one.
        backbone: the backbone that they were trained on; it is left unchanged.
        folder: a new or empty folder.
        mixtures: further adapters by name, which are weighted sums of grafts.
        target: the server that the export is for, if it must run there.

    Returns:
        The folder.

    Raises:
        ArtifactError: a graft does something else than to add gated adapters or LoRA, an adapter computes something
            else than its graft, the backbone is quantized, or the folder contains files or can't be written.
        GraftError: a name can't be used, a mixture names an unknown graft, or a weight is not finite.
        WrongBackboneError: a graft was built for another backbone.
    """
    folder = Path(folder)
    chosen = checked_entries(grafts, mixtures or {})
    check_no_rows(backbone, "an adapter of PEFT for one server")
    check_weights(backbone)
    check_new_folder(folder)
    shared = {name: SharedGraft.of(name, graft, backbone) for name, graft in grafts.items()}
    carrier = carrier_for(list(chosen.values()), shared)
    if carrier is not None:
        check_server(backbone, target=target)
    entries = {name: updates_of(weights, shared, carrier, backbone) for name, weights in chosen.items()}
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            base = _absolute(backbone.name)
            if carrier is not None or names_gguf_file(backbone.name):
                base = CARRIER
                write_base(carrier, backbone, draft / base)
            for name, updates in entries.items():
                write_peft(updates, draft / name, base)
            verify_adapters(draft, draft / base if base == CARRIER else None, grafts, backbone)
            settings = VllmSettings.of(entries.values())
            _write_notes(draft, settings, list(entries), backbone, base)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The grafts could not be written to {folder} ({first_line(error)}): free some space or name another "
            "folder."
        ) from error
    return folder


def write_base(carrier: Carrier | None, backbone: Backbone, folder: Path) -> None:
    """Write the model to which adapters are added: the backbone, with blank adapters if there is a carrier.

    Args:
        carrier: the blank adapters; None for none.
        backbone: the backbone.
        folder: a new folder.

    Raises:
        ArtifactError: adapters can't be added to the backbone, or the folder can't be written.
    """
    if carrier is None:
        export_plain(backbone, folder)
        return
    with new_model(folder, backbone, "blank adapters, which LoRA adapters fill,") as draft:
        save_with_adapters(carrier.exported(backbone), backbone, draft)
        add_older_rope_keys(draft)


def export_peft(graft: Graft, backbone: Backbone, folder: str | Path) -> Path:
    """Write a graft whose effect is that of LoRA as an adapter that PEFT loads on the backbone.

    Args:
        graft: the graft, detached.
        backbone: the backbone that it was trained on.
        folder: a new or empty folder.

    Returns:
        The folder.

    Raises:
        ArtifactError: the graft is not LoRA with the same weights for all tokens, PEFT computes something else, or the
            folder contains files or can't be written.
        WrongBackboneError: the graft was built for another backbone.
    """
    folder = Path(folder)
    check_no_rows(backbone, "an adapter of PEFT")
    check_new_folder(folder)
    shared = SharedGraft.of("adapter", graft, backbone)
    if shared.adapter is not None:
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} adds modules that PEFT lacks: export it as a model, or with a "
            "carrier that PEFT can fill (--many)."
        )
    updates = updates_of({"adapter": 1.0}, {"adapter": shared}, None, backbone)
    try:
        with staged_folder(folder) as draft:
            write_peft(updates, draft, _absolute(backbone.name))
            verify_adapters(draft.parent, None, {draft.name: graft}, backbone)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The adapter could not be written to {folder} ({first_line(error)}): free some space or name another "
            "folder."
        ) from error
    return folder


def _absolute(name: str) -> str:
    """Return the name of a model; of a folder, its absolute path, since adapters are used in other folders."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def checked_entries(grafts: Mapping[str, Graft], mixtures: Mixtures) -> dict[str, dict[str, float]]:
    """Return the weights of the grafts of each adapter to write: of the grafts alone, and of the mixtures."""
    if not grafts:
        raise GraftError("No graft was given, but at least one is expected: name the folders of grafts.")
    entries = {name: {name: 1.0} for name in grafts}
    for name, weights in mixtures.items():
        if name in entries:
            raise GraftError(f"Both a graft and a mixture have the name {name}: choose another name for the mixture.")
        entries[name] = _checked_weights(name, weights, grafts)
    for name in entries:
        if name == CARRIER or name in (SETTINGS, "README.md"):
            raise GraftError(f"The name {name} is that of a file of the export: choose another name.")
        if GRAFT_NAME.fullmatch(name) is None:
            raise GraftError(f"The name {name[:80]!r} is not usable in requests: choose {NAME_RULE}.")
    return entries


def _checked_weights(name: str, weights: Mapping[str, float], grafts: Mapping[str, Graft]) -> dict[str, float]:
    if not weights:
        raise GraftError(f"The mixture {name} has no grafts, but at least one is expected: name some, as danish:0.7.")
    for graft, weight in weights.items():
        if graft not in grafts:
            raise GraftError(
                f"The mixture {name} names {graft}, which is none of {', '.join(grafts)}: name one of them."
            )
        if not is_weight(weight):
            raise GraftError(
                f"The mixture {name} has the weight {weight:g} of {graft}, but {WEIGHT_RANGE} is expected: change it, "
                "or leave the graft out."
            )
    return dict(weights)


def _write_notes(folder: Path, settings: VllmSettings, names: list[str], backbone: Backbone, base: str) -> None:
    """Write vLLM's settings, and the card. The model is `base`, a name or folder."""
    has_carrier = base == CARRIER
    values = {
        "model": base,
        **settings._asdict(),
        "adapters": names,
    }
    (folder / SETTINGS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    modules = " ".join(f"{name}={name}" for name in names)
    variables = [f"{name}={value}" for name, value in vllm_variables(backbone).items()] if has_carrier else []
    command = [*variables, "vllm serve", shlex.quote(base)]
    command += ["--served-model-name", shlex.quote(Path(backbone.name).name)]
    command += [*settings.arguments(has_carrier=has_carrier), "--lora-modules", modules]
    loaded = f'"{base}", trust_remote_code=True' if has_carrier else f'"{base}"'
    card = Template(_CARD.read_text(encoding="utf-8")).substitute(
        name=backbone.name,
        adapters=", ".join(names),
        command=" ".join(command),
        loaded=loaded,
        first=names[0],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")

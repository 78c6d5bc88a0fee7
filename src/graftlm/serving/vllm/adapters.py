"""The grafts of a vLLM server as LoRA adapters, and which of them answers a request.

vLLM keeps the keys and values of prompts by the name of the adapter, so that an adapter's name must never stand for
other weights. So each version of a graft has its own adapter name, such as danish@3.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock

import graftlm.export
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError
from graftlm.export.carrier import Carrier
from graftlm.export.low_rank import largest_rank, write_peft
from graftlm.export.many import VllmSettings, write_base
from graftlm.export.shared import SharedGraft, carrier_for, checked_updates, updates_of
from graftlm.export.verifying import verify_unchanged
from graftlm.files.model_files import names_gguf_file
from graftlm.grafts import ChoosesByPrompt, Graft, LowRankUpdate
from graftlm.version import __version__

ONLY_CHOICE = ""
"""The name of the choice of a graft that acts in the same way on all prompts."""
_BLANK = "@blank"  # the name of no graft
CACHE_VARIABLE = "GRAFTLM_CACHE"
_TEMPLATES = Path(graftlm.export.__file__).parent


@dataclass(frozen=True)
class ServedGraft:
    """A graft as adapters of vLLM.

    Attributes:
        name: its name in requests.
        adapters: the name in vLLM of each adapter, by the name of the choice.
        chooser: the graft, if it chooses by the prompt.
    """

    name: str
    adapters: Mapping[str, str]
    chooser: ChoosesByPrompt | None = None

    def adapter_for(self, prompt: Sequence[int]) -> str | None:
        """Return the adapter that answers a prompt of token ids; None for the bare backbone."""
        if self.chooser is None:
            return self.adapters[ONLY_CHOICE]
        choice = self.chooser.choose(prompt)
        return None if choice is None else self.adapters[choice]


@dataclass
class AdapterWriter:
    """Writes grafts as adapters for one carrier.

    Args:
        backbone: the backbone.
        carrier: the carrier; None if no graft had adapters next to FFNs when the server started.
        folder: where the adapters are written.
        settings: the settings that vLLM was started with; None if it was started without adapters.
    """

    backbone: Backbone
    carrier: Carrier | None
    folder: Path
    settings: VllmSettings | None
    _versions: int = field(default=0)

    def write(self, name: str, graft: Graft) -> ServedGraft:
        """Write the adapters of a graft.

        Raises:
            ArtifactError: vLLM can't serve the graft, or can't without a restart.
        """
        parts = parts_of(name, graft, self.backbone)
        updates = {}
        for choice, part in parts.items():
            updates[choice] = updates_of({name: 1.0}, {name: part}, self.carrier, self.backbone)
            self._check(name, updates[choice])
        self._versions += 1
        adapters = {}
        for choice, of_choice in updates.items():
            adapters[choice] = f"{name}@{self._versions}" + (f".{choice}" if choice else "")
            write_peft(of_choice, self.folder / adapters[choice], self.backbone.name)
        chooser = graft if isinstance(graft, ChoosesByPrompt) and not graft.is_fixed else None
        return ServedGraft(name, adapters, chooser)

    def write_mixture(self, name: str, weights: Mapping[str, float], grafts: Mapping[str, Graft]) -> ServedGraft:
        """Write the adapter of a weighted sum of grafts."""
        shared = {member: SharedGraft.of(member, grafts[member], self.backbone) for member in weights}
        updates = updates_of(weights, shared, self.carrier, self.backbone)
        self._check(name, updates)
        self._versions += 1
        adapter = f"{name}@{self._versions}"
        write_peft(updates, self.folder / adapter, self.backbone.name)
        return ServedGraft(name, {ONLY_CHOICE: adapter})

    def write_blank(self, updates: Mapping[str, LowRankUpdate]) -> str:
        """Write an adapter without effect, and return its name in vLLM."""
        write_peft(updates, self.folder / _BLANK, self.backbone.name)
        return _BLANK

    def remove(self, adapter: str) -> None:
        """Remove the folder of an adapter that vLLM does not use any more."""
        shutil.rmtree(self.folder / adapter, ignore_errors=True)

    def _check(self, name: str, updates: Mapping[str, LowRankUpdate]) -> None:
        """Raise `ArtifactError` if vLLM was started with settings that are too narrow for some updates."""
        settings = self.settings
        if settings is None:
            raise ArtifactError(
                f"The graft {name} came after the start, but vLLM was started without any: restart the server."
            )
        rank = largest_rank(updates)
        if rank > settings.max_lora_rank:
            raise ArtifactError(
                f"The updates of {name} have the rank {rank}, but vLLM was started for at most "
                f"{settings.max_lora_rank}: restart the server with this graft."
            )
        further = sorted({path.rpartition(".")[2] for path in updates} - set(settings.target_modules))
        if further:
            raise ArtifactError(
                f"The graft {name} changes modules named {further[0]}, but vLLM was started for "
                f"{', '.join(settings.target_modules)}: restart the server with this graft."
            )


def parts_of(name: str, graft: Graft, backbone: Backbone) -> dict[str, SharedGraft]:
    """Return what a graft adds, by the name of the choice.

    Raises:
        ArtifactError: LoRA adapters can't express the graft.
    """
    if isinstance(graft, ChoosesByPrompt) and not graft.is_fixed:
        backbone.check_graft(graft.config.kind, graft._fingerprint)
        choices = graft.choices(backbone)
        return {
            choice: SharedGraft(name, updates=checked_updates(updates, backbone)) for choice, updates in choices.items()
        }
    return {ONLY_CHOICE: SharedGraft.of(name, graft, backbone)}


@dataclass(frozen=True)
class Needs:
    """What vLLM must be started with, so that it can hold some grafts.

    Attributes:
        carrier: the carrier, if one is needed.
        settings: vLLM's settings for the adapters; None without grafts.
        blank: updates without effect; empty without grafts.
    """

    carrier: Carrier | None = None
    settings: VllmSettings | None = None
    blank: Mapping[str, LowRankUpdate] = field(default_factory=dict)

    @classmethod
    def of(cls, grafts: Mapping[str, Graft], mixtures: Mapping[str, Mapping[str, float]], backbone: Backbone) -> Needs:
        """Return the needs of grafts, and of weighted sums of them.

        Raises:
            ArtifactError: LoRA adapters can't express a graft.
        """
        parts: dict[str, SharedGraft] = {}
        entries: list[Mapping[str, float]] = []
        for name, graft in grafts.items():
            for choice, part in parts_of(name, graft, backbone).items():
                key = f"{name}.{choice}" if choice else name
                parts[key] = part
                entries.append({key: 1.0})
        for name, weights in mixtures.items():
            for member in weights:
                if member not in parts:
                    raise ArtifactError(
                        f"The mixture {name} has the graft {member}, which chooses its expert by the prompt, but a sum "
                        "is the same for all prompts: leave it out."
                    )
            entries.append(weights)
        if not entries:
            return cls()
        carrier = carrier_for(entries, parts)
        updates = [updates_of(weights, parts, carrier, backbone) for weights in entries]
        path, update = next(iter(updates[0].items()))
        blank = {path: LowRankUpdate(torch.zeros_like(update.a[:1]), torch.zeros_like(update.b[:, :1]))}
        return cls(carrier, VllmSettings.of(updates), blank)


def model_for_vllm(carrier: Carrier | None, backbone: Backbone) -> str:
    """Return the name or folder of the model that vLLM loads.

    That is the backbone itself, if no adapters are needed next to its FFNs and it is in the format of transformers.
    Otherwise it is a folder that is written once, whose name is a digest of all that it contains: the backbone's
    weights, config and tokenizer, the blank adapters, and GraftLM's version.

    Raises:
        ArtifactError: the model can't be written.
    """
    if carrier is None and not names_gguf_file(backbone.name):
        # vLLM has another working folder.
        return str(Path(backbone.name).absolute()) if Path(backbone.name).exists() else backbone.name
    folder = cache_folder() / "vllm" / _digest(carrier, backbone)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            _write(carrier, backbone, folder)
    return str(folder)


def _is_complete(folder: Path) -> bool:
    """Return whether the folder of a model has a config and weights."""
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def _write(carrier: Carrier | None, backbone: Backbone, folder: Path) -> None:
    """Write the carrier, or the plain backbone, and compare it with the backbone."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        draft = Path(scratch) / folder.name
        write_base(carrier, backbone, draft)
        verify_unchanged(draft, backbone)
        draft.rename(folder)


def _digest(carrier: Carrier | None, backbone: Backbone) -> str:
    """Return a digest of what `model_for_vllm` writes, in hexadecimal."""
    blanks = None if carrier is None else [carrier.width, *((form.activation, form.gate) for form in carrier.blanks)]
    tokenizer = backbone.need_tokenizer()
    texts = [__version__, json.dumps(blanks), backbone.config.to_json_string(), str(tokenizer.chat_template)]
    fast = getattr(tokenizer, "backend_tokenizer", None)
    texts.append(json.dumps(tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str())
    texts.append(str(tokenizer.special_tokens_map))
    if backbone.model.generation_config is not None:
        texts.append(backbone.model.generation_config.to_json_string())
    texts.append(str(backbone.sites.family.ffn))
    texts += [template.read_text(encoding="utf-8") for template in sorted(_TEMPLATES.glob("*_template.py"))]
    digest = hashlib.sha256("\n".join(texts).encode())
    for name, tensor in backbone.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder for files that can be made again: $GRAFTLM_CACHE, or graftlm in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "graftlm"

"""`graft.json`: what an artefact records about a graft and its backbone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import Field, JsonValue

from graftlm.backbone import Backbone, BackboneKind, Fingerprint
from graftlm.backbone.families import user_row
from graftlm.config import Config
from graftlm.errors import ArtifactError, RecipeError
from graftlm.files.hub import fetch_folder
from graftlm.grafts import GraftConfig, graft_config
from graftlm.version import __version__

FORMAT = 1
JSON_NAME, TENSORS_NAME, CARD_NAME = "graft.json", "graft.safetensors", "README.md"


class BackboneRecord(Config):
    """What a graft remembers of its backbone, or of another frozen model that it reads.

    `family` is the row that a user gave the model type, see `register_family`.
    """

    name: str
    model_type: str
    fingerprint: dict[str, str]
    kind: BackboneKind = "causal-lm"
    family: dict[str, JsonValue] | None = None

    @classmethod
    def of(cls, backbone: Backbone) -> BackboneRecord:
        """The record of a live model."""
        model_type, read = backbone.sites.model_type, asdict(backbone.fingerprint)
        family = user_row(model_type)
        return cls(name=backbone.name, model_type=model_type, fingerprint=read, kind=backbone.kind, family=family)

    def matches(self, backbone: Backbone) -> str | None:
        """What sets `backbone` apart, in words; None when it is the one."""
        difference = Fingerprint(**self.fingerprint).difference(backbone.fingerprint)
        if difference is None and self.family not in (None, user_row(self.model_type)):
            return f"its family has another row than the backbone.family in {JSON_NAME}, which it has to be loaded with"
        return difference


class Manifest(Config):
    """`graft.json`."""

    format: int = FORMAT
    kind: str
    config: dict[str, JsonValue]
    library: str
    backbone: BackboneRecord
    frozen_models: dict[str, BackboneRecord] = Field(default_factory=dict)
    tensors: int
    parameters: int
    training: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def trained_after(self) -> list[str]:
        """Names of the stages of `graft grow` whose grafts were attached, frozen, while this one was trained."""
        names = self.training.get("trained_after")
        return [str(name) for name in names] if isinstance(names, list) else []

    def check_alone(self, folder: str | Path, use: str) -> None:
        """Raise `ArtifactError` if the graft was trained beside others, which `use` would leave out."""
        if self.trained_after:
            raise ArtifactError(
                f"The graft {folder} was trained beside {' and '.join(self.trained_after)}, and {use} takes one graft: "
                "give it the grafts with generate, chat, eval or audit, or load_grafts in Python."
            )

    def graft_config(self) -> GraftConfig:
        """The graft's config. Raises ArtifactError if this version does not know the kind or a key, or misses one."""
        try:
            return graft_config({**self.config, "kind": self.kind}, where=JSON_NAME).check_saved(self.config)
        except RecipeError as error:
            why = f"The graft was written by graftlm {self.library}, and this is {__version__}: {error}"
            raise ArtifactError(why) from None


def read_manifest(folder: str | Path) -> Manifest:
    """`graft.json` of a folder or hub repository; ArtifactError if it is missing, broken, or of a later format."""
    path = fetch_folder(folder, JSON_NAME) / JSON_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        inside = [name for name in (f"graft/{JSON_NAME}", "model/config.json") if (Path(folder) / name).exists()]
        remedy = f"name {(Path(folder) / inside[0]).parent}" if inside else "name the folder of a graft or model"
        missing = f"{folder} has no {JSON_NAME}" if Path(folder).exists() else f"There is no folder {folder}"
        raise ArtifactError(f"{missing}, so it is not a graft: {remedy}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ArtifactError(f"{path} is not readable JSON, so the graft is damaged: copy or train it again.") from None
    if isinstance(values, dict) and values.get("format") not in (None, FORMAT):
        why = f"{folder} has the format {values['format']}, and this version reads format {FORMAT}: upgrade graftlm."
        raise ArtifactError(why)
    try:
        return Manifest.parse(values, where=str(path))
    except RecipeError as error:
        raise ArtifactError(f"{error} Copy or train the graft again.") from None

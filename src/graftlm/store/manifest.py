"""`graft.json`: the record of a graft, its backbone and its training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import Field, JsonValue

from graftlm.backbone import AddedTokens, Backbone, BackboneKind, Fingerprint, acts_after_norm
from graftlm.backbone.families import user_row
from graftlm.config import Config
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError, shorten
from graftlm.files.hub import fetch_folder
from graftlm.files.model_files import classifier_problem, is_classifier, lasting_name
from graftlm.grafts import Graft, GraftConfig, graft_config
from graftlm.version import __version__

FORMAT = 2
"""Since version 2, grafts in parallel to an FFN that a norm follows act after this norm."""
_FORMATS = (1, FORMAT)
JSON_NAME = "graft.json"
TENSORS_NAME = "graft.safetensors"
CARD_NAME = "README.md"


class BackboneRecord(Config):
    """The record of a backbone, or of another frozen model that the graft reads.

    Args:
        name: name on the hub or path.
        model_type: the `model_type` of its config.
        fingerprint: fields of its `Fingerprint`.
        kind: kind of its head.
        family: fields of the `Family` that a user registered for the model type with `register_family`; None for a
            family of GraftLM.
    """

    name: str
    model_type: str
    fingerprint: dict[str, str]
    kind: BackboneKind = "causal-lm"
    family: dict[str, JsonValue] | None = None

    def _problems(self) -> Iterator[str]:
        expected = [field.name for field in fields(Fingerprint)]
        if sorted(self.fingerprint) != sorted(expected):
            found = ", ".join(self.fingerprint) or "none"
            yield f"the fingerprint of {self.name} has the keys {found}, but {', '.join(expected)} are expected"

    @classmethod
    def of(cls, backbone: Backbone) -> BackboneRecord:
        """Create the record of a loaded model, whose fingerprint is computed if it was not yet."""
        model_type = backbone.sites.model_type
        return cls(
            name=lasting_name(backbone.name),
            model_type=model_type,
            fingerprint=asdict(backbone.fingerprint),
            kind=backbone.kind,
            family=user_row(model_type),
        )

    def difference(self, backbone: Backbone) -> str | None:
        """Describe how a backbone differs from the recorded model, as a clause; None if it is the same."""
        other_weights = Fingerprint(**self.fingerprint).difference(backbone.fingerprint)
        if other_weights is not None:
            return other_weights
        if self.family not in (None, user_row(self.model_type)):
            return f"the Family of {self.model_type} differs from backbone.family in {JSON_NAME}"
        return None


class AddedTokensRecord(Config):
    """The tokens that were added to the backbone's tokenizer.

    Args:
        texts: the tokens in the order of their ids.
        merges: the merges that make them, if they were learned.
    """

    texts: list[str]
    merges: list[tuple[str, str]] = []

    @classmethod
    def of(cls, backbone: Backbone) -> AddedTokensRecord | None:
        """Create the record of a backbone's added tokens; None without any."""
        if backbone.extended is None:
            return None
        added = backbone.extended.added
        return cls(texts=list(added.texts), merges=list(added.merges))

    def tokens(self) -> AddedTokens:
        """Return the tokens as `Backbone.with_tokens` takes them."""
        return AddedTokens(tuple(self.texts), tuple(self.merges))


class Manifest(Config):
    """Content of `graft.json`.

    Args:
        format: version of the format.
        kind: kind of the graft.
        config: values of the graft's config.
        library: version of graftlm that wrote the file.
        backbone: the backbone that the graft was trained on.
        frozen_models: other frozen models that the graft reads, by name.
        tensors: number of tensors in `graft.safetensors`.
        parameters: number of elements of these tensors.
        training: summary of the training run; empty if none was given.
        added_tokens: the tokens that were added to the backbone's tokenizer; None without any.
    """

    format: int = FORMAT
    kind: str
    config: dict[str, JsonValue]
    library: str
    backbone: BackboneRecord
    frozen_models: dict[str, BackboneRecord] = Field(default_factory=dict)
    tensors: int
    parameters: int
    training: dict[str, JsonValue] = Field(default_factory=dict)
    added_tokens: AddedTokensRecord | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """Return the content of the file, without `added_tokens` if there are none."""
        return self.model_dump(mode="json", exclude={"added_tokens"} if self.added_tokens is None else None)

    def added_to(self, backbone: Backbone) -> Backbone:
        """Return a backbone with the graft's added tokens; the backbone itself without any.

        Raises:
            BackboneError: a token can't be added.
        """
        return backbone if self.added_tokens is None else backbone.with_tokens(self.added_tokens.tokens())

    def check_format(self, folder: str | Path, graft: Graft, backbone: Backbone) -> None:
        """Check that a graft computes what it computed when it was trained.

        Args:
            folder: the graft's folder, for the message.
            graft: the graft that is made from the manifest.
            backbone: the backbone.

        Raises:
            ArtifactError: it acted before the norm that follows an FFN of the backbone, and acts after it now.
        """
        if self.format < FORMAT and acts_after_norm(backbone.sites, graft.taps()):
            raise ArtifactError(
                f"The graft {folder} has the format {self.format}, in which it acted before the norm after an FFN, "
                "but now it acts after the norm: train it again in another folder."
            )

    def check_added_tokens(self, folder: str | Path, backbone: Backbone) -> None:
        """Check that a backbone has the graft's added tokens, and no others.

        Args:
            folder: the graft's folder, for the message.
            backbone: the backbone.

        Raises:
            WrongBackboneError: it has others.
        """
        own = None if self.added_tokens is None else self.added_tokens.tokens()
        given = None if backbone.extended is None else backbone.extended.added
        if own == given:
            return
        if own is None:
            raise WrongBackboneError(
                f"The graft {folder} has no added tokens, but the backbone {backbone.name} has: pass "
                "backbone.without_tokens."
            )
        raise WrongBackboneError(
            f"The graft {folder} was trained with {len(own.texts):,} added tokens, such as {shorten(own.texts[0])!r}, "
            f"but here the backbone {backbone.name} has others or none: use graft generate, chat, eval or export (a "
            "server takes the exported model), or load the backbone in Python with backbone_of(FOLDER)."
        )

    @property
    def trained_after(self) -> list[str]:
        """Names of the stages of `graft grow` whose grafts were attached, frozen, while this one was trained."""
        names = self.training.get("trained_after")
        if not isinstance(names, list):
            return []
        return [str(name) for name in names]

    def check_alone(self, folder: str | Path, use: str) -> None:
        """Raise `ArtifactError` if the graft was trained together with others.

        Args:
            folder: the graft's folder, for the message.
            use: the operation that needs a graft alone, as the subject of a clause.

        Raises:
            ArtifactError: `trained_after` is not empty.
        """
        if self.trained_after:
            raise ArtifactError(
                f"The graft {folder} was trained together with {' and '.join(self.trained_after)}, but {use} takes one "
                "graft: use generate, chat, eval or audit, or load_grafts in Python."
            )

    def graft_config(self) -> GraftConfig:
        """Return the graft's config.

        Raises:
            ArtifactError: the kind or a key is unknown to this version of graftlm, or a key is missing.
        """
        try:
            config = graft_config({**self.config, "kind": self.kind}, where=JSON_NAME)
            return config.check_saved(self.config)
        except RecipeError as error:
            raise ArtifactError(
                f"graftlm {__version__} can't read the config of the graft, which graftlm {self.library} wrote "
                f"({str(error).rstrip('.')}): correct {JSON_NAME}, or install the other version."
            ) from None


def read_manifest(folder: str | Path) -> Manifest:
    """Read `graft.json` from a folder or a repository on the hub.

    Raises:
        ArtifactError: the file is missing, is not valid, or has an unknown format; or the repository can't be
            downloaded.
    """
    path = fetch_folder(folder, JSON_NAME) / JSON_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise _missing_error(Path(folder)) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ArtifactError(f"{path} is not readable JSON, so the graft is damaged: copy or train it again.") from None
    if isinstance(values, dict) and values.get("format") not in _FORMATS:
        found = f"the format {shorten(repr(values['format']))}" if "format" in values else "no format"
        raise ArtifactError(
            f"{path} has {found}, but graftlm {__version__} reads the formats 1 to {FORMAT}: install the "
            "version of graftlm that wrote it, or train the graft again."
        )
    try:
        return Manifest.parse(values, where=str(path))
    except RecipeError as error:
        raise ArtifactError(f"{error} Copy or train the graft again.") from None


def _missing_error(folder: Path) -> ArtifactError:
    """Return the error for a folder without `graft.json`, with the path of a graft or model inside it, if any."""
    for place in (folder, folder / "model"):
        if is_classifier(place):
            return ArtifactError(classifier_problem(place))
    if (folder / "config.json").exists():
        return ArtifactError(
            f"{folder} has a config.json and no {JSON_NAME}, so it is a model, not a graft: name the folder of a graft."
        )
    remedy = "name the folder of a graft or model"
    for name in (f"graft/{JSON_NAME}", "model/config.json"):
        if (folder / name).exists():
            remedy = f"name {(folder / name).parent}"
            break
    missing = f"{folder} has no {JSON_NAME}" if folder.exists() else f"There is no folder {folder}"
    return ArtifactError(f"{missing}, so it is not a graft: {remedy}.")

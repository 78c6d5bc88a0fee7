"""Sections that recipes of several kinds share: the backbone, and the graft."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from accelerate import PartialState
from pydantic import BeforeValidator, Field, SerializeAsAny

from graftlm.backbone import Backbone, BackboneKind, load_backbone
from graftlm.config import Config
from graftlm.grafts import GraftConfig, graft_config


class BackboneConfig(Config):
    """Which frozen model to teach."""

    name: str = Field(min_length=1, description="A name on the Hugging Face hub, or a folder.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the checkpoint.")

    def load(self, kind: BackboneKind = "causal-lm") -> Backbone:
        """The backbone, with the head that `kind` says."""
        device = self.device or PartialState().device
        return load_backbone(
            self.name, kind=kind, dtype=self.dtype, device=device, trust_remote_code=self.trust_remote_code
        )


def _as_graft(value: Any) -> GraftConfig:
    return value if isinstance(value, GraftConfig) else graft_config(value)


AnyGraft = Annotated[SerializeAsAny[GraftConfig], BeforeValidator(_as_graft)]

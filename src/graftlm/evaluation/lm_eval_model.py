"""The model `graftlm` of lm-evaluation-harness; importing this module registers it."""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from graftlm.artifact import backbone_of, load_graft
from graftlm.grafts import GraftedModel


@register_model("graftlm")
class GraftedHFLM(HFLM):
    """A graft's folder, with the backbone where it was or at `backbone`; `options` are those of `HFLM`."""

    def __init__(self, graft: str, backbone: str | None = None, device: str | None = None, **options: Any) -> None:
        loaded = backbone_of(graft, backbone, device=device)
        model: Any = GraftedModel(loaded, {"graft": load_graft(graft, loaded)})
        options |= {"pretrained": model, "tokenizer": loaded.need_tokenizer()}
        super().__init__(**options)

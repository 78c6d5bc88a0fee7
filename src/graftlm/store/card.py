"""Model cards of grafts."""

from __future__ import annotations

from graftlm.backbone import BackboneKind
from graftlm.files.hub import hub_name
from graftlm.files.model_files import PACKAGED_MODELS


def model_card(
    backbone: str,
    title: str,
    text: str,
    *,
    kind: BackboneKind = "causal-lm",
    several: bool = False,
    with_tokens: bool = False,
) -> str:
    """Return the card of a graft as Markdown: a description, and code that loads the graft.

    Args:
        backbone: name of the backbone that the code loads.
        title: beginning of the heading, such as `A graft`; `for` and the backbone's name follow.
        text: body of the card in Markdown.
        kind: the kind with which the code loads the backbone.
        several: the code also loads the grafts that were attached while this one was trained.
        with_tokens: the graft has rows of added tokens, which the folder records.
    """
    _, repository = PACKAGED_MODELS.get(backbone.lower(), ("", backbone))
    name = hub_name(repository)
    base = f"base_model: {name}\n" if name else ""  # The hub refuses names that are not on the hub.
    options = "" if kind == "causal-lm" else f", kind={kind!r}"
    if several:
        loader = "load_grafts"
        grafts = 'load_grafts("this-folder", backbone)'
    else:
        loader = "load_graft"
        grafts = '{"graft": load_graft("this-folder", backbone)}'
    if with_tokens:
        imports = f"from graftlm import GraftedModel, backbone_of, {loader}\n"
        backbone_line = f'backbone = backbone_of("this-folder", {backbone!r})'
    else:
        imports = f"from graftlm import GraftedModel, load_backbone, {loader}\n"
        backbone_line = f"backbone = load_backbone({backbone!r}{options})"
    return (
        f"---\nlibrary_name: graftlm\n{base}---\n\n# {title} for {backbone}\n\n{text}\n\n"
        f"```python\n{imports}\n{backbone_line}\nmodel = GraftedModel(backbone, {grafts})\n```\n"
    )

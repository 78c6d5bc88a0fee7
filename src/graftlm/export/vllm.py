"""What is known about vLLM: families of models whose exports it can't run, and variables that others need.

`vllm.yaml` comes from the table of exports in the real vLLM (`python -m integrations.vllm`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from graftlm.backbone import Backbone
from graftlm.config import read_yaml
from graftlm.errors import ArtifactError

Server = Literal["vllm"]
_KNOWN = read_yaml(Path(__file__).with_name("vllm.yaml"))
_log = logging.getLogger(__name__)


def vllm_problem(backbone: Backbone) -> str:
    """Return why vLLM can't run an export with code for this backbone, as a clause; empty if nothing is known."""
    reason = _KNOWN["families_not_run"].get(backbone.sites.model_type)
    if reason is None:
        return ""
    return f"vLLM {_KNOWN['version']} can't run {backbone.sites.model_type} models with code of their own ({reason})"


def vllm_variables(backbone: Backbone) -> dict[str, str]:
    """Return environment variables that vLLM needs for exports of this backbone."""
    return dict(_KNOWN["environments"].get(backbone.sites.model_type, {}))


def check_server(backbone: Backbone, *, target: Server | None) -> None:
    """Check that vLLM can run an export with code for a backbone. Nothing is known about other servers.

    Args:
        backbone: the backbone.
        target: the server that the export is for; None logs a warning instead of an error.

    Raises:
        ArtifactError: the export is for vLLM, which can't run it.
    """
    problem = vllm_problem(backbone)
    if problem and target == "vllm":
        raise ArtifactError(f"{problem}: serve the graft with graft serve, or export it without --for vllm.")
    if problem:
        _log.warning("%s; transformers can.", problem)

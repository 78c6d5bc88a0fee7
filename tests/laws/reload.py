"""Run as a fresh process: load every graft under a folder, and write the logits that it gives beside it.

    python -m laws.reload ROOT

ROOT holds a folder a case: `graft` is the artefact, `backbone` a file with the backbone's folder or, for one that only
tests can make, its name in `laws.examples`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from graftlm.artifact import load_graft
from graftlm.backbone import Backbone, load_backbone
from graftlm.grafts import GraftedModel
from laws.examples import backbone
from laws.tools import logits
from tiny import ENCODERS, tiny_ids


def _backbone(where: str) -> Backbone:
    if not Path(where).is_dir():
        return backbone(where)
    return load_backbone(where, kind="masked-lm" if Path(where).name in ENCODERS else "causal-lm")


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for case in sorted(root.iterdir()):
        host = _backbone((case / "backbone").read_text(encoding="utf-8"))
        with GraftedModel(host, {"graft": load_graft(case / "graft", host)}) as model:
            save_file({"logits": logits(model.eval(), tiny_ids())}, case / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

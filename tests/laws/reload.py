"""Run as a fresh process: load every graft under a folder, and write the logits that it gives beside it.

    python -m laws.reload ROOT

ROOT holds one folder for each case: `graft` is the artefact, and `backbone` is a file with the backbone's folder, or
with its name in `laws.examples` where no folder can hold it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from graftlm.backbone import Backbone, load_backbone
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import load_graft
from graftlm.testing import logits
from laws.examples import backbone
from tiny import ENCODERS, tiny_ids


def _backbone(name: str) -> Backbone:
    if not Path(name).is_dir():
        return backbone(name)
    return load_backbone(name, kind="masked-lm" if Path(name).name in ENCODERS else "causal-lm")


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for case in sorted(root.iterdir()):
        host = _backbone((case / "backbone").read_text(encoding="utf-8"))
        with GraftedModel(host, {"graft": load_graft(case / "graft", host)}) as model:
            save_file({"logits": logits(model.eval(), tiny_ids())}, case / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

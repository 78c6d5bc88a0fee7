"""Name the tokens that end an answer in the folder of a model, where other programs look for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.backbone import turn_end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "generation_config.json"


def add_turn_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the tokenizer's EOS token and the tokens that end a turn to the EOS tokens of a model's generation config.

    Args:
        folder: the folder of the model. It is left unchanged without `generation_config.json`, or if no token ends
            a turn (`turn_end_ids`).
        tokenizer: the model's tokenizer.
    """
    path = folder / _FILE
    turn_ends = turn_end_ids(tokenizer)
    if not turn_ends or not path.exists():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    given = config.get("eos_token_id")
    known = given if isinstance(given, list) else [given]
    ends = dict.fromkeys([*known, tokenizer.eos_token_id, *turn_ends])
    config["eos_token_id"] = [token for token in ends if isinstance(token, int)]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

"""What the user should know about listed tokens that the new text of a run does not have."""

from __future__ import annotations

import numpy as np

from graftlm.backbone import Backbone
from graftlm.data import NEW, Mixture
from graftlm.data.marked_ids import unmark
from graftlm.data.mixture import MemoryBlocks
from graftlm.errors import first_of, shorten

_SHOWN = 20
_ROWS = 4096  # rows that are looked through together, which bounds the memory


def note_on_unused_tokens(backbone: Backbone, batches: Mixture | None) -> str | None:
    """Return a sentence about the listed tokens that do not occur in the new rows.

    Args:
        backbone: the backbone with its added tokens.
        batches: the run's batches.

    Returns:
        The sentence; None if all tokens occur, if none are listed, or if the new text is streamed.
    """
    extended = backbone.extended
    rows = None if batches is None else batches.domains.get(NEW)
    if extended is None or extended.added.merges or not isinstance(rows, MemoryBlocks):
        return None
    occurs = np.zeros(extended.count, dtype=bool)
    for start in range(0, len(rows), _ROWS):
        ids = unmark(rows.marked[start : start + _ROWS], rows.pad_id)
        occurs[ids[ids >= extended.first] - extended.first] = True
    unused = [text for text, is_used in zip(extended.added.texts, occurs, strict=True) if not is_used]
    if not unused:
        return None
    names = first_of([repr(shorten(text)) for text in unused], _SHOWN)
    return (
        f"Of the {extended.count:,} tokens in backbone.add_tokens, {len(unused):,} do not occur in the new rows and "
        f"learn nothing from them: {names}."
    )

"""Which taught answers a model gives already."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftlm.backbone import Backbone
from graftlm.data import Document
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.windows import cut_windows, scored_logits

_LENGTH = 512
_BATCH = 8


@torch.inference_mode()
def find_known(backbone: Backbone, documents: Sequence[Document]) -> list[Document]:
    """Return the conversations whose answers the bare backbone gives word for word under greedy decoding.

    No graft may be attached. At most 512 tokens of a conversation are read, up to the end of an answer.

    Args:
        backbone: the backbone.
        documents: the conversations; other documents are skipped.
    """
    chats = [document for document in documents if document.chat is not None]
    tokenizer = backbone.need_tokenizer()
    windows = list(cut_windows(tokenizer, chats, _LENGTH))
    is_known = [bool(chats)] * len(chats)
    counts = [0] * len(chats)
    with evaluation_mode(backbone.model):
        for start in range(0, len(windows), _BATCH):
            batch = windows[start : start + _BATCH]
            logits, targets = scored_logits(backbone.model, tokenizer, batch)
            is_right = logits.argmax(-1) == targets
            for window, right in zip(batch, is_right.split([window.tokens for window in batch]), strict=True):
                counts[window.document] += window.tokens
                is_known[window.document] &= bool(right.all())
    return [chat for chat, known, count in zip(chats, is_known, counts, strict=True) if known and count]

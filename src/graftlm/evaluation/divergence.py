"""`own_kl` and `chat_kl`: the divergence from the backbone on text that the backbone sampled itself.

`scores._token_divergences` computes the divergence of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graftlm.data.own_text import OwnText
from graftlm.evaluation.results import Interval
from graftlm.evaluation.scores import Scores


def own_text_counts(samples: Sequence[OwnText]) -> dict[str, int]:
    """Return the number of sampled texts, and of the conversations among them."""
    return {"texts": len(samples), "chats": sum(sample.is_chat for sample in samples)}


def own_text_metrics(scores: Scores, samples: Sequence[OwnText]) -> dict[str, Interval]:
    """Return the divergence on sampled text, in nats per token.

    Args:
        scores: the scores of `samples` against their sampler, one entry for each text.
        samples: the texts that were scored, in the same order.

    Returns:
        `own_kl` on all texts, and `chat_kl` on the conversations if some texts, but not all, are conversations.
    """
    is_chat = np.array([samples[number].is_chat for number in scores.document])
    metrics = {"own_kl": scores.interval("kl_per_token")}
    if is_chat.any() and not is_chat.all():
        metrics["chat_kl"] = scores.subset(is_chat).interval("kl_per_token")
    return metrics

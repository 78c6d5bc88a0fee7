"""`own_kl` and `chat_kl`: the divergence from the backbone on text that the backbone sampled itself.

`scores._token_divergences` computes the divergence of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from graftlm.data.own_text import OwnText
from graftlm.evaluation.inference import LanguageModel, Precision
from graftlm.evaluation.results import Interval
from graftlm.evaluation.scores import Scores, score_windows
from graftlm.evaluation.windows import own_windows


def score_own_text(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[OwnText],
    reference: LanguageModel,
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
) -> Scores:
    """Score the sampled parts of texts, with the divergence from the model that sampled them.

    Args:
        model: the model to measure.
        tokenizer: the tokenizer of both models.
        samples: the texts that `reference` sampled.
        reference: the model that sampled them, such as the bare backbone.
        batch_size: windows per call of a model; it affects speed and memory only.
        precision: see `score`.

    Returns:
        The scores with one entry for each text; those of a conversation are summed over its turns.

    Raises:
        DataError: there are no texts.
        EvaluationError: a model predicts NaN or infinity, or the precision is unknown.
    """
    scores = score_windows(
        model,
        tokenizer,
        own_windows(samples),
        batch_size=batch_size,
        precision=precision,
        reference=reference,
    )
    return scores.by_document()


def own_text_counts(samples: Sequence[OwnText]) -> dict[str, int]:
    """Return the number of sampled texts, and of the conversations among them."""
    return {"texts": len(samples), "chats": sum(sample.is_chat for sample in samples)}


def own_text_metrics(scores: Scores, samples: Sequence[OwnText]) -> dict[str, Interval]:
    """Return the divergence on sampled text, in nats per token.

    Args:
        scores: the scores of `samples`, from `score_own_text`.
        samples: the texts that were scored, in the same order.

    Returns:
        `own_kl` on all texts, and `chat_kl` on the conversations if some texts, but not all, are conversations.
    """
    is_chat = np.array([samples[number].is_chat for number in scores.document])
    metrics = {"own_kl": scores.interval("kl_per_token")}
    if is_chat.any() and not is_chat.all():
        metrics["chat_kl"] = scores.subset(is_chat).interval("kl_per_token")
    return metrics

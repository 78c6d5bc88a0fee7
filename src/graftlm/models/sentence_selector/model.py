"""A model that selects the sentences of a summary: sentence encoder, document encoder, classifier or pointer head.

Shape suffixes: B documents, N sentences, T tokens of a sentence, K steps of the pointer, v size of given embeddings,
s size of sentence vectors, w width of the document encoder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.encoders import (
    LstmDocumentEncoder,
    LstmSentenceEncoder,
    TransformerDocumentEncoder,
)
from graftlm.models.sentence_selector.heads import ClassifierHead, PointerHead


class SelectorOutput(NamedTuple):
    """All sentences of one document, best first, with their scores.

    Attributes:
        indices: indices of the sentences.
        scores: log-odds of a classifier, or log-probabilities of a pointer. For the sequence of a pointer's beam
            search, they are conditioned on the sentences before; for the other sentences, they are those of the next
            step.
    """

    indices: list[int]
    scores: list[float]


class SentenceSelector(PreTrainedModel):
    """A hierarchical encoder with a classifier or a pointer over sentences.

    Args:
        config: config of the model.
    """

    config_class = SentenceSelectorConfig
    base_model_prefix = "selector"

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__(config)
        self.sentence_encoder: LstmSentenceEncoder | None = None
        input_size = config.sentence_embedding_size
        if config.input_type == "tokens":
            self.sentence_encoder = LstmSentenceEncoder(config)
            input_size = config.width
        if config.document_encoder == "lstm":
            self.document_encoder = LstmDocumentEncoder(config, input_size)
        else:
            self.document_encoder = TransformerDocumentEncoder(config, input_size)
        self.dropout = nn.Dropout(config.dropout)
        if config.head == "classifier":
            self.head = ClassifierHead(config)
        else:
            self.head = PointerHead(config, input_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep PyTorch's default initialization, which is usual for LSTMs."""

    def encode(self, inputs: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Encode the sentences alone, then in their documents.

        Args:
            inputs: token ids (B, N, T), padded at the end with `vocab_size`; or sentence embeddings (B, N, v).
            mask_BN: bool (B, N), True for sentences and False for padding, which comes last. Each document has a
                sentence.

        Returns:
            Vectors (B, N, s) of the sentences alone, and (B, N, w) of the sentences in their documents.
        """
        s_BNs = inputs
        if self.sentence_encoder is not None:
            s_BNs = self.sentence_encoder(inputs)
        d_BNw = self.document_encoder(self.dropout(s_BNs), mask_BN)
        return s_BNs, self.dropout(d_BNw)

    def forward(self, inputs: Tensor, mask_BN: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss: mean binary cross-entropy of the sentences, or mean cross-entropy of the pointer's steps.

        Args:
            inputs: token ids (B, N, T) or sentence embeddings (B, N, v), as in `encode`.
            mask_BN: bool (B, N), True for sentences and False for padding, which comes last.
            targets: for a classifier (B, N), 1 for sentences of the extract; for a pointer (B, K), the indices of the
                extract's sentences in order, padded with −1. At least one pointer target is not padding.

        Returns:
            A scalar in nats.
        """
        s_BNs, d_BNw = self.encode(inputs, mask_BN)
        if isinstance(self.head, ClassifierHead):
            logits_BN = self.head(d_BNw, mask_BN)
            return functional.binary_cross_entropy_with_logits(logits_BN[mask_BN], targets[mask_BN].float())
        log_probs_BKN = self.head(s_BNs, d_BNw, mask_BN, targets)
        return functional.nll_loss(log_probs_BKN.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.inference_mode()
    def rank(self, inputs: Tensor, steps: int | None = None) -> SelectorOutput:
        """Rank all sentences of one document. The model should be in evaluation mode.

        Args:
            inputs: token ids (N, T) or sentence embeddings (N, v) of at least one sentence.
            steps: number of sentences that a pointer's search selects; None or 0 for the config's `extract_size`.
        """
        mask_BN = torch.ones(1, len(inputs), dtype=torch.bool, device=inputs.device)
        s_BNs, d_BNw = self.encode(inputs[None], mask_BN)
        if isinstance(self.head, ClassifierHead):
            return _sorted(self.head(d_BNw, mask_BN)[0])
        scores, next_N = self.head.search(
            s_BNs[0],
            d_BNw[0],
            steps=int(steps or self.config.extract_size),
            beam_size=self.config.beam_size,
        )
        others = _sorted(next_N)
        for index, score in zip(others.indices, others.scores, strict=True):
            scores.setdefault(index, score)
        return SelectorOutput(indices=list(scores), scores=list(scores.values()))


def _sorted(scores_N: Tensor) -> SelectorOutput:
    order = scores_N.sort(descending=True, stable=True)
    return SelectorOutput(indices=order.indices.tolist(), scores=order.values.tolist())

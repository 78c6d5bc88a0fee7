"""A selector of sentences: reads a document sentence by sentence, and says which of them make its summary.

Shape suffixes: B documents, N sentences, T tokens of a sentence, v given vectors, s sentence vectors, w width, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.encoders import AttentiveDocument, RecurrentDocument, TokenReader
from graftlm.models.sentence_selector.heads import ClassifierHead, PointerHead


@dataclass(frozen=True)
class SelectorOutput:
    """Sentences of one document, what matters most first, and how much each does.

    Of a classifier, log-odds of all sentences; of a pointer, log-probabilities: first of the sequence that beam search
    found, each given those before it, then of the others at the step after it.
    """

    indices: list[int]
    scores: list[float]


class SentenceSelector(PreTrainedModel):
    """Hierarchical encoder, and a classifier or a pointer over sentences."""

    config_class = SentenceSelectorConfig
    base_model_prefix = "selector"

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__(config)
        self.reader = TokenReader(config) if config.reads == "tokens" else None
        inputs = config.width if config.reads == "tokens" else config.vector_size
        document = RecurrentDocument if config.document == "lstm" else AttentiveDocument
        self.document = document(config, inputs)
        self.dropout = nn.Dropout(config.dropout)
        self.head = ClassifierHead(config) if config.head == "classifier" else PointerHead(config, inputs)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: modules come with torch's own fresh weights, which LSTMs are usually trained from."""

    def encode(self, inputs: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors s of sentences alone and d of sentences in their document.

        Args:
            inputs: token ids, (B, N, T), with `vocab_size` as padding; or vectors, (B, N, v).
            mask_BN: which sentences are there; those of a document come first.
        """
        s_BNs = self.reader(inputs) if self.reader is not None else inputs
        return s_BNs, self.dropout(self.document(self.dropout(s_BNs), mask_BN))

    def forward(self, inputs: Tensor, mask_BN: Tensor, targets: Tensor) -> Tensor:
        """The loss: mean binary cross-entropy of sentences, or mean cross-entropy of the pointer's steps.

        Args:
            inputs: as for `encode`.
            mask_BN: as for `encode`.
            targets: of a classifier, (B, N), 1 for sentences of the extract; of a pointer, (B, K), their indices in
                order, −1 as padding.
        """
        s_BNs, d_BNw = self.encode(inputs, mask_BN)
        if isinstance(self.head, ClassifierHead):
            logits_BN = self.head(d_BNw, mask_BN)
            return functional.binary_cross_entropy_with_logits(logits_BN[mask_BN], targets[mask_BN].float())
        found_BKN = cast("PointerHead", self.head)(s_BNs, d_BNw, mask_BN, targets)
        return functional.nll_loss(found_BKN.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.inference_mode()
    def choose(self, inputs: Tensor, steps: int | None = None) -> SelectorOutput:
        """Rank the sentences of one document.

        Args:
            inputs: (N, T) token ids, or (N, v) vectors.
            steps: of the pointer; by default `extract_size`.
        """
        mask_BN = torch.ones(1, len(inputs), dtype=torch.bool, device=inputs.device)
        s_BNs, d_BNw = self.encode(inputs[None], mask_BN)
        if isinstance(self.head, ClassifierHead):
            return _sorted(self.head(d_BNw, mask_BN)[0])
        pointer = cast("PointerHead", self.head)
        length = int(steps or self.config.extract_size)
        first, gains, after_N = pointer.search(s_BNs[0], d_BNw[0], length, self.config.beams)
        rest = _sorted(after_N)
        others = [(index, score) for index, score in zip(rest.indices, rest.scores, strict=True) if index not in first]
        return SelectorOutput([*first, *(index for index, _ in others)], [*gains, *(score for _, score in others)])


def _sorted(scores_N: Tensor) -> SelectorOutput:
    order = scores_N.sort(descending=True, stable=True)
    return SelectorOutput(order.indices.tolist(), order.values.tolist())

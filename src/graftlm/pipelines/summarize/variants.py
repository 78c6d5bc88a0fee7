"""Examples of writers by variant: whose extracts a writer reads in training, and whose in use.

The variants are those of the thesis (Tables 2.2 to 2.5). The first letter stands for training, the second for use:
`g` are the ground-truth sentences of the oracle, which knows the human summary, and `m` those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.oracle import best_sentences, rouge_scores
from graftlm.pipelines.summarize.selection import Budget, Extract, RankedSentence, Selector, select
from graftlm.pipelines.summarize.summarized import SummarizedDocument
from graftlm.pipelines.summarize.summary import SELECTION
from graftlm.pipelines.summarize.writer_training import WriterExample

Variant = Literal["gm", "mm", "gg"]
Purpose = Literal["training", "test"]


@dataclass(frozen=True)
class OracleSelector:
    """Ranks the oracle sentences of a human summary by their best score with a sentence of the summary.

    Args:
        summary: sentences of the human summary.
        per_sentence: number of sentences of the document that are taken for each sentence of the summary.
        name: human-readable name.
    """

    summary: Sequence[str]
    per_sentence: int = 2
    name: str = "the oracle"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return the sentences of `oracle_extract` among `document.selectable`, best first.

        Raises:
            MissingExtraError: NLTK is not installed.
        """
        indices = document.selectable
        texts = [document.sentences[index].text for index in indices]
        scores_NM = rouge_scores(texts, self.summary)
        chosen: dict[int, float] = {}
        for labels in best_sentences(scores_NM, self.per_sentence):
            for position in labels:
                chosen[position] = float(scores_NM[position].max())
        ranked = [RankedSentence(indices[position], score) for position, score in chosen.items()]
        return sorted(ranked, key=lambda sentence: (-sentence.score, sentence.index))


def oracle_selection(summarized: SummarizedDocument, per_sentence: int = 2) -> Extract:
    """Return the oracle sentences of a document, in document order. Repeated texts are taken once.

    Args:
        summarized: the document with its human summary.
        per_sentence: number of sentences of the document that are taken for each sentence of the summary.

    Raises:
        MissingExtraError: NLTK or sentencex is not installed.
    """
    sentences = summarized.summary_sentences
    most = max(1, per_sentence * len(sentences))
    return select(summarized.document, OracleSelector(sentences, per_sentence), Budget(amount=most))


def reads_oracle(variant: Variant, purpose: Purpose) -> bool:
    """Return whether a writer reads the oracle's extracts.

    Args:
        variant: `gm` trains on the oracle's extracts and is used with the model's, `mm` has the model's in both, and
            `gg` the oracle's. The last one is an upper bound, since in use there is no human summary.
        purpose: whether the extracts are for training or for a test.
    """
    letter = variant[0] if purpose == "training" else variant[1]
    return letter == "g"


def writer_examples(
    documents: Sequence[SummarizedDocument],
    variant: Variant,
    purpose: Purpose,
    selector: Selector,
    budget: Budget,
    per_sentence: int = 2,
) -> list[WriterExample]:
    """Return the examples with which a variant is trained or tested.

    Args:
        documents: documents with human summaries.
        variant: see `reads_oracle`.
        purpose: whether the examples are for training or for a test.
        selector: the model that selects where the variant reads its extracts. It should not have been trained on these
            documents, since its extracts are better there.
        budget: limit of the model's extracts. The oracle takes all its sentences.
        per_sentence: number of sentences that the oracle takes for each sentence of a summary.

    Raises:
        RecipeError: no sentence of a document fits into the budget, or the budget is in tokens.
        MissingExtraError: a library of the oracle or of the selector is not installed.
    """
    examples = []
    for summarized in documents:
        if reads_oracle(variant, purpose):
            extract = oracle_selection(summarized, per_sentence)
        else:
            extract = select(summarized.document, selector, budget, None, **SELECTION)
        examples.append(WriterExample(extract, summarized.summary))
    return examples


def mean_oracle_size(documents: Sequence[SummarizedDocument], per_sentence: int = 2) -> int:
    """Return the mean number of oracle sentences of at least one document, rounded, at least 1.

    Raises:
        MissingExtraError: NLTK or sentencex is not installed.
    """
    sizes = [len(oracle_selection(summarized, per_sentence).indices) for summarized in documents]
    return max(1, round(sum(sizes) / len(sizes)))

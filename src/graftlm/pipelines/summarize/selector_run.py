"""The run behind `graft summarize train-selector`: train a selector, and score it on held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue

from graftlm.errors import DataError
from graftlm.evaluation import Results
from graftlm.evaluation.report import write_report
from graftlm.pipelines.summarize.default_selector import DefaultSelector
from graftlm.pipelines.summarize.held_out import human_row, oracle_row, selector_row
from graftlm.pipelines.summarize.selection import Budget, LeadSelector
from graftlm.pipelines.summarize.selector_training import (
    SelectorExample,
    SelectorTrainingConfig,
    selector_example,
    train_selector,
)
from graftlm.pipelines.summarize.summarized import SummarizedDocument, hold_out
from graftlm.pipelines.summarize.variants import mean_oracle_size
from graftlm.progress import progress_bar

SELECTOR = "selector"
"""Name of the folder of the trained selector, in the folder of a run."""


def run_selector_training(
    documents: Sequence[SummarizedDocument],
    test: Sequence[SummarizedDocument],
    out: str | Path,
    training: SelectorTrainingConfig | None = None,
    *,
    validation_share: float = 0.1,
    device: str = "cpu",
    log: Callable[[str], None] = lambda text: None,
    progress: bool = False,
) -> Results:
    """Train a selector, save it in `out/selector`, and write a report with scores on held-out documents.

    All extracts of the report have the same number of sentences, the mean of the oracle's on the training documents.
    The report has rows for the selector, the package's own selector, the first sentences, the oracle and the human
    summaries.

    Args:
        documents: documents with human summaries to learn from, a part of which decides which weights are kept.
        test: held-out documents, at least one.
        out: folder of the selector and the report.
        training: configuration; None uses the defaults.
        validation_share: share of `documents` that decides which weights are kept.
        device: device of the model.
        log: called with lines of text about the run.
        progress: show the progress of long parts.

    Raises:
        DataError: there are fewer than two documents, or no held-out one; or see `train_selector`.
        ArtifactError: `out/selector` has other content.
        EvaluationError: the report can't be written.
        GraftError: see `train_selector`.
    """
    if not test:
        raise DataError("There is no held-out document, but at least one is expected: add documents with summaries.")
    training = training or SelectorTrainingConfig()
    learned, validation = hold_out(documents, validation_share, training.seed)
    log(f"Documents: {len(learned):,} to learn from, {len(validation):,} for validation, {len(test):,} held out.")
    warn_of_abstracts([*documents, *test], log)
    warn_of_shared_documents(documents, test, log)
    with progress_bar("find oracle sentences", len(documents), show=progress) as update:
        train_examples = _examples(learned, update)
        validation_examples = _examples(validation, update)
    selector = train_selector(train_examples, validation_examples, training, device=device, log=log, progress=progress)
    folder = selector.save(Path(out) / SELECTOR)
    budget = Budget(amount=mean_oracle_size(learned))
    rows = [
        selector_row("selector", f"this selector ({training.kind})", selector, budget, test),
        selector_row("default", "the package's selector", DefaultSelector(), budget, test),
        selector_row("lead", "first sentences", LeadSelector(), budget, test),
        oracle_row(test),
        human_row(test),
    ]
    losses: list[JsonValue] = []
    evaluations = selector.record["losses"]
    assert isinstance(evaluations, list), "train_selector records its evaluations"
    for step, _, loss in evaluations:
        losses.append([step, loss])
    details: dict[str, JsonValue] = {
        "losses": {"selector": losses},
        "documents": {"training": len(learned), "validation": len(validation), "test": len(test)},
        "budget": str(budget),
    }
    results = Results.here("selector", rows, seeds=[training.seed], details=details)
    write_report(results, out)
    log(f"Use it: graft summarize paper.pdf --selector {folder} --budget {budget.amount}")
    return results


def _examples(documents: Sequence[SummarizedDocument], update: Callable[..., None]) -> list[SelectorExample]:
    """Return the oracle extract of each document; `update` counts them."""
    examples = []
    for item in documents:
        examples.append(selector_example(item.document, item.summary_sentences))
        update(advance=1)
    return examples


def warn_of_abstracts(documents: Sequence[SummarizedDocument], log: Callable[[str], None]) -> None:
    """Log how many documents contain their own abstract, of which a summary may be a copy."""
    count = sum(summarized.document.abstract is not None for summarized in documents)
    if count:
        log(
            f"warning: documents that contain their own abstract: {count:,}. If the human summaries are these "
            "abstracts, selectors only learn to find them: remove the abstracts from the documents."
        )


def warn_of_shared_documents(
    documents: Sequence[SummarizedDocument],
    test: Sequence[SummarizedDocument],
    log: Callable[[str], None],
) -> None:
    """Log how many held-out documents are also learned from, so that their scores say little about others."""
    known = {summarized.document.text for summarized in documents}
    count = sum(summarized.document.text in known for summarized in test)
    if count:
        log(f"warning: held-out documents that are also learned from: {count:,} of {len(test):,}. Hold out others.")

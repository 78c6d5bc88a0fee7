"""The run behind `graft summarize train-writer`: train a writer, and score it on held-out documents.

The writer is a language model: one from scratch, as in the thesis, a pretrained one, or a graft on a frozen backbone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import set_seed
from pydantic import Field, JsonValue
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import default_device, load_backbone
from graftlm.backbone.backbone import move
from graftlm.config import Config
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, Row
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.report import write_report
from graftlm.files.writing import write_atomically
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import FitsOnText, HasHeads, graft_config, new_graft
from graftlm.pipelines.summarize.default_selector import DefaultSelector
from graftlm.pipelines.summarize.held_out import human_row, oracle_row, selector_row, text_row
from graftlm.pipelines.summarize.prompt_layout import PromptLayout
from graftlm.pipelines.summarize.selection import Budget, Selector
from graftlm.pipelines.summarize.selector_run import warn_of_abstracts, warn_of_shared_documents
from graftlm.pipelines.summarize.summarized import SummarizedDocument
from graftlm.pipelines.summarize.variants import Variant, mean_oracle_size, reads_oracle, writer_examples
from graftlm.pipelines.summarize.writer import LanguageModelWriter, SummaryDecoding
from graftlm.pipelines.summarize.writer_training import WriterExample, train_writer
from graftlm.runs.language_run import TokenizerConfig
from graftlm.training import TrainingConfig
from graftlm.training.history import read_history
from graftlm.training.language_model import new_model, read_tokenizer, train_tokenizer

SUMMARIES = "summaries.jsonl"
"""Name of the file with the summaries of the held-out documents, in the folder of a run."""

_BATCH = 4  # held-out documents that are summarized at the same time


class WriterTrainingConfig(Config):
    """Training of a writer.

    Args:
        model: a pretrained model (a name on the hub, or a folder), or the config of a new one: its model_type in
            transformers, and any of its keys.
        tokenizer: for a new model, name or folder of a tokenizer, or its vocab_size, with which one is learned from
            the documents.
        graft: config of a graft that is trained on the frozen model, such as {kind: lora}; None trains all weights.
        variant: whose extracts the writer reads in training and in use: `gm`, `mm` or `gg` (g: oracle, m: selector).
        layout: strings around the parts of a document; None uses the layout for chats if the model has a chat template.
        budget: limit of the selector's extracts, such as `8s` or `200w`; None uses the mean size of the oracle's.
        rest_fraction: fraction of the rows that come from the rest of the documents; None is 0.5, or 0 for a graft
            and for layout.context document.
        decoding: decoding of the summaries; a human summary is cut to its max_new_tokens.
        training: the training loop.
    """

    model: str | dict[str, JsonValue]
    tokenizer: TokenizerConfig | None = None
    graft: dict[str, JsonValue] | None = None
    variant: Variant = "gm"
    layout: PromptLayout | None = None
    budget: str | None = None
    rest_fraction: float | None = Field(None, ge=0, le=1)
    decoding: SummaryDecoding = SummaryDecoding()
    training: TrainingConfig = TrainingConfig(steps=1000)

    def _problems(self) -> Iterator[str]:
        is_new = isinstance(self.model, dict)
        if isinstance(self.model, dict) and not isinstance(self.model.get("model_type"), str):
            yield "a new model needs a model_type, such as gpt2: name one under model"
        if is_new and self.tokenizer is None:
            yield "a new model has no tokenizer: name one, or learn one, as in tokenizer.vocab_size=4096"
        if is_new and self.graft is not None:
            yield "model is a new one, but a graft needs a pretrained one: name it under model, or leave graft out"
        if not is_new and self.tokenizer is not None:
            yield "tokenizer is for a new model, and a pretrained one has its own: leave tokenizer out"
        if self.graft is not None and self.rest_fraction:
            yield "a graft takes the rest of the documents for old text: set rest_fraction to 0, or leave it out"

    @property
    def rest(self) -> float:
        """The fraction of the rows that come from the rest of the documents."""
        if self.rest_fraction is not None:
            return self.rest_fraction
        reads_all = self.layout is not None and self.layout.context == "document"
        return 0.0 if reads_all or self.graft is not None else 0.5


def run_writer_training(
    documents: Sequence[SummarizedDocument],
    test: Sequence[SummarizedDocument],
    out: str | Path,
    config: WriterTrainingConfig,
    *,
    selector: Selector | None = None,
    device: str | None = None,
    progress: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Results:
    """Train a writer, save it in `out/model` or `out/graft`, and write a report with scores on held-out documents.

    The report has rows for the writer, the selector's and the oracle's extracts and the human summaries, each with
    ROUGE and the share of its n-grams that the document has. The summaries are in `out/summaries.jsonl`.

    Args:
        documents: documents with human summaries to learn from.
        test: held-out documents, at least one.
        out: folder of the writer and the report. An interrupted run in it is resumed.
        config: the run.
        selector: selects where the variant reads a model's extracts; None uses the package's own.
        device: torch device of the model; None selects the fastest available one.
        progress: whether to display a progress bar.
        log: called with lines of text about the run.

    Raises:
        DataError: there is no document to learn from, or no held-out one.
        RecipeError: the graft is of a kind that does not learn from prompts and answers, or a budget is in tokens.
        GraftError: see `train_writer` and `load_backbone`.
    """
    if not documents or not test:
        raise DataError(
            f"Documents to learn from: {len(documents)}, held out: {len(test)}, but each needs at least one: add "
            "documents with summaries."
        )
    log(f"Documents: {len(documents):,} to learn from, {len(test):,} held out.")
    warn_of_abstracts([*documents, *test], log)
    warn_of_shared_documents(documents, test, log)
    chosen = selector or DefaultSelector()
    budget = Budget(amount=mean_oracle_size(documents)) if config.budget is None else Budget.read(config.budget)
    examples = writer_examples(documents, config.variant, "training", chosen, budget)
    tests = writer_examples(test, config.variant, "test", chosen, budget)
    with _writer(config, documents, device) as (writer, start):
        identity = {"writer": config.model_dump(mode="json", exclude={"training"}), "start": start}
        parameters = count_parameters(writer.model.parameters())
        log(f"The writer has {parameters:,} parameters and reads {writer.window:,} tokens.")
        folder = train_writer(
            writer,
            examples,
            config.training,
            out,
            rest_fraction=config.rest,
            identity=identity,
            progress=progress,
            log=log,
        )
        texts = _write_all(writer, tests)
    _keep_summaries(Path(out) / SUMMARIES, tests, texts)
    written = text_row(
        "writer",
        f"this writer ({config.variant})",
        texts,
        test,
        [example.extract.text for example in tests],
    )
    rows = [written, selector_row("selector", chosen.name, chosen, budget, test), oracle_row(test), human_row(test)]
    results = _report(out, config, rows, budget, {"training": len(documents), "test": len(test)})
    if reads_oracle(config.variant, "test"):
        log("The variant gg reads the oracle's extracts in the test, so that its scores are an upper bound.")
    by = "" if selector is None else f"--selector {selector.name} "
    log(f"Use it: graft summarize paper.pdf {by}--writer {folder} --budget {_option(budget)}")
    return results


def _report(
    out: str | Path,
    config: WriterTrainingConfig,
    rows: Sequence[Row],
    budget: Budget,
    documents: dict[str, JsonValue],
) -> Results:
    """Write the report of a run and return its results."""
    history = read_history(Path(out) / "history.jsonl")
    details: dict[str, JsonValue] = {
        "losses": {"writer": [[line["step"], line["loss"]] for line in history]},
        "documents": documents,
        "variant": config.variant,
        "budget": str(budget),
    }
    results = Results.here("writer", rows, seeds=[config.training.seed], details=details)
    write_report(results, out)
    return results


def _option(budget: Budget) -> str:
    """Return a budget as an option of the command line."""
    return f"{budget.amount}{budget.unit[0]}"


@contextmanager
def _writer(
    config: WriterTrainingConfig,
    documents: Sequence[SummarizedDocument],
    device: str | None,
) -> Iterator[tuple[LanguageModelWriter, str]]:
    """Yield the untrained writer and what identifies its pretrained weights, and detach its graft at the end."""
    set_seed(config.training.seed)
    place = device or default_device()
    if isinstance(config.model, dict):
        tokenizer = _tokenizer(config, documents)
        model = new_model(config.model, tokenizer, config.training.seed)
        move(model, place)
        name = str(config.model["model_type"])
        yield LanguageModelWriter(model, tokenizer, name, config.layout, config.decoding), "new"
        return
    dtype = "auto" if config.graft is not None else "float32"
    backbone = load_backbone(config.model, dtype=dtype, device=place)
    start = backbone.fingerprint.id
    tokenizer = backbone.need_tokenizer()
    if config.graft is None:
        yield LanguageModelWriter(backbone.model, tokenizer, config.model, config.layout, config.decoding), start
        return
    kind = graft_config({**config.graft})
    graft = new_graft(kind, backbone)
    if isinstance(graft, FitsOnText | HasHeads) or kind.changes_at_end:
        raise RecipeError(
            f"graft: a graft of the kind {kind.kind} with these keys does not learn by predicting summaries alone: "
            "choose another, such as {kind: lora}."
        )
    with GraftedModel(backbone, {"writer": graft}) as model:
        yield LanguageModelWriter(model, tokenizer, config.model, config.layout, config.decoding), start


def _tokenizer(config: WriterTrainingConfig, documents: Sequence[SummarizedDocument]) -> PreTrainedTokenizerBase:
    """Return the named tokenizer, or one that is learned from documents and summaries."""
    tokenizer = config.tokenizer
    assert tokenizer is not None, "the config was checked"
    if tokenizer.name is not None:
        return read_tokenizer(tokenizer.name)
    assert tokenizer.vocab_size is not None, "the config was checked"
    return train_tokenizer(_texts(documents, tokenizer.characters), tokenizer.vocab_size)


def _texts(documents: Sequence[SummarizedDocument], characters: int) -> Iterator[str]:
    """Yield summaries and documents up to a number of characters."""
    for summarized in documents:
        for text in (summarized.summary, summarized.document.text):
            yield text[:characters]
            characters -= min(characters, len(text))


def _write_all(writer: LanguageModelWriter, examples: Sequence[WriterExample]) -> list[str]:
    """Return the summaries of held-out documents, of which a few are written at the same time."""
    texts: list[str] = []
    for first in range(0, len(examples), _BATCH):
        batch = [example.extract for example in examples[first : first + _BATCH]]
        texts.extend(output.text for output in writer.write_batch(batch))
    return texts


def _keep_summaries(path: Path, examples: Sequence[WriterExample], texts: Sequence[str]) -> None:
    """Write the summaries of held-out documents with their extracts and the human summaries."""
    lines = []
    for example, text in zip(examples, texts, strict=True):
        row: Mapping[str, str] = {
            "document": example.extract.document.name,
            "written": text,
            "extract": example.extract.text,
            "summary": example.summary,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines).encode())

"""The verbs that train the selector and the writer of `graft summarize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from graftlm.cli.common import logger, print_report
from graftlm.cli.inputs import AsJson, Device, Quiet, argument, option
from graftlm.errors import RecipeError

if TYPE_CHECKING:
    from graftlm.pipelines.summarize import SummarizedDocument

_HELD_OUT = 0.1
_TABLE = "Documents with human summaries: JSON lines with text or file, and summary."
Table = Annotated[Path, argument("TABLE", _TABLE)]
Keys = Annotated[list[str] | None, argument("KEY=VALUE", "Keys of the training, as in steps=200.")]
TestTable = Annotated[
    Path | None,
    option("TABLE", "Held-out documents with summaries; by default a share of the documents.", "--test"),
]
Share = Annotated[
    float | None,
    option("SHARE", "Share of the documents that is held out, without --test: 0.1 by default.", min=0.01, max=0.9),
]


def train_selector(
    documents: Table,
    keys: Keys = None,
    test: TestTable = None,
    held_out: Share = None,
    out: Annotated[Path, option("DIR", "Output folder.")] = Path("runs/selector"),
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a selector of summarize, and report."""
    from graftlm.backbone import default_device
    from graftlm.config import parse_overridden
    from graftlm.pipelines import summarize as api

    where = "graft summarize train-selector"
    training = parse_overridden(
        lambda values: api.SelectorTrainingConfig.parse(values, where=where), {}, keys or (), where
    )
    learned, tested = _documents(documents, test, held_out, training.seed)
    results = api.run_selector_training(
        learned,
        tested,
        out,
        training,
        device=device or str(default_device()),
        log=logger(quiet=quiet),
        progress=not quiet,
    )
    print_report(results, out, as_json=as_json)


def train_writer(
    documents: Table,
    keys: Annotated[
        list[str] | None,
        argument("KEY=VALUE", "Keys of the training: model, and others as in training.steps=200."),
    ] = None,
    test: TestTable = None,
    held_out: Share = None,
    selector: Annotated[
        Path | None,
        option("DIR", "Folder of a trained selector; by default the package's own."),
    ] = None,
    out: Annotated[Path, option("DIR", "Output folder.")] = Path("runs/writer"),
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a writer of summarize, or a graft that writes, and report."""
    from graftlm.config import parse_overridden
    from graftlm.pipelines import summarize as api

    where = "graft summarize train-writer"
    config = parse_overridden(lambda values: api.WriterTrainingConfig.parse(values, where=where), {}, keys or (), where)
    learned, tested = _documents(documents, test, held_out, config.training.seed)
    results = api.run_writer_training(
        learned,
        tested,
        out,
        config,
        selector=None if selector is None else api.load_selector(selector, device=device),
        device=device,
        progress=not quiet,
        log=logger(quiet=quiet),
    )
    print_report(results, out, as_json=as_json)


def _documents(
    path: Path, test: Path | None, share: float | None, seed: int
) -> tuple[list[SummarizedDocument], list[SummarizedDocument]]:
    """Return the documents to learn from and the held-out ones, of two tables or of one."""
    from graftlm.pipelines.summarize import hold_out, read_summarized

    if test is not None and share is not None:
        raise RecipeError("Both --test and --held-out were given: leave one of them out.")
    documents = read_summarized(path)
    if test is not None:
        return documents, read_summarized(test)
    return hold_out(documents, share or _HELD_OUT, seed)

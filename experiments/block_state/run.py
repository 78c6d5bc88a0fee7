"""Block-state transformers beside their baselines: one size, the same tokens, bits per byte by corpus and length.

`attribution`, the default, takes the block-state layer apart, beside layers of state spaces alone: every row at the
rate that its own search on validation text chose, for every seed, and the loss of words by how far back they last
stood.
Table `1` has every row of the thesis' with the first seed. `placement`, `number` and `state` are the ablations of
Tables 5.2 to 5.4 at the size of Table 1, with the first seed and single-head S4D.

The documents are of three kinds, split by document into training, validation and test text:

- `novels` stand for PG19.
- `code` stands for GitHub: packages of the standard library of this Python, the modules of each joined to one document.
- `documents` stand for arXiv: proposals of Python, Rust, Ethereum and Kubernetes. The test is the two longest of each
  collection, joined, since none has 65,536 tokens; validation the next.
"""

from __future__ import annotations

import operator
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from transformers import AutoTokenizer

from experiments import Options
from experiments.block_state.words import losses_by_distance, word_tokens
from experiments.parents import DOCUMENTS, ENGLISH, read_source, read_texts, up_to
from experiments.sequence_rows import BLOCK_STATE, CONTROLS, LABELS, model_config
from experiments.study import Study, TableRow, aim, check_files, over_seeds, published
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.demo.corpus import source_files, write_documents
from graftlm.evaluation import Aim, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import by_length
from graftlm.io import fill_once
from graftlm.runs.language_run import LanguageDataConfig, LanguageModelRun, LengthsConfig, TokenizerConfig
from graftlm.runs.run import Measurement, Trainee
from graftlm.training import TrainingConfig
from graftlm.training.language_model import train_tokenizer

CORPORA = ("novels", "code", "documents")
TEST_PACKAGE, VALIDATION_PACKAGE = "asyncio", "email"
FILES = (ENGLISH, *DOCUMENTS)


class Corpus(Config):
    """The amount of text.

    Args:
        vocab_size: of the tokenizer.
        characters: of training text in each corpus.
        test_characters: of test text in each corpus.
    """

    vocab_size: int = 1024
    characters: int = 4_000_000
    test_characters: int = 180_000


def make_corpora(options: Options, folder: Path, size: Corpus) -> Path:
    """Write `CORPUS-train.jsonl`, `CORPUS-test.jsonl` and `tokenizer` into `folder`, unless they are there."""
    check_files(options, FILES)
    sources = [str(options.data / name) for name in FILES]
    settings = {"size": size.model_dump(mode="json"), "sources": sources, "python": sys.version}
    return fill_once(folder, settings, lambda folder: _write_corpora(options, folder, size))


def _write_corpora(options: Options, folder: Path, size: Corpus) -> None:
    for name, (train, validation, test) in _texts(options.data).items():
        starts = (text[: max(1, size.characters // 4)] for text in train)
        write_documents(folder / f"{name}-train.jsonl", up_to(starts, size.characters))
        write_documents(folder / f"{name}-validation.jsonl", [validation[: size.test_characters // 3]])
        write_documents(folder / f"{name}-test.jsonl", [test[: size.test_characters]])
    texts = (text[:200_000] for name in CORPORA for text in read_texts(folder / f"{name}-train.jsonl"))
    train_tokenizer(texts, size.vocab_size).save_pretrained(folder / "tokenizer")


def _texts(data: Path) -> dict[str, tuple[list[str], str, str]]:
    """For each corpus, the training documents, one validation text and one test text."""
    novels, packages = read_texts(data / ENGLISH), packages_of(source_files())
    test_package, validation_package = packages.pop(TEST_PACKAGE), packages.pop(VALIDATION_PACKAGE)
    collections, validation, test = [], [], []
    for name in DOCUMENTS:
        texts = sorted(read_texts(data / name), key=len)
        collections.append(texts[-4::-1])  # the longest first
        validation.append(texts[-3])
        test += texts[-2:]
    interleaved = [text for texts in zip(*collections, strict=False) for text in texts]
    return {
        "novels": (novels[:-2], novels[-2], novels[-1]),
        "code": (list(packages.values()), validation_package, test_package),
        "documents": (interleaved, "\n\n".join(validation), "\n\n".join(test)),
    }


def packages_of(files: Sequence[Path]) -> dict[str, str]:
    """The source of each package of the standard library, its modules joined; the largest package is first.

    Modules outside packages are joined to one entry with the empty name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        modules.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    texts = {name: "\n\n".join(map(read_source, sorted(paths))) for name, paths in modules.items()}
    return dict(sorted(texts.items(), key=lambda item: len(item[1]), reverse=True))


NAME = "block-state"
TABLES = ("attribution", "1", "placement", "number", "state")
MIN_SPEEDUP = 1.5
FAR = 128  # tokens: farther back than the window reads
ATTRIBUTION = (
    *("slide", "transformer_xl", "block_recurrent", "slide_ssm", "sh_s4d", "bst_sh_s4d", "sh_delta"),
    *("gss_hybrid", "gss", "gated_delta"),
)
ALL_LABELS = LABELS | CONTROLS


class AttributionRun(LanguageModelRun):
    """A language model that is also measured on words by how far back they last stood.

    Its metrics: `nats_<set>_<distance>` of every test set but the validation ones.

    Args:
        word_window: tokens that the model reads at once.
        distances: upper ends of the distances, in tokens.
    """

    word_window: int
    distances: tuple[int, ...]

    def evaluate(self, trainee: Trainee) -> Measurement:
        """The language model's metrics, and those of words."""
        measurement = super().evaluate(trainee)
        for name, documents in trainee.tests.items():
            if name in CORPORA:
                tokens = word_tokens(trainee.tokenizer, "\n\n".join(document.full_text for document in documents))
                found = losses_by_distance(trainee.model.model, tokens, self.word_window, self.distances)
                measurement.add_metrics({f"nats_{name}_{part}": loss for part, loss in found.items()})
        return measurement


class LongTextConfig(Config):
    """Sizes of models, texts and training.

    Args:
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        length: tokens of a row of training.
        lengths: tokens of the windows that are measured.
        training: of table 1; warm-up and checkpoints follow from the steps.
        attribution: keys of the shape that the table `attribution` changes.
        times: its steps, as a factor on those of table 1.
        rates: that it tries for every row.
        distances: of words, in tokens.
    """

    corpus: Corpus = Field(default_factory=Corpus)
    shape: dict[str, Any]
    parameters: int
    length: int = 1024
    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    training: TrainingConfig
    attribution: dict[str, Any] = Field(default_factory=lambda: {"state_size": 64, "mixer_layers": [1]})
    times: int = 2
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    distances: tuple[int, ...] = (128, 1024, 16_384)


FULL = LongTextConfig(
    corpus=Corpus(vocab_size=512),
    shape={
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "window": 128,
        "mixer_layers": [0, 1],
        "state_size": 16,
        "filters": 32,
        "initializer_range": 0.1,  # 1 / sqrt(width): with 0.02 the attention of small models is too uniform to learn
    },
    parameters=460_000,
    training=TrainingConfig(steps=260, batch_size=4, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
)
QUICK = LongTextConfig(
    corpus=Corpus(vocab_size=300, characters=20_000, test_characters=2_000),
    shape=FULL.shape
    | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"window": 16, "mixer_layers": [0], "filters": 4},
    parameters=18_000,
    length=64,
    lengths=(32, 64, 128),
    training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
    attribution={"mixer_layers": [1]},
    rates=(3e-3,),
    distances=(16, 64, 128),
)


class LongTextStudy(Study):
    """Builds the runs of all tables. Runs with equal settings have equal ids, so tables share them."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.config = QUICK if options.quick else FULL
        lengths, tokens = self.config.lengths, max(4096, self.config.length)
        self.evaluation = LengthsConfig(lengths=list(lengths), limit_tokens=max(lengths) - 1, tokens_per_pass=tokens)
        self.corpora = make_corpora(options, options.out / "corpora", self.config.corpus)
        self.data = LanguageDataConfig(
            train=[self.source(name, "train") for name in CORPORA],
            test={name: [self.source(name, "test")] for name in CORPORA},
            length=self.config.length,
        )
        self.vocab_size = len(AutoTokenizer.from_pretrained(self.corpora / "tokenizer"))

    def source(self, name: str, split: str) -> SourceConfig:
        """The file of one part of a corpus."""
        return SourceConfig(path=str(self.corpora / f"{name}-{split}.jsonl"))

    def attribution_run(self, row: str, seed: int, rate: float) -> AttributionRun:
        """One row of the table `attribution`, measured on validation and test text."""
        config = self.config
        run = self.run(row, seed, times=config.times, **config.attribution)
        validation = {f"validation_{name}": [self.source(name, "validation")] for name in CORPORA}
        lengths = [config.length, config.lengths[-2]]
        changes: dict[str, Any] = {
            "id": f"attribution_{run.id}_lr{rate:g}",
            "data": run.data.model_copy(update={"test": validation | run.data.test}),
            "training": run.training.model_copy(update={"learning_rate": rate}),
            "evaluation": run.evaluation.model_copy(update={"lengths": lengths}),
        }
        words = {"word_window": config.lengths[-2], "distances": config.distances}
        return AttributionRun(**dict(run) | changes | words)

    def run(self, row: str, seed: int, *, times: int = 1, **changes: Any) -> LanguageModelRun:
        """One row for one seed, with `times` the steps; `changes` are to the shape."""
        config = self.config
        changes = {name: value for name, value in changes.items() if config.shape.get(name) != value}
        shape = config.shape | {"kernel_length": config.length, "vocab_size": self.vocab_size} | changes
        steps = times * config.training.steps
        training = {"steps": steps, "warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 4)}
        training["seed"] = seed
        parts = [re.sub(r"\W+", "-", f"{name} {value}").strip("-") for name, value in changes.items()]
        return LanguageModelRun(
            id="_".join([row, *parts, f"{steps}-steps", f"s{seed}"]),
            label=ALL_LABELS[row],
            model=model_config(row, shape, config.parameters),
            tokenizer=TokenizerConfig(name=str(self.corpora / "tokenizer")),
            data=self.data.model_copy(update={"seed": seed}),
            training=config.training.model_copy(update=training),
            evaluation=self.evaluation,
            device=self.options.device,
        )

    def table(self, name: str) -> list[TableRow]:
        """The rows of a table: of `attribution` for every seed, of the others for the first one."""
        first, layers = self.seeds[0], range(self.config.shape["num_hidden_layers"])
        middle = len(layers) // 2
        if name == "1":
            return [TableRow(row, label, [self.run(row, first)]) for row, label in LABELS.items()]
        if name == "attribution":
            candidates = {
                row: [self.attribution_run(row, first, rate) for rate in self.config.rates] for row in ATTRIBUTION
            }
            chosen = self.choose(candidates, [f"bpb_validation_{name}" for name in CORPORA], "the search")
            return [
                TableRow(
                    f"attribution-{row}",
                    ALL_LABELS[row],
                    [self.attribution_run(row, seed, run.training.learning_rate) for seed in self.seeds],
                )
                for row, run in chosen.items()
            ]
        outwards = sorted(layers, key=lambda i: (abs(i - middle), i))
        changes = {
            "placement": {i: (f"one BST layer, index {i}", {"mixer_layers": [i]}) for i in layers},
            "number": {
                n: (f"BST layers: {n}", {"mixer_layers": sorted(outwards[:n])}) for n in range(1, len(layers) + 1)
            },
            "state": {n: (f"state size {n}", {"state_size": n}) for n in (8, 16, 32, 64)},
        }
        return [
            TableRow(f"{name}-{n}", label, [self.run("bst_sh_s4d", first, **change)])
            for n, (label, change) in changes[name].items()
        ]


def run(options: Options) -> Results:
    """Run the requested tables, by default the first."""
    tables = options.chosen(TABLES, ("attribution",))
    study = LongTextStudy(options)
    table_rows = [row for table in tables for row in study.table(table)]
    measured = study.execute([run for row in table_rows for run in row.runs], NAME)
    rows = [over_seeds([measured[run.id] for run in row.runs], row.id, row.label) for row in table_rows]
    ids = {row.id for row in table_rows}
    prefixes = tuple(f"{table}-" for table in TABLES[2:])
    plotted = {row for row in ids if not row.startswith(prefixes)} or ids  # ablations are in the report only
    first = {row.id: row.runs[0] for row in table_rows}
    details = study.evidence({row.id: row.runs for row in table_rows}) | {
        "wall_s": study.seconds,
        "config": study.config.model_dump(mode="json"),
        "tokens": {name: run.training.steps * run.training.batch_size * run.data.length for name, run in first.items()},
        "losses": {name: measured[run.id].details["losses"] for name, run in first.items() if name in plotted},
    }
    plots = {}
    for corpus in CORPORA:
        names = {length: f"bpb_{corpus}_at_{length}" for length in study.config.lengths}
        curves = {
            row.label: [(n, row.metrics[name]) for n, name in names.items() if name in row.metrics]
            for row in rows
            if row.id in plotted
        }
        plots[f"length-{corpus}"] = by_length(curves, trained=study.config.length, title=corpus)
    return study.write(
        NAME, rows, aims=aims(rows, details["by_seed"]), paper=published(__file__, ids), details=details, plots=plots
    )


def aims(rows: Sequence[Row], by_seed: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Aim]:
    """Of table 1, and of `attribution`: what a block-state layer adds to words that stand beyond the window."""
    by_id = {row.id: row for row in rows}
    found = _table_aims(by_id) if by_id.keys() >= LABELS.keys() else []
    if by_id.keys() >= {"attribution-slide_ssm", "attribution-bst_sh_s4d"}:
        with_states, without = (list(by_seed[f"attribution-{row}"].values()) for row in ("bst_sh_s4d", "slide_ssm"))
        names = [name for name in with_states[0] if name.startswith("nats_") and "_to_" in name]
        for name in (name for name in names if int(name.rpartition("_")[2]) > FAR):
            difference = combine_seeds([a[name] - b[name] for a, b in zip(with_states, without, strict=True)])
            text = f"{name}: BST less the state space behind the embeddings, upper end of the interval"
            found.append(aim(text, name, 0.0, difference.high))
    return found


def _table_aims(rows: Mapping[str, Row]) -> list[Aim]:
    """The aims of one table, given its rows by model."""
    table_aims = []
    for corpus in CORPORA:
        metric = f"bpb_{corpus}"
        values = {name: value_of(rows[name].metrics[metric]) for name in LABELS}
        best = min(BLOCK_STATE, key=values.__getitem__)
        text = f"{corpus}: the best BST ({rows[best].label}) is"
        slide, recurrent = f"{text} below the sliding window", f"{text} no worse than block-recurrent"
        table_aims += [
            aim(slide, metric, values["slide"], values[best]),
            aim(recurrent, metric, values["block_recurrent"], values[best], operator.le),
        ]
    metric = "train_tokens_per_s"
    fast, slow = (value_of(rows[name].metrics[metric]) for name in ("bst_sh_s4d", "block_recurrent"))
    text = f"{rows['bst_sh_s4d'].label} trains at least {MIN_SPEEDUP:g} times as fast as block-recurrent"
    return [*table_aims, aim(text, metric, MIN_SPEEDUP, fast / slow, operator.ge)]

"""Block-state transformers beside their baselines: one size, the same tokens, bits per byte by corpus and length.

Table `1` has every row with the first seed: about half an hour of a core. `longer` has some rows for every seed, with
five times the tokens and one layer of context states in the middle. `placement`, `number` and `state` are the ablations
of Tables 5.2 to 5.4 at the size of Table 1, with the first seed and single-head S4D.

The documents are of three kinds, split by document into training and test text:

- `novels` stand for PG19.
- `code` stands for GitHub: packages of the standard library of this Python, the modules of each joined to one document.
- `documents` stand for arXiv: proposals of Python, Rust, Ethereum and Kubernetes. The test is the two longest of each
  collection, joined, since none has 65,536 tokens.
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
from experiments.parents import DOCUMENTS, ENGLISH, read_source, read_texts, up_to
from experiments.sequence_rows import BLOCK_STATE, LABELS, model_config
from experiments.study import Study, TableRow, aim, check_files, over_seeds, published
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.demo.corpus import source_files, write_documents
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.plots import by_length
from graftlm.io import fill_once
from graftlm.runs.language_run import LanguageDataConfig, LanguageModelRun, LengthsConfig, TokenizerConfig
from graftlm.training import TrainingConfig
from graftlm.training.language_model import train_tokenizer

CORPORA = ("novels", "code", "documents")
TEST_PACKAGE = "asyncio"
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
    for name, (train, test) in _texts(options.data).items():
        starts = (text[: max(1, size.characters // 4)] for text in train)
        write_documents(folder / f"{name}-train.jsonl", up_to(starts, size.characters))
        write_documents(folder / f"{name}-test.jsonl", [test[: size.test_characters]])
    texts = (text[:200_000] for name in CORPORA for text in read_texts(folder / f"{name}-train.jsonl"))
    train_tokenizer(texts, size.vocab_size).save_pretrained(folder / "tokenizer")


def _texts(data: Path) -> dict[str, tuple[list[str], str]]:
    """For each corpus, the training documents and one test text."""
    novels, packages = read_texts(data / ENGLISH), packages_of(source_files())
    test_package = packages.pop(TEST_PACKAGE)
    collections, test = [], []
    for name in DOCUMENTS:
        texts = sorted(read_texts(data / name), key=len)
        collections.append(texts[-3::-1])  # the longest first
        test += texts[-2:]
    interleaved = [text for texts in zip(*collections, strict=False) for text in texts]
    return {
        "novels": (novels[:-1], novels[-1]),
        "code": (list(packages.values()), test_package),
        "documents": (interleaved, "\n\n".join(test)),
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
TABLES = ("1", "longer", "placement", "number", "state")
MIN_SPEEDUP = 1.5
LONGER = ("slide", "block_recurrent", "bst_sh_s4d", "bst_mf_unstructured")
FIRST_SEED_ONLY = ("bst_mf_unstructured",)  # of LONGER


class LongTextConfig(Config):
    """Sizes of models, texts and training.

    Args:
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        length: tokens of a row of training.
        lengths: tokens of the windows that are measured.
        training: of table 1; warm-up and checkpoints follow from the steps.
        longer: factor on the steps of the table `longer`.
    """

    corpus: Corpus = Field(default_factory=Corpus)
    shape: dict[str, Any]
    parameters: int
    length: int = 1024
    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    training: TrainingConfig
    longer: int = 5


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
    longer=2,
)


class LongTextStudy(Study):
    """Builds the runs of all tables. Runs with equal settings have equal ids, so tables share them."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.config = QUICK if options.quick else FULL
        lengths, tokens = self.config.lengths, max(4096, self.config.length)
        self.evaluation = LengthsConfig(lengths=list(lengths), limit_tokens=max(lengths) - 1, tokens_per_pass=tokens)
        self.corpora = make_corpora(options, options.out / "corpora", self.config.corpus)
        train, test = (
            [SourceConfig(path=str(self.corpora / f"{name}-{split}.jsonl")) for name in CORPORA]
            for split in ("train", "test")
        )
        tests = {name: [source] for name, source in zip(CORPORA, test, strict=True)}
        self.data = LanguageDataConfig(train=train, test=tests, length=self.config.length)
        self.vocab_size = len(AutoTokenizer.from_pretrained(self.corpora / "tokenizer"))

    def run(self, row: str, seed: int, *, times: int = 1, **changes: Any) -> LanguageModelRun:
        """One row for one seed, with `times` the steps; `changes` are to the shape."""
        config = self.config
        changes = {name: value for name, value in changes.items() if config.shape[name] != value}
        shape = config.shape | {"kernel_length": config.length, "vocab_size": self.vocab_size} | changes
        steps = times * config.training.steps
        training = {"steps": steps, "warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 4)}
        training["seed"] = seed
        parts = [re.sub(r"\W+", "-", f"{name} {value}").strip("-") for name, value in changes.items()]
        return LanguageModelRun(
            id="_".join([row, *parts, f"{steps}-steps", f"s{seed}"]),
            label=LABELS[row],
            model=model_config(row, shape, config.parameters),
            tokenizer=TokenizerConfig(name=str(self.corpora / "tokenizer")),
            data=self.data.model_copy(update={"seed": seed}),
            training=config.training.model_copy(update=training),
            evaluation=self.evaluation,
            device=self.options.device,
        )

    def table(self, name: str) -> list[TableRow]:
        """The rows of a table: of `longer` most are for every seed, of the others all are for the first one."""
        first, times, layers = self.seeds[0], self.config.longer, range(self.config.shape["num_hidden_layers"])
        middle = len(layers) // 2
        if name == "1":
            return [TableRow(row, label, [self.run(row, first)]) for row, label in LABELS.items()]
        if name == "longer":
            seeds = {row: self.seeds[: 1 if row in FIRST_SEED_ONLY else None] for row in LONGER}
            runs = {
                row: [self.run(row, seed, times=times, mixer_layers=[middle]) for seed in seeds[row]] for row in LONGER
            }
            label = f"{times} times the tokens, one layer"
            return [TableRow(f"longer-{row}", f"{LABELS[row]}, {label}", runs[row]) for row in LONGER]
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
    tables = options.chosen(TABLES, ("1",))
    study = LongTextStudy(options)
    table_rows = [row for table in tables for row in study.table(table)]
    measured = study.execute([run for row in table_rows for run in row.runs], NAME)
    rows = [over_seeds([measured[run.id] for run in row.runs], row.id, row.label) for row in table_rows]
    ids = {row.id for row in table_rows}
    plotted = ids & LABELS.keys() or ids  # the main table if it is there; ablations are in the report only
    first = {row.id: row.runs[0] for row in table_rows}
    details = {
        "wall_s": study.seconds,
        "config": study.config.model_dump(mode="json"),
        "tokens": {name: run.training.steps * run.training.batch_size * run.data.length for name, run in first.items()},
        "losses": {name: measured[run.id].details["losses"] for name, run in first.items() if name in plotted},
    }
    plots = {}
    for corpus in CORPORA:
        names = {length: f"bpb_{corpus}_at_{length}" for length in study.config.lengths}
        curves = {row.label: [(n, row.metrics[names[n]]) for n in names] for row in rows if row.id in plotted}
        plots[f"length-{corpus}"] = by_length(curves, trained=study.config.length, title=corpus)
    return study.write(NAME, rows, aims=aims(rows), paper=published(__file__, ids), details=details, plots=plots)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """On every corpus, the best block-state row is below the sliding window and block-recurrent; and it is faster."""
    by_id = {row.id: row for row in rows}
    tables = {"": tuple(LABELS), "longer-": LONGER}
    return [
        aim
        for prefix, names in tables.items()
        if {prefix + row for row in names} <= by_id.keys()
        for aim in _table_aims({row: by_id[prefix + row] for row in names})
    ]


def _table_aims(rows: Mapping[str, Row]) -> list[Aim]:
    """The aims of one table, given its rows by model."""
    table_aims = []
    for corpus in CORPORA:
        metric = f"bpb_{corpus}"
        values = {name: value_of(row.metrics[metric]) for name, row in rows.items()}
        best = min((name for name in rows if name in BLOCK_STATE), key=values.__getitem__)
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

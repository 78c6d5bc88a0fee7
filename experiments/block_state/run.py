"""Block-state transformers taken apart, beside layers of state spaces alone and other memories of the text before.

All rows have one size and read the same tokens. Each has the rate that its own search on validation text chose, for
every seed. They are measured in bits per byte, and on words by how far back they last stood.

The documents are of three kinds, split by document into training, validation and test text:

- `novels` stand for PG19.
- `code` stands for GitHub: packages of the standard library of this Python, the modules of each joined to one document.
- `documents` stand for arXiv: proposals of Python, Rust, Ethereum and Kubernetes. Of the longest ones, joined, the test
  reads the first characters: two Python proposals. So does validation, of a third one.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from transformers import AutoTokenizer

from experiments import Options
from experiments.block_state.words import losses_by_distance, word_tokens
from experiments.parents import DOCUMENTS, ENGLISH, read_source, read_texts, up_to
from experiments.sequence_rows import CONTROLS, LABELS, model_config
from experiments.study import Study, aim, check_files, over_seeds
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.demo.corpus import source_files, write_documents
from graftlm.evaluation import Aim, Interval, Results, combine_seeds
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.language_run import LanguageDataConfig, LanguageModelRun, LengthsConfig, TokenizerConfig
from graftlm.runs.run import Trainee
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
FAR = 128  # tokens that the window reads back in one layer
BLOCK_STATE = ("bst_sh_s4d", "sh_s4d", "sh_delta")
ROWS = ("slide", "transformer_xl", "block_recurrent", "slide_ssm", *BLOCK_STATE, "sh_delta_reset")
ROWS += ("gss_hybrid", "gss", "gated_delta")
ALL_LABELS = LABELS | CONTROLS
TABLES = ("attribution", "scale", "window")


class Variant(NamedTuple):
    """Another size or window: how its models differ from those of the attribution, and its rates less a factor."""

    label: str = ""
    shape: Mapping[str, Any] = {}
    size: float = 1.0
    rate: float = 1.0


VARIANTS = {  # the thesis' figures 5.5 and 5.4, right
    "": Variant(),
    "width192": Variant("width 192", {"hidden_size": 192, "initializer_range": 0.07}, 3.8, 0.5),
    "width384": Variant("width 384", {"hidden_size": 384, "initializer_range": 0.05}, 15.0, 0.25),
    "window32": Variant("window 32", {"window": 32}),
    "window512": Variant("window 512", {"window": 512}),
}
VARIED = {
    "scale": ("slide", "transformer_xl", "block_recurrent", "slide_ssm", "sh_delta", "gss_hybrid"),
    "window": ("slide", "block_recurrent", "sh_delta"),
}


def cells(tables: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By id, the row and the variant of what some of the tables show."""
    shown = [(row, "") for row in ROWS if "attribution" in tables]
    shown += [(row, name) for name in ("width192", "width384") for row in VARIED["scale"] if "scale" in tables]
    shown += [("sh_delta_reset", "width192")] if "scale" in tables else []
    shown += [(row, name) for name in ("window32", "window512") for row in VARIED["window"] if "window" in tables]
    return {f"{row}_{name}" if name else row: (row, name) for row, name in shown}


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
        for name, documents in trainee.evaluation.tests.items():
            if name in CORPORA:
                tokens = word_tokens(
                    trainee.evaluation.tokenizer, "\n\n".join(document.full_text for document in documents)
                )
                losses = losses_by_distance(trainee.model.model, tokens, self.word_window, self.distances)
                measurement.add_metrics({f"nats_{name}_{part}": loss for part, loss in losses.items()})
        return measurement


class LongTextConfig(Config):
    """Sizes of models, texts and training.

    Args:
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        length: tokens of a row of training.
        lengths: tokens of the windows that are measured.
        tested: tokens of a test text that are measured in bits per byte.
        training: warm-up and checkpoints follow from the steps.
        rates: that are tried for every row.
        distances: of words, in tokens.
    """

    corpus: Corpus = Field(default_factory=Corpus)
    shape: dict[str, Any]
    parameters: int
    length: int = 1024
    lengths: tuple[int, ...] = (1024, 16_384)
    tested: int = 65_535
    training: TrainingConfig
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    distances: tuple[int, ...] = (128, 1024, 16_384)


FULL = LongTextConfig(
    corpus=Corpus(vocab_size=512),
    shape={
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "window": 128,
        "mixer_layers": [1],
        "state_size": 64,
        "filters": 32,
        "initializer_range": 0.1,  # 1 / sqrt(width): with 0.02 the attention of small models is too uniform to learn
    },
    parameters=460_000,
    training=TrainingConfig(steps=520, batch_size=4, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
)
QUICK = LongTextConfig(
    corpus=Corpus(vocab_size=300, characters=20_000, test_characters=2_000),
    shape=FULL.shape
    | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"window": 16, "filters": 4},
    parameters=18_000,
    length=64,
    lengths=(64, 128),
    tested=127,
    training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
    rates=(3e-3,),
    distances=(16, 64, 128),
)


class LongTextStudy(Study):
    """Builds the runs."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.config = config = QUICK if options.quick else FULL
        self.corpora = make_corpora(options, options.out / "corpora", config.corpus)
        self.vocab_size = len(AutoTokenizer.from_pretrained(self.corpora / "tokenizer"))
        parts = {name: [self.source(name, "test")] for name in CORPORA}
        self.tests = {f"validation_{name}": [self.source(name, "validation")] for name in CORPORA} | parts

    def source(self, name: str, split: str) -> SourceConfig:
        """The file of one part of a corpus."""
        return SourceConfig(path=str(self.corpora / f"{name}-{split}.jsonl"))

    def run(self, row: str, seed: int, rate: float, variant: str = "") -> AttributionRun:
        """One row at one rate, measured on validation and test text."""
        config, steps = self.config, self.config.training.steps
        varied = Variant() if self.options.quick else VARIANTS[variant]
        shape = {**config.shape, "kernel_length": config.length, "vocab_size": self.vocab_size, **varied.shape}
        training = {"warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 4), "seed": seed}
        train = [self.source(name, "train") for name in CORPORA]
        return AttributionRun(
            id=f"{row}_{variant}_lr{rate:g}_s{seed}" if variant else f"{row}_lr{rate:g}_s{seed}",
            label=ALL_LABELS[row] + (f", {VARIANTS[variant].label}" if variant else ""),
            model=model_config(row, shape, round(config.parameters * varied.size)),
            tokenizer=TokenizerConfig(name=str(self.corpora / "tokenizer")),
            data=LanguageDataConfig(train=train, test=self.tests, length=config.length, seed=seed),
            training=config.training.model_copy(update=training | {"learning_rate": rate}),
            evaluation=LengthsConfig(
                lengths=list(config.lengths), limit_tokens=config.tested, tokens_per_pass=max(4096, config.length)
            ),
            device=self.options.device,
            word_window=config.lengths[-1],
            distances=config.distances,
        )


VALIDATION = [f"bpb_validation_{name}" for name in CORPORA]


def run(options: Options) -> Results:
    """Search each row's rate, and measure it for every seed."""
    study, shown = LongTextStudy(options), cells(options.chosen(TABLES, default=("attribution",)))
    candidates = {
        name: [study.run(row, study.seeds[0], rate * VARIANTS[of].rate, of) for rate in study.config.rates]
        for name, (row, of) in shown.items()
    }
    chosen = study.choose(candidates, VALIDATION, "the search")
    rates = {name: run.training.learning_rate for name, run in chosen.items()}
    runs = {name: [study.run(row, seed, rates[name], of) for seed in study.seeds] for name, (row, of) in shown.items()}
    study.execute([run for of_row in runs.values() for run in of_row], NAME)
    measured = {name: [study.measured[run.id] for run in of_row] for name, of_row in runs.items()}
    rows = [over_seeds(measured[name], name, runs[name][0].label) for name in shown]
    details = study.evidence(runs) | {"rates": rates, "wall_s": study.seconds}
    details["config"] = study.config.model_dump(mode="json")
    first = {name: of_row[0] for name, of_row in runs.items()}
    details["tokens"] = {
        name: run.training.steps * run.training.batch_size * run.data.length for name, run in first.items()
    }
    details["losses"] = {name: of_row[0].details["losses"] for name, of_row in measured.items()}
    over = attribution(details, shown)
    best = {name: details["best_block_state"][of] for name, (row, of) in shown.items() if row == "slide_ssm"}
    shown_aims = [each for rival, name in best.items() for each in aims(name, rival, over[rival])]
    return study.write(NAME, rows, aims=shown_aims, details=details)


def attribution(details: dict[str, Any], shown: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, Interval]]:
    """The best block-state row of each variant on validation text, less its other rows; the details keep both."""
    first = {name: next(iter(seeds.values())) for name, seeds in details["by_seed"].items()}
    over, best = {}, {}
    for variant in dict.fromkeys(of for _, of in shown.values()):
        names = {row: name for name, (row, of) in shown.items() if of == variant}
        own = [names[row] for row in BLOCK_STATE if row in names]
        best[variant] = min(own, key=lambda name: sum(first[name][metric] for metric in VALIDATION))
        others = [name for name in names.values() if name != best[variant]]
        over |= {name: differences(details["by_seed"], best[variant], name) for name in others}
    dumped = {rival: {name: interval.model_dump() for name, interval in of.items()} for rival, of in over.items()}
    details |= {"best_block_state": best, "differences": dumped}
    return over


def differences(by_seed: Mapping[str, Mapping[str, Mapping[str, float]]], row: str, rival: str) -> dict[str, Interval]:
    """A row's bits and nats less those of a rival, paired over seeds; below 0 the row is better.

    `NAME_less_first` is the difference of words at a distance less that of words that stand for the first time.
    """
    pairs = list(zip(by_seed[row].values(), by_seed[rival].values(), strict=True))
    names = [name for name in pairs[0][0] if name.startswith(("nats_", "bpb_")) and "validation" not in name]
    by_name = {name: [own[name] - other[name] for own, other in pairs] for name in names}
    for name in [name for name in names if "_to_" in name]:
        first = by_name[f"{name.partition('_to_')[0]}_first"]
        by_name[f"{name}_less_first"] = [far - near for far, near in zip(by_name[name], first, strict=True)]
    return {name: combine_seeds(values) for name, values in by_name.items()}


def aims(best: str, rival: str, over_state_space: Mapping[str, Interval]) -> list[Aim]:
    """What the best block-state row adds to words that last stood beyond the window."""
    shown = []
    for name, difference in over_state_space.items():
        if "_to_" in name and not name.endswith("_first") and int(name.rpartition("_")[2]) > FAR:
            text = f"{name}: {best} less the window with a state space at the embeddings, {rival}, its upper end"
            shown.append(aim(text, name, 0.0, difference.high))
    return shown

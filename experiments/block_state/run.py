"""An ablation of block-state transformers, compared with state spaces alone and other memories of earlier text.

All rows have the same size and read the same tokens. Each has the learning rate that its own search on validation text
chose, for every seed. They are measured in bits per byte, and in nats per word by the distance to its last occurrence.

The documents are of three kinds, divided by document into training, validation and test text:

- `novels` replace PG19.
- `code` replaces GitHub: packages of this Python's standard library, the modules of each joined to one document.
- `documents` replace arXiv: proposals of Python, Rust, Ethereum and Kubernetes. The test reads the beginning of the
  longest ones, joined: two Python proposals. Validation reads the beginning of others.
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
from experiments.python_texts import source_files, write_documents
from experiments.sequence_rows import CONTROLS, LABELS, model_config
from experiments.study import Study, aim, all_runs, check_files, over_seeds
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.evaluation import Aim, Interval, Results, combine_seeds
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.language_run import LanguageDataConfig, LanguageModelRun, LengthsConfig, TokenizerConfig
from graftlm.runs.run import Trainee
from graftlm.training import TrainingConfig
from graftlm.training.language_model import train_tokenizer

CORPORA = ("novels", "code", "documents")
TEST_PACKAGE = "asyncio"
VALIDATION_PACKAGE = "email"
FILES = (ENGLISH, *DOCUMENTS)


class Corpus(Config):
    """Amounts of text.

    Args:
        vocab_size: number of tokens of the tokenizer.
        characters: characters of training text in each corpus.
        test_characters: characters of test text in each corpus; validation takes a third.
    """

    vocab_size: int = 1024
    characters: int = 4_000_000
    test_characters: int = 180_000


class CorpusTexts(NamedTuple):
    """Texts of a corpus.

    Attributes:
        train: training documents.
        validation: validation text.
        test: test text.
    """

    train: list[str]
    validation: str
    test: str


def make_corpora(options: Options, folder: Path, size: Corpus) -> Path:
    """Write the texts of every corpus and `tokenizer` into `folder`, unless they exist."""
    check_files(options, FILES)
    settings = {
        "size": size.model_dump(mode="json"),
        "sources": [str(options.data / name) for name in FILES],
        "python": sys.version,
    }

    def fill(folder: Path) -> None:
        _write_corpora(options, folder, size)

    return fill_once(folder, settings, fill)


def _write_corpora(options: Options, folder: Path, size: Corpus) -> None:
    longest = max(1, size.characters // 4)
    for name, texts in _texts(options.data).items():
        starts = [text[:longest] for text in texts.train]
        train = up_to(starts, size.characters)
        validation = texts.validation[: size.test_characters // 3]
        test = texts.test[: size.test_characters]
        write_documents(folder / f"{name}-train.jsonl", train)
        write_documents(folder / f"{name}-validation.jsonl", [validation])
        write_documents(folder / f"{name}-test.jsonl", [test])
    starts = []
    for name in CORPORA:
        starts += [text[:200_000] for text in read_texts(folder / f"{name}-train.jsonl")]
    tokenizer = train_tokenizer(starts, size.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")


def _texts(data: Path) -> dict[str, CorpusTexts]:
    """Return the texts of each corpus."""
    novels = read_texts(data / ENGLISH)
    packages = packages_of(source_files())
    test_package = packages.pop(TEST_PACKAGE)
    validation_package = packages.pop(VALIDATION_PACKAGE)
    collections = []
    validation = []
    test = []
    for name in DOCUMENTS:
        texts = sorted(read_texts(data / name), key=len)
        collections.append(texts[-4::-1])  # the longest first
        validation.append(texts[-3])
        test += texts[-2:]
    interleaved = []
    for one_of_each in zip(*collections, strict=False):
        interleaved.extend(one_of_each)
    return {
        "novels": CorpusTexts(novels[:-2], novels[-2], novels[-1]),
        "code": CorpusTexts(list(packages.values()), validation_package, test_package),
        "documents": CorpusTexts(interleaved, "\n\n".join(validation), "\n\n".join(test)),
    }


def packages_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the source of each package of the standard library, its modules joined, the largest package first.

    Modules outside packages are joined to one entry with the empty name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        package = parts[0] if len(parts) > 1 else ""
        modules.setdefault(package, []).append(path)
    texts = {}
    for name, paths in modules.items():
        texts[name] = "\n\n".join(read_source(path) for path in sorted(paths))
    largest_first = sorted(texts, key=lambda name: len(texts[name]), reverse=True)
    return {name: texts[name] for name in largest_first}


NAME = "block-state"
FAR = 128  # tokens that the window reads back in one layer
BLOCK_STATE = ("bst_sh_s4d", "sh_s4d", "sh_delta")
ROWS = (
    "slide",
    "transformer_xl",
    "block_recurrent",
    "slide_ssm",
    *BLOCK_STATE,
    "sh_delta_reset",
    "gss_hybrid",
    "gss",
    "gated_delta",
)
ALL_LABELS = LABELS | CONTROLS
LAYOUTS = ("slide", "bst_sh_s4d", "bst_mh_s4d", "bst_mf_s4d", "bst_sh_unstructured", "bst_mf_unstructured")
"""The context states and kernels of Table 5.1 of the thesis, beside the sliding window."""
TABLES = ("attribution", "scale", "window", "layouts")


class Variant(NamedTuple):
    """Another size or window.

    Attributes:
        label: label of the variant.
        shape: keys in which its model configs differ.
        size: factor on the number of parameters.
        rate: factor on the learning rates of the search.
    """

    label: str = ""
    shape: Mapping[str, Any] = {}
    size: float = 1.0
    rate: float = 1.0


# Figures 5.5 and 5.4 (right) of the thesis.
VARIANTS = {
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
    """Return row and variant of the cells of tables, by the cell's id."""
    shown = []
    if "attribution" in tables:
        shown += [(row, "") for row in ROWS]
    if "layouts" in tables:
        shown += [(row, "") for row in LAYOUTS]
    if "scale" in tables:
        shown += _pairs(VARIED["scale"], ("width192", "width384"))
        shown.append(("sh_delta_reset", "width192"))
    if "window" in tables:
        shown += _pairs(VARIED["window"], ("window32", "window512"))
    return {f"{row}_{name}" if name else row: (row, name) for row, name in shown}


def _pairs(rows: Sequence[str], variants: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs of a row and a variant, ordered by variant."""
    return [(row, variant) for variant in variants for row in rows]


class AttributionRun(LanguageModelRun):
    """A language model that is also measured on words by the distance to their last occurrence.

    Its additional metrics are `nats_<set>_<distance>` for every test set except the validation sets.

    Args:
        word_window: tokens of the windows in which words are measured.
        distances: upper ends of the distances, in tokens.
    """

    word_window: int
    distances: tuple[int, ...]

    def evaluate(self, trainee: Trainee) -> Measurement:
        """Return the language model's metrics, and those of words."""
        measurement = super().evaluate(trainee)
        for name, documents in trainee.evaluation.tests.items():
            if name not in CORPORA:
                continue
            text = "\n\n".join(document.full_text for document in documents)
            tokens = word_tokens(trainee.evaluation.tokenizer, text)
            losses = losses_by_distance(trainee.model.model, tokens, self.word_window, self.distances)
            measurement.add_metrics({f"nats_{name}_{part}": loss for part, loss in losses.items()})
        return measurement


class LongTextConfig(Config):
    """Sizes of models, texts and training.

    Args:
        corpus: amounts of text.
        shape: keys of the model config that all rows share.
        parameters: parameters of every row's model, up to rounding.
        length: tokens of a row of training.
        lengths: tokens of the windows in which bits per byte are measured.
        tested: tokens of a test text that are measured in bits per byte.
        training: training of every row; warm-up and checkpoints follow from its steps.
        rates: learning rates of the search.
        distances: upper ends of the distances of words, in tokens.
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
    shape={
        **FULL.shape,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "window": 16,
        "filters": 4,
    },
    parameters=18_000,
    length=64,
    lengths=(64, 128),
    tested=127,
    training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
    rates=(3e-3,),
    distances=(16, 64, 128),
)


class LongTextStudy(Study):
    """The runs of the experiment.

    Attributes:
        config: sizes of models, texts and training.
        corpora: folder of the texts.
        vocab_size: number of tokens of the tokenizer.
        tests: validation and test texts, by name.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.config = QUICK if options.quick else FULL
        self.corpora = make_corpora(options, options.out / "corpora", self.config.corpus)
        self.vocab_size = len(AutoTokenizer.from_pretrained(self.corpora / "tokenizer"))
        self.tests = {}
        for name in CORPORA:
            self.tests[f"validation_{name}"] = [self.source(name, "validation")]
        for name in CORPORA:
            self.tests[name] = [self.source(name, "test")]

    def source(self, name: str, split: str) -> SourceConfig:
        """Return the source config of one part of a corpus."""
        return SourceConfig(path=str(self.corpora / f"{name}-{split}.jsonl"))

    def run(self, row: str, seed: int, rate: float, variant: str = "") -> AttributionRun:
        """Return the run of one row at one rate, measured on validation and test text."""
        config = self.config
        varied = Variant() if self.options.quick else VARIANTS[variant]
        shape = {
            **config.shape,
            "kernel_length": config.length,
            "vocab_size": self.vocab_size,
            **varied.shape,
        }
        name = row
        label = ALL_LABELS[row]
        if variant:
            name = f"{row}_{variant}"
            label = f"{label}, {VARIANTS[variant].label}"
        return AttributionRun(
            id=f"{name}_lr{rate:g}_s{seed}",
            label=label,
            model=model_config(row, shape, round(config.parameters * varied.size)),
            tokenizer=TokenizerConfig(name=str(self.corpora / "tokenizer")),
            data=LanguageDataConfig(
                train=[self.source(corpus, "train") for corpus in CORPORA],
                test=self.tests,
                length=config.length,
                seed=seed,
            ),
            training=self._training(rate, seed),
            evaluation=LengthsConfig(
                lengths=list(config.lengths),
                limit_tokens=config.tested,
                tokens_per_pass=max(4096, config.length),
            ),
            device=self.options.device,
            word_window=config.lengths[-1],
            distances=config.distances,
        )

    def _training(self, rate: float, seed: int) -> TrainingConfig:
        training = self.config.training
        changes = {
            "learning_rate": rate,
            "warmup_steps": max(1, training.steps // 20),
            "checkpoint_every": max(1, training.steps // 4),
            "seed": seed,
        }
        return training.model_copy(update=changes)


VALIDATION = [f"bpb_validation_{name}" for name in CORPORA]


def run(options: Options) -> Results:
    """Search each row's rate, and measure it for every seed."""
    study = LongTextStudy(options)
    shown = cells(options.chosen(TABLES, default=("attribution",)))
    candidates = {}
    for name, (row, variant) in shown.items():
        rates = [rate * VARIANTS[variant].rate for rate in study.config.rates]
        candidates[name] = [study.run(row, study.seeds[0], rate, variant) for rate in rates]
    chosen = study.choose(candidates, VALIDATION, "the search")
    rates = {name: run.training.learning_rate for name, run in chosen.items()}
    runs = {}
    for name, (row, variant) in shown.items():
        runs[name] = [study.run(row, seed, rates[name], variant) for seed in study.seeds]
    study.execute(all_runs(runs), NAME)
    measured = {name: [study.measured[run.id] for run in runs_of_row] for name, runs_of_row in runs.items()}
    rows = [over_seeds(measured[name], name, runs[name][0].label) for name in shown]
    details = {
        **study.evidence(runs),
        "rates": rates,
        "wall_s": study.seconds,
        "config": study.config.model_dump(mode="json"),
        "tokens": {name: _tokens(runs_of_row[0]) for name, runs_of_row in runs.items()},
        "losses": {name: of_row[0].details["losses"] for name, of_row in measured.items()},
    }
    over = attribution(details, shown)
    shown_aims: list[Aim] = []
    for name, (row, variant) in shown.items():
        if row == "slide_ssm":
            shown_aims += aims(details["best_block_state"][variant], name, over[name])
    return study.write(NAME, rows, aims=shown_aims, details=details)


def _tokens(run: AttributionRun) -> int:
    """Return the number of tokens that a run is trained on."""
    return run.training.steps * run.training.batch_size * run.data.length


def attribution(details: dict[str, Any], shown: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, Interval]]:
    """Compare the block-state row of each variant that is best on validation text with the variant's other rows.

    `details` receives the best rows and the differences.

    Args:
        details: details of the results, with `by_seed`.
        shown: row and variant of each cell.

    Returns:
        Differences of metrics, by cell of the other row.
    """
    by_seed = details["by_seed"]
    first = {name: next(iter(seeds.values())) for name, seeds in by_seed.items()}

    def validation_loss(name: str) -> float:
        return sum(first[name][metric] for metric in VALIDATION)

    variants = dict.fromkeys(variant for _, variant in shown.values())
    best: dict[str, str] = {}
    over: dict[str, dict[str, Interval]] = {}
    for variant in variants:
        names = {row: name for name, (row, own_variant) in shown.items() if own_variant == variant}
        candidates = [names[row] for row in BLOCK_STATE if row in names]
        best[variant] = min(candidates, key=validation_loss)
        for name in names.values():
            if name != best[variant]:
                over[name] = differences(by_seed, best[variant], name)
    details["best_block_state"] = best
    details["differences"] = {}
    for rival, intervals in over.items():
        details["differences"][rival] = {name: interval.model_dump() for name, interval in intervals.items()}
    return over


def differences(by_seed: Mapping[str, Mapping[str, Mapping[str, float]]], row: str, rival: str) -> dict[str, Interval]:
    """Return a row's bits and nats less those of a rival, paired over seeds; below 0 the row is better.

    `NAME_less_first` is the difference for words at a distance less the difference for words that occur first.
    """
    pairs = list(zip(by_seed[row].values(), by_seed[rival].values(), strict=True))
    names = []
    by_name: dict[str, list[float]] = {}
    for name in pairs[0][0]:
        if name.startswith(("nats_", "bpb_")) and "validation" not in name:
            names.append(name)
            by_name[name] = [metrics[name] - rival_metrics[name] for metrics, rival_metrics in pairs]
    for name in names:
        if "_to_" in name:
            text, _, _ = name.partition("_to_")
            first = by_name[f"{text}_first"]
            by_name[f"{name}_less_first"] = [far - near for far, near in zip(by_name[name], first, strict=True)]
    return {name: combine_seeds(values) for name, values in by_name.items()}


def aims(best: str, rival: str, over_state_space: Mapping[str, Interval]) -> list[Aim]:
    """Return the aims: the best block-state row predicts words better that last occurred beyond the window.

    Args:
        best: cell of the best block-state row.
        rival: cell of the window with a state space at the embeddings.
        over_state_space: differences of the two.
    """
    shown = []
    for name, difference in over_state_space.items():
        if "_to_" not in name or name.endswith("_first"):
            continue
        _, _, distance = name.rpartition("_")
        if int(distance) > FAR:
            text = f"{name}: {best} less the window with a state space at the embeddings, {rival}, its upper end"
            shown.append(aim(text, name, 0.0, difference.high))
    return shown

"""The anchor and the specialists of the compositions: texts, tokenizers, training and held-out text.

Texts are written once into a folder, one document per line: novels, English documentation without its code, and the
source of the Python installation's standard library, whose modules are divided into training, validation and test.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from experiments import Options
from experiments.corpus import random_llama, train_corpus_tokenizer
from experiments.python_texts import deal, source_files, split_source, write_documents
from experiments.study import training_config, write_lines
from graftlm.config import Config
from graftlm.data import NEW, DataConfig, Mixture, SourceConfig
from graftlm.data.mixture import build_blocks
from graftlm.evaluation import Row
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.execute import execute
from graftlm.runs.run import Run, RunContext
from graftlm.training import train
from graftlm.training.language_model import LanguageModel

ENGLISH = "lm_text/eltec_eng.jsonl"
FRENCH = "lm_text/eltec_fra.jsonl"
DOCUMENTS = tuple(f"longdocs/{name}.jsonl" for name in ("peps", "rust_rfcs", "eips", "ercs", "keps"))
FILES = (ENGLISH, FRENCH, *DOCUMENTS)
T = TypeVar("T")
_LETTERS = re.compile(r"[A-Za-z ,.;:'()\"-]")
_NO_PROSE = re.compile(r"\s{3,}|\t|\||\+-|:?[A-Z][\w-]*:")


class Size(Config):
    """Sizes of models and texts.

    Args:
        vocabulary: number of tokens of each tokenizer.
        anchor_width: width of the anchor.
        anchor_layers: layers of the anchor.
        width: width of the specialists.
        layers: layers of the specialists.
        length: tokens of a row of training.
        batch_size: rows of a training step.
        novel: characters of each English novel for the anchor; the small models read two thirds of them.
        english_novels: number of English novels.
        french_novels: number of French novels.
        documentation: characters of documentation for the anchor; the small models read two thirds of them.
        french: characters of each French novel.
        mixed: characters that the anchor reads last: English, French and code, one third each.
        code: characters of source code.
        module: longest module in characters; longer ones are left out.
        modules: proportions of modules by part, in a fixed order that mixes packages.
    """

    vocabulary: int = 512
    anchor_width: int = 192
    anchor_layers: int = 8
    width: int = 128
    layers: int = 4
    length: int = 384
    batch_size: int = 6
    novel: int = 200_000
    english_novels: int = 23
    french_novels: int = 27
    documentation: int = 2_400_000
    french: int = 300_000
    mixed: int = 3_000_000
    code: int = 7_000_000
    module: int = 1_000_000
    modules: dict[str, int] = {"train": 17, "validation": 1, "test": 2}


QUICK = Size(
    vocabulary=320,
    anchor_width=32,
    anchor_layers=4,
    width=16,
    layers=2,
    length=224,
    batch_size=2,
    novel=3_000,
    english_novels=3,
    french_novels=3,
    documentation=4_000,
    french=3_000,
    mixed=3_000,
    code=200_000,
    module=4_000,
    modules={"train": 2, "validation": 1, "test": 1},
)


class PretrainRun(Run):
    """Train a Llama on its texts once. With a dependency, the training starts from that run's model.

    Args:
        tokenizer: folder of the tokenizer.
        sources: training texts, of which each row is read once. A model without sources keeps its random weights.
        width: width of the model.
        layers: number of layers.
        heads: number of attention heads.
        length: tokens of a row of training.
        batch_size: rows of a training step.
        learning_rate: learning rate.
        seed: seed of the random weights and of the order of rows.
    """

    tokenizer: str
    sources: list[SourceConfig] = []
    width: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    length: int = Field(256, ge=2)
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    seed: int = 0

    def artefacts(self) -> tuple[str, ...]:
        return ("config.json", "tokenizer.json")

    def measure(self, context: RunContext) -> Measurement:
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        shape = self.model_dump(include={"width", "layers", "heads", "length", "seed"})
        model: Any = random_llama(tokenizer, **shape)
        for start in context.dependencies.values():
            model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
        metrics: dict[str, Any] = {"parameters": count_parameters(model.parameters())}
        if self.sources:
            metrics.update(self._train(model, tokenizer, context))
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics))

    def _train(self, model: Any, tokenizer: PreTrainedTokenizerBase, context: RunContext) -> dict[str, float]:
        """Train `model` in place on all of its rows once."""
        data = DataConfig(
            new=self.sources,
            replay_fraction=0,
            length=self.length,
            seed=self.seed,
        )
        blocks = build_blocks(self.sources, data, tokenizer)
        batches = Mixture({NEW: blocks}, {NEW: 1.0}, self.batch_size, self.seed)
        steps = max(1, len(blocks) // self.batch_size)  # type: ignore[arg-type]  # no source streams
        training = training_config(
            steps,
            self.batch_size,
            self.learning_rate,
            self.seed,
            precision="bf16",
            warmup_steps=max(1, steps // 20),
            checkpoint_every=max(1, steps // 8),
        )
        summary = train(
            LanguageModel(model),
            batches,
            training,
            context.folder / "training",
            identity={"run": context.key},
            progress=context.progress,
        )
        return {
            "steps": steps,
            "tokens": summary.tokens,
            "tokens_per_s": summary.tokens_per_s,
            "loss": summary.loss,
        }


class Parents(NamedTuple):
    """Folders of the trained models and of their texts, and the metrics of their training.

    Attributes:
        anchor: the anchor.
        vanilla: the model that the French and the code specialist start from.
        french: the French specialist.
        code: the code specialist.
        random: a model of the specialists' size with random weights.
        own: a French specialist with its own tokenizer.
        corpus: the texts.
        summaries: metrics of each model's training, by name.
    """

    anchor: Path
    vanilla: Path
    french: Path
    code: Path
    random: Path
    own: Path
    corpus: Path
    summaries: dict[str, Any]


def make_parents(options: Options, size: Size) -> Parents:
    """Train every parent that does not exist yet.

    They are written next to the experiment's own folder, so that experiments share them.
    """
    folder = options.out.parent / "composition-parents"
    corpus = make_corpus(options.data, folder / "corpus", size)
    tokenizers = make_tokenizers(corpus, folder / "tokenizers", size)
    runs = parent_runs(corpus, tokenizers, size)
    measured = execute(runs, folder / "models", jobs=options.jobs, title="the parents")
    names = [name for name in Parents._fields if name in measured]
    summaries = {name: dict(measured[name].row.metrics) for name in names}
    folders = {name: folder / "models" / name for name in names}
    return Parents(corpus=corpus, summaries=summaries, **folders)


def parent_runs(corpus: Path, tokenizers: dict[str, Path], size: Size) -> list[PretrainRun]:
    """Return the runs of the parents, named as in `Parents`, and of the models that they start from."""
    shared = str(tokenizers["shared"])
    own = str(tokenizers["own"])

    def texts(name: str) -> list[SourceConfig]:
        return [SourceConfig(path=str(corpus / f"{name}.jsonl"))]

    def further(name: str, start: PretrainRun, sources: list[SourceConfig]) -> PretrainRun:
        changes = {
            "id": name,
            "depends_on": (start.id,),
            "sources": sources,
            "learning_rate": 2e-3,
        }
        return start.model_copy(update=changes)

    shape = size.model_dump(include={"width", "layers", "length", "batch_size"})
    vanilla = PretrainRun(id="vanilla", tokenizer=shared, sources=texts("english-some"), **shape)
    english = vanilla.model_copy(
        update={
            "id": "english",
            "sources": texts("english"),
            "width": size.anchor_width,
            "layers": size.anchor_layers,
        }
    )
    own_vanilla = vanilla.model_copy(update={"id": "own-vanilla", "tokenizer": own})
    return [
        english,
        vanilla,
        own_vanilla,
        further("anchor", english, texts("mixed")),
        further("french", vanilla, texts("french")),
        further("own", own_vanilla, texts("french")),
        further("code", vanilla, texts("python-train")),
        vanilla.model_copy(update={"id": "random", "sources": []}),
    ]


def make_tokenizers(corpus: Path, folder: Path, size: Size) -> dict[str, Path]:
    """Train the tokenizer that all models share, and the French specialist's own, unless they exist."""
    texts = {
        "shared": ("english", "french", "python-train"),
        "own": ("french", "english-some"),
    }

    def fill(folder: Path) -> None:
        for name, files in texts.items():
            paths = [corpus / f"{file}.jsonl" for file in files]
            tokenizer = train_corpus_tokenizer(paths, size.vocabulary)
            tokenizer.save_pretrained(folder / name)

    settings = {"corpus": str(corpus), "vocabulary": size.vocabulary}
    fill_once(folder, settings, fill)
    return {name: folder / name for name in texts}


def make_corpus(data: Path, folder: Path, size: Size) -> Path:
    """Write the texts that the parents read, and the modules that none of them reads, unless they exist."""
    settings = {
        "size": size.model_dump(mode="json"),
        "sources": [str(data / name) for name in FILES],
        "python": sys.version,
    }

    def fill(folder: Path) -> None:
        _write_corpus(data, folder, size)

    return fill_once(folder, settings, fill)


def _write_corpus(data: Path, folder: Path, size: Size) -> None:
    modules = deal([str(path) for path in _modules(size)], size.modules)
    texts: dict[str, list[str]] = {}
    for part, paths in modules.items():
        texts[f"python-{part}"] = [read_source(path) for path in paths]
    documentation = list(_documentation(data, modules["train"]))
    novels = read_texts(data / ENGLISH)[: size.english_novels]
    french = read_texts(data / FRENCH)[: size.french_novels]
    texts["english"] = _english(novels, documentation, size, 1.0)
    texts["english-some"] = _english(novels, documentation, size, 0.6)  # read by models of a specialist's size
    texts["french"] = [text[: size.french] for text in french]
    texts["mixed"] = _mixed(novels, french, texts["python-train"], size)
    for name, documents in texts.items():
        write_documents(folder / f"{name}.jsonl", documents)


def prose(text: str) -> str:
    """Return the running text of a reST or Markdown document, without code, tables, headers and indented lines."""
    text = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        if any(_NO_PROSE.match(line) for line in lines):
            continue
        paragraph = " ".join(line.strip() for line in lines)
        if len(paragraph) > 80 and len(_LETTERS.findall(paragraph)) > 0.93 * len(paragraph):
            paragraphs.append(paragraph)
    return "\n".join(paragraphs)


def _english(novels: Sequence[str], documentation: Sequence[str], size: Size, share: float) -> list[str]:
    """Return a share of the start of every novel and of the documentation."""
    starts = [novel[: int(share * size.novel)] for novel in novels]
    return [*starts, *up_to(documentation, int(share * size.documentation))]


def _mixed(novels: Sequence[str], french: Sequence[str], modules: Sequence[str], size: Size) -> list[str]:
    """Return the last training text of the anchor: further English mixed with French and code, like web text."""
    share = size.mixed // 3
    english_parts = (text[size.novel :][: size.novel // 5] for text in novels)
    french_parts = (text[size.french :][: size.french // 5] for text in french)
    code_parts = (text[len(text) // 2 :][: size.novel // 50] for text in modules)
    mixed: list[str] = []
    for parts in (english_parts, french_parts, code_parts):
        mixed.extend(up_to(parts, share))
    return [text for text in mixed if text.strip()]


def _documentation(data: Path, modules: Sequence[str]) -> Iterator[str]:
    """Yield the prose of documents alternately with the docstrings and comments of modules."""
    collections = [read_texts(data / name) for name in DOCUMENTS]

    def proses() -> Iterator[str]:
        for documents in zip(*collections, strict=False):
            for document in documents:
                text = prose(document)
                if text:
                    yield text

    sources = (Path(path).read_bytes() for path in modules)
    for pair in zip(proses(), _words(sources), strict=False):
        yield from pair


def up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the first texts until a number of characters is reached; the last one is cut."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _modules(size: Size) -> Iterator[Path]:
    """Yield modules of the standard library until enough characters are read."""
    left = size.code
    for path in source_files():
        characters = len(read_source(path))
        if characters > size.module:
            continue
        left -= characters
        if left < 0:
            return
        yield path


def read_source(path: str | Path) -> str:
    """Return the text of a module."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def read_texts(file: Path) -> list[str]:
    """Return the texts of a JSON Lines file."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def held_out(data: Path, corpus: Path, folder: Path, tested: int) -> None:
    """Write texts of novels and modules that no model has read: English (old), French (new) and Python.

    Args:
        data: the data folder.
        corpus: folder of `make_corpus`.
        folder: folder to write to.
        tested: characters of each set of test texts; validation takes a third.
    """
    english = read_texts(data / ENGLISH)
    french = read_texts(data / FRENCH)
    test = read_texts(corpus / "python-test.jsonl")
    validation = read_texts(corpus / "python-validation.jsonl")
    test_words = _words(text.encode() for text in test)
    validation_words = _words(text.encode() for text in validation)
    sets = {
        "old": [english[-1][len(english[-1]) // 3 :], *test_words],
        "new": french[-3:],
        "python": [text[len(text) // 4 :] for text in test],
        "validation_old": [english[-2], *validation_words],
        "validation_new": french[-4:-3],
        "validation_python": validation,
    }
    for name, texts in sets.items():
        size = tested // 3 if name.startswith("validation") else tested
        write_documents(folder / f"{name}.jsonl", spread(texts, size))


def spread(texts: Sequence[str], characters: int) -> list[str]:
    """Cut texts to about a number of characters: half from the first text, half evenly from the others."""
    first, *others = texts
    half = characters // 2 if others else characters
    count = max(1, min(len(others), 12))
    length = max(200, half // count)
    starts = [text[:length] for text in others[: half // length]]
    return [first[:half], *starts]


def _words(modules: Iterable[bytes]) -> Iterator[str]:
    """Yield the docstrings and comments of each module that has any."""
    for module in modules:
        split = split_source(module)
        if split and split[0]:
            yield split[0]


def spaced(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the values, evenly spaced."""
    stride = max(1, len(values) // count)
    return list(values[::stride])[:count]


def fitting(
    pairs: Iterable[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
) -> list[tuple[str, str]]:
    """Return the pairs of prompt and answer that fit into a row of `length` tokens with an end-of-text token."""
    kept = []
    for pair in pairs:
        ids = tokenizer(list(pair), verbose=False)["input_ids"]
        if sum(len(part) for part in ids) < length:
            kept.append(pair)
    return kept


def cut_texts(texts: Iterable[str], tokenizer: Any, length: int) -> list[str]:
    """Cut texts into pieces that fit into a row of `length` tokens; complete pieces nearly fill it."""
    size = length - max(2, length // 32)  # a piece alone may take a few tokens more than within its text
    parts: list[str] = []
    for text in texts:
        offsets = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        starts = [start for start, _ in offsets]
        for start, stop in pairwise([*starts[::size], len(text)]):
            parts.append(text[start:stop])
    return [part for part in parts if part.strip()]


def read_examples(path: Path) -> list[tuple[str, str]]:
    """Return the pairs that `write_examples` wrote."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["prompt"], line["text"]) for line in lines]


def write_examples(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write one JSON object with a `prompt` and a `text` per line."""
    lines = [{"prompt": prompt, "text": answer} for prompt, answer in pairs]
    write_lines(path, lines)

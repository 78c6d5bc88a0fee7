"""The anchor and the specialists of the compositions: texts, tokenizers, training, and texts that no model has read.

Texts are written once into a folder, whole documents a line: English documentation without its code, and the source
of the Python installation's standard library, its modules dealt out to training, validation and test.
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
from experiments.study import training_config, write_lines
from graftlm.config import Config
from graftlm.data import NEW, DataConfig, Mixture, SourceConfig
from graftlm.data.mixture import build_blocks
from graftlm.demo.corpus import deal, source_files, split_source, write_documents
from graftlm.evaluation import Row
from graftlm.evaluation.evaluator import count_parameters
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.execute import execute
from graftlm.runs.run import Run, RunContext
from graftlm.training import train
from graftlm.training.language_model import LanguageModel

ENGLISH, FRENCH = "lm_text/eltec_eng.jsonl", "lm_text/eltec_fra.jsonl"
DOCUMENTS = tuple(f"longdocs/{name}.jsonl" for name in ("peps", "rust_rfcs", "eips", "ercs", "keps"))
FILES = (ENGLISH, FRENCH, *DOCUMENTS)
T = TypeVar("T")
_LETTERS = re.compile(r"[A-Za-z ,.;:'()\"-]")
_NO_PROSE = re.compile(r"\s{3,}|\t|\||\+-|:?[A-Z][\w-]*:")


class Size(Config):
    """How large models and texts are.

    Args:
        novel: characters of each English novel for the anchor; the small models read two thirds of it.
        documentation: characters of documentation for the anchor, likewise.
        french: characters of each French novel.
        mixed: characters that the anchor reads last: English, French and code, a third each.
        code: characters of source code to read.
        module: of a module at most, longer ones are left out.
        modules: how modules are dealt out, of so many in a fixed order that mixes packages.
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
    """A Llama, trained once over its texts. With a dependency it starts from that run's model.

    Args:
        tokenizer: folder of the tokenizer.
        sources: training texts, each row read once; a model without sources keeps its random weights.
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
            metrics |= self._train(model, tokenizer, context)
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics))

    def _train(self, model: Any, tokenizer: PreTrainedTokenizerBase, context: RunContext) -> dict[str, float]:
        """Train `model` in place over all of its rows once."""
        data = DataConfig(new=self.sources, replay_fraction=0, length=self.length, seed=self.seed)
        blocks = build_blocks(self.sources, data, tokenizer)
        batches = Mixture({NEW: blocks}, {NEW: 1.0}, self.batch_size, self.seed)
        steps = max(1, len(blocks) // self.batch_size)  # type: ignore[arg-type]  # no source streams
        more: dict[str, Any] = {"warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 8)}
        training = training_config(steps, self.batch_size, self.learning_rate, self.seed, precision="bf16", **more)
        model, folder = LanguageModel(model), context.folder / "training"
        summary = train(model, batches, training, folder, identity={"run": context.key}, progress=context.progress)
        rate = summary.tokens_per_s
        return {"steps": steps, "tokens": summary.tokens, "tokens_per_s": rate, "loss": summary.loss}


class Parents(NamedTuple):
    """Folders of the finished models and of their texts, and what their training measured."""

    anchor: Path
    vanilla: Path
    french: Path
    code: Path
    random: Path
    own: Path
    corpus: Path
    summaries: dict[str, Any]


def make_parents(options: Options, size: Size) -> Parents:
    """Train every parent that is not there yet, beside the experiment's own folder: experiments share them."""
    folder = options.out.parent / "composition-parents"
    corpus = make_corpus(options.data, folder / "corpus", size)
    runs = parent_runs(corpus, make_tokenizers(corpus, folder / "tokenizers", size), size)
    measured = execute(runs, folder / "models", jobs=options.jobs, title="the parents")
    names = [name for name in Parents._fields if name in measured]
    summaries = {name: dict(measured[name].row.metrics) for name in names}
    return Parents(corpus=corpus, summaries=summaries, **{name: folder / "models" / name for name in names})


def parent_runs(corpus: Path, tokenizers: dict[str, Path], size: Size) -> list[PretrainRun]:
    """The runs of the parents, by their names in `Parents`, and of the models that they start from."""
    shared, own = str(tokenizers["shared"]), str(tokenizers["own"])

    def texts(name: str) -> list[SourceConfig]:
        return [SourceConfig(path=str(corpus / f"{name}.jsonl"))]

    def further(name: str, start: PretrainRun, sources: list[SourceConfig]) -> PretrainRun:
        changes = {"id": name, "depends_on": (start.id,), "sources": sources, "learning_rate": 2e-3}
        return start.model_copy(update=changes)

    shape = size.model_dump(include={"width", "layers", "length", "batch_size"})
    vanilla = PretrainRun(id="vanilla", tokenizer=shared, sources=texts("english-some"), **shape)
    wider = {"id": "english", "width": size.anchor_width, "layers": size.anchor_layers}
    english = vanilla.model_copy(update={"sources": texts("english"), **wider})
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
    """The tokenizer that all models share, and the French specialist's own, unless they are there."""
    texts = {"shared": ("english", "french", "python-train"), "own": ("french", "english-some")}

    def fill(folder: Path) -> None:
        for name, files in texts.items():
            paths = [corpus / f"{file}.jsonl" for file in files]
            train_corpus_tokenizer(paths, size.vocabulary).save_pretrained(folder / name)

    fill_once(folder, {"corpus": str(corpus), "vocabulary": size.vocabulary}, fill)
    return {name: folder / name for name in texts}


def make_corpus(data: Path, folder: Path, size: Size) -> Path:
    """Write the texts that the parents read, and the modules that none of them reads, unless they are there."""
    sources = [str(data / name) for name in FILES]
    settings = {"size": size.model_dump(mode="json"), "sources": sources, "python": sys.version}
    return fill_once(folder, settings, lambda folder: _write_corpus(data, folder, size))


def _write_corpus(data: Path, folder: Path, size: Size) -> None:
    modules = deal([str(path) for path in _modules(size)], size.modules)
    python = {f"python-{name}": [read_source(path) for path in paths] for name, paths in modules.items()}
    docs = list(_documentation(data, modules["train"]))
    novels, french = read_texts(data / ENGLISH)[: size.english_novels], read_texts(data / FRENCH)[: size.french_novels]
    texts = (
        python
        | {
            "english": _english(novels, docs, size, 1.0),
            "english-some": _english(novels, docs, size, 0.6),  # what models of a specialist's size read
            "french": [text[: size.french] for text in french],
            "mixed": _mixed(novels, french, python["python-train"], size),
        }
    )
    for name, documents in texts.items():
        write_documents(folder / f"{name}.jsonl", documents)


def prose(text: str) -> str:
    """A reST or Markdown document without what is no running text: code, tables, headers, indented lines."""
    text = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    blocks = [block.strip("\n").split("\n") for block in re.split(r"\n\s*\n", text)]
    kept = [" ".join(line.strip() for line in lines) for lines in blocks if not any(map(_NO_PROSE.match, lines))]
    return "\n".join(line for line in kept if len(line) > 80 and len(_LETTERS.findall(line)) > 0.93 * len(line))


def _english(novels: Sequence[str], docs: Sequence[str], size: Size, share: float) -> list[str]:
    """The start of every novel, and documentation up to its size."""
    starts = [novel[: int(share * size.novel)] for novel in novels]
    return [*starts, *up_to(docs, int(share * size.documentation))]


def _mixed(novels: Sequence[str], french: Sequence[str], modules: Sequence[str], size: Size) -> list[str]:
    """What the anchor reads last: English beyond what it has read, with French and code among it, as the web has."""
    share = size.mixed // 3
    english = up_to((text[size.novel :][: size.novel // 5] for text in novels), share)
    foreign = up_to((text[size.french :][: size.french // 5] for text in french), share)
    code = up_to((text[len(text) // 2 :][: size.novel // 50] for text in modules), share)
    return [text for kind in (english, foreign, code) for text in kind if text.strip()]


def _documentation(data: Path, modules: Sequence[str]) -> Iterator[str]:
    """Documents' prose, and between them the docstrings and comments of modules."""
    collections = zip(*(read_texts(data / name) for name in DOCUMENTS), strict=False)
    proses = (text for documents in collections for document in documents if (text := prose(document)))
    for pair in zip(proses, _words(Path(path).read_bytes() for path in modules), strict=False):
        yield from pair


def up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts of at least so many characters in all, each cut to what is left."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _modules(size: Size) -> Iterator[Path]:
    """The standard library's modules until enough characters were read."""
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
    """The text of a module."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def read_texts(file: Path) -> list[str]:
    """The texts of a JSON Lines file."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def held_out(data: Path, corpus: Path, folder: Path, tested: int) -> None:
    """Write texts of novels and modules that no model has read: English (old), French (new) and Python.

    Args:
        tested: characters of each set of test texts; validation takes a third.
    """
    english, french = read_texts(data / ENGLISH), read_texts(data / FRENCH)
    test, validation = (read_texts(corpus / f"python-{name}.jsonl") for name in ("test", "validation"))
    sets = {
        "old": [english[-1][len(english[-1]) // 3 :], *_words(map(str.encode, test))],
        "new": french[-3:],
        "python": [text[len(text) // 4 :] for text in test],
        "validation_old": [english[-2], *_words(map(str.encode, validation))],
        "validation_new": french[-4:-3],
        "validation_python": validation,
    }
    for name, texts in sets.items():
        size = tested // (3 if name.startswith("validation") else 1)
        write_documents(folder / f"{name}.jsonl", spread(texts, size))


def spread(texts: Sequence[str], characters: int) -> list[str]:
    """About so many characters: as many of the first text as of all others together, which share alike."""
    first, others = texts[0], texts[1:]
    half = characters // 2 if others else characters
    each = max(200, half // max(1, min(len(others), 12)))
    return [first[:half], *(text[:each] for text in others[: half // each])]


def _words(modules: Iterable[bytes]) -> Iterator[str]:
    return (split[0] for module in modules if (split := split_source(module)) and split[0])


def spaced(values: Sequence[T], count: int) -> list[T]:
    """At most `count` of the values, evenly spaced."""
    return list(values[:: max(1, len(values) // count)])[:count]


def fitting(pairs: Iterable[tuple[str, str]], tokenizer: Any, length: int) -> list[tuple[str, str]]:
    """The pairs of a prompt and an answer that fit into a row of `length` tokens with their end-of-text token."""
    return [pair for pair in pairs if sum(map(len, tokenizer(list(pair), verbose=False)["input_ids"])) < length]


def cut_texts(texts: Iterable[str], tokenizer: Any, length: int) -> list[str]:
    """Texts cut into pieces that fit into a row of `length` tokens, whole ones nearly fill it."""
    size = length - max(2, length // 32)  # a piece alone may take a few tokens more than it does in its text
    parts: list[str] = []
    for text in texts:
        starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]]
        cuts = [*starts[::size], len(text)]
        parts += [text[start:stop] for start, stop in pairwise(cuts)]
    return [text for text in parts if text.strip()]


def read_examples(path: Path) -> list[tuple[str, str]]:
    """What `write_examples` wrote."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(line["prompt"], line["text"]) for line in lines]


def write_examples(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """One JSON object with a `prompt` and a `text` a line."""
    write_lines(path, ({"prompt": prompt, "text": answer} for prompt, answer in pairs))

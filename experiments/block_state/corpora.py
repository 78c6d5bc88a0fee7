"""Long documents of three kinds, split by document into training and test text, and the tokenizer of all models.

- `novels` stand for PG19.
- `code` stands for GitHub: packages of the standard library of this Python, the modules of each joined to one document.
- `documents` stand for arXiv: proposals of Python, Rust, Ethereum and Kubernetes. The test is the two longest of each
  collection, joined, since none has 65,536 tokens.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from experiments import Options
from experiments.parents import DOCUMENTS, ENGLISH, read_source, read_texts
from experiments.study import check_files
from graftlm.config import Config
from graftlm.demo.corpus import source_files, write_documents
from graftlm.io import fill_once
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
    """Write `CORPUS-train.jsonl`, `CORPUS-test.jsonl` and `tokenizer` into `folder`, unless they are there.

    Raises:
        DataError: the data folder lacks a file.
    """
    check_files(options, FILES)
    sources = [str(options.data / name) for name in FILES]
    settings = {"size": size.model_dump(mode="json"), "sources": sources, "python": sys.version}
    return fill_once(folder, settings, lambda folder: _write_corpora(options, folder, size))


def _write_corpora(options: Options, folder: Path, size: Corpus) -> None:
    for name, (train, test) in _texts(options.data).items():
        write_documents(folder / f"{name}-train.jsonl", _truncate(train, size.characters))
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


def _truncate(texts: Sequence[str], characters: int) -> list[str]:
    """The first texts up to `characters` in all, with at most a fourth of them from one text."""
    kept, left = [], characters
    for text in texts:
        kept.append(text[: min(left, max(1, characters // 4))])
        left -= len(kept[-1])
        if left <= 0:
            break
    return kept

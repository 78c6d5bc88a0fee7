"""Long documents of three kinds, dealt out to training and test as wholes, and the tokenizer that all models share.

- novels stand for PG19;
- packages of the standard library of this Python installation, the modules of each joined to one document, for GitHub;
- long technical documents (proposals of Python, Rust, Ethereum and Kubernetes) for arXiv: the longest of each
  collection are the test, joined, since none alone has 65,536 tokens.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from experiments import Options
from experiments.composed import check_files
from experiments.parents import DOCUMENTS, ENGLISH, read_texts
from graftlm.config import Config
from graftlm.demo.corpus import source_files, write_documents
from graftlm.training.language_model import train_tokenizer

CORPORA = ("novels", "code", "documents")
TESTED_PACKAGE = "asyncio"
FILES = (ENGLISH, *DOCUMENTS)


class Corpus(Config):
    """How much text there is.

    Args:
        pieces: of the tokenizer.
        characters: that training may read of each corpus.
        tested: characters of each corpus' test text, which is what its documents begin with.
    """

    pieces: int = 1024
    characters: int = 4_000_000
    tested: int = 180_000


def make_corpora(options: Options, folder: Path, size: Corpus) -> Path:
    """Write `CORPUS-train.jsonl` and `CORPUS-test.jsonl` of each corpus into `folder`, unless they are there.

    Raises:
        DataError: the data folder lacks a file.
    """
    done = folder / "corpora.json"
    wanted = size.model_dump(mode="json")
    if done.exists() and json.loads(done.read_text()) == wanted:
        return folder
    check_files(options, FILES)
    for name, (learned, tested) in _texts(options.data).items():
        write_documents(folder / f"{name}-train.jsonl", _share(learned, size.characters))
        write_documents(folder / f"{name}-test.jsonl", [tested[: size.tested]])
    done.write_text(json.dumps(wanted))
    return folder


def make_tokenizer(corpora: Path, pieces: int) -> PreTrainedTokenizerBase:
    """One byte-level BPE tokenizer of all training texts, beside them."""
    folder = corpora / f"tokenizer-{pieces}"
    if not (folder / "tokenizer.json").exists():
        texts = (text[:200_000] for name in CORPORA for text in read_texts(corpora / f"{name}-train.jsonl"))
        train_tokenizer(texts, pieces).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _texts(data: Path) -> dict[str, tuple[list[str], str]]:
    """Of each corpus, the documents for training and one text for the test."""
    novels, packages = read_texts(data / ENGLISH), packages_of(source_files())
    tested_package = packages.pop(TESTED_PACKAGE)
    learned, tested = [], []
    for name in DOCUMENTS:
        texts = sorted(read_texts(data / name), key=len)
        learned.append(texts[:-2])
        tested += texts[-2:]
    turns = zip(*(texts[::-1] for texts in learned), strict=False)  # the longest first, of each collection in turn
    return {
        "novels": (novels[:-1], novels[-1]),
        "code": (list(packages.values()), tested_package),
        "documents": ([text for turn in turns for text in turn], "\n\n".join(tested)),
    }


def packages_of(files: Sequence[Path]) -> dict[str, str]:
    """The source of each package of the standard library, its modules one after the other, the largest package first.

    Modules that belong to none make one together, of the empty name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        found.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    texts = {
        name: "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths))
        for name, paths in found.items()
    }
    return dict(sorted(texts.items(), key=lambda one: len(one[1]), reverse=True))


def _share(texts: Sequence[str], characters: int) -> list[str]:
    """The first texts up to so many characters in all; of each no more than a fourth of them."""
    found, left = [], characters
    for text in texts:
        found.append(text[: min(left, max(1, characters // 4))])
        left -= len(found[-1])
        if left <= 0:
            break
    return found

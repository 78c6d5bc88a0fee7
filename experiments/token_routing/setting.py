"""Sizes and lengths of the reproduction, and the backbone made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from experiments.pretrain import PretrainRun
from experiments.token_routing.texts import QUICK as FEW
from experiments.token_routing.texts import Amounts, write_corpus
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.demo.run import train_corpus_tokenizer
from graftlm.runs.run import execute


class Setting(Config):
    """One size of everything.

    Args:
        vocabulary, width, layers, heads: of the backbone.
        length: tokens of a row, the backbone's and the experts'.
        backbone_batch: rows of a step of the backbone's training, which reads its texts once.
        rank: of every expert.
        steps, batch_size: of every expert, and of X-LoRA's router.
        centroids: examples of each expert that its centroid is made of, drawn anew for every seed.
    """

    amounts: Amounts = Field(default_factory=Amounts)
    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 320
    backbone_batch: int = Field(6, ge=1)
    rank: int = Field(16, ge=1)
    steps: int = Field(80, ge=1)
    batch_size: int = Field(6, ge=1)
    centroids: int = Field(300, ge=1)


FULL = Setting()
QUICK = Setting(
    amounts=FEW,
    vocabulary=320,
    width=16,
    layers=2,
    heads=2,
    length=128,
    backbone_batch=2,
    rank=2,
    steps=2,
    batch_size=2,
    centroids=4,
)


def make_backbone(data: Path, folder: Path, setting: Setting) -> Path:
    """Pretrain the backbone in `folder`, unless it is there: English novels, Wikipedia, Python."""
    corpus, tokenizer, done = corpus_of(folder), folder / "tokenizer", folder / "corpus.json"
    wanted = setting.model_dump(mode="json", include={"amounts", "vocabulary"})
    if not done.exists() or json.loads(done.read_text(encoding="utf-8")) != wanted:
        write_corpus(data, corpus, setting.amounts)
        train_corpus_tokenizer([corpus], setting.vocabulary).save_pretrained(tokenizer)
        done.write_text(json.dumps(wanted), encoding="utf-8")
    run = _backbone_run(setting, corpus, tokenizer)
    execute([run], folder / "models")
    return folder / "models" / run.id


def corpus_of(folder: Path) -> Path:
    """What the backbone in `folder` has read."""
    return folder / "corpus.jsonl"


def _backbone_run(setting: Setting, corpus: Path, tokenizer: Path) -> PretrainRun:
    shape: dict[str, Any] = setting.model_dump(include={"width", "layers", "heads", "length"})
    sources = [SourceConfig(path=str(corpus))]
    return PretrainRun(
        id="backbone", tokenizer=str(tokenizer), sources=sources, batch_size=setting.backbone_batch, **shape
    )

"""The main job from nothing: pretrain a tiny Llama on English, freeze it, teach it Python with each method, report.

All of it is left in the folder: corpus, backbone, grafts, report, and the recipe, to imitate with one's own text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from pydantic import Field
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig, build_documents, build_mixture
from graftlm.demo.corpus import deal, read_installation, write_documents
from graftlm.evaluation import Results
from graftlm.io import fill_once, write_atomically
from graftlm.runs.recipe import Recipe, compare_recipe
from graftlm.runs.run import Log
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, new_model, train_tokenizer


class DemoSize(Config):
    """How large the demo is.

    Args:
        characters: of code to read.
        pretraining_steps, steps: of the backbone, and of each method.
    """

    characters: int = 3_000_000
    vocabulary: int = 4096
    width: int = 128
    layers: int = 4
    length: int = 256
    batch_size: int = Field(8, ge=1)
    pretraining_steps: int = 300
    steps: int = 100
    scored_tokens: int = 12_000


QUICK = DemoSize(
    characters=200_000, vocabulary=512, width=32, layers=2, length=64, pretraining_steps=12, steps=6, scored_tokens=1000
)


def run_demo(
    out: str | Path = "runs/demo", *, quick: bool = False, seed: int = 0, progress: bool = True, log: Log = print
) -> Results:
    """Run the demo in a folder; a backbone that an earlier run left there is used again."""
    out, size = Path(out), QUICK if quick else DemoSize()
    corpus = make_corpus(out / "corpus", size, log)
    settings = {"size": size.model_dump(mode="json"), "seed": seed, "corpus": str(corpus)}
    fill_once(out / "backbone", settings, partial(_pretrain, corpus, size, seed, progress=progress, log=log))
    training = _training(size, size.steps, 1e-3, seed).model_dump_json(exclude_defaults=True)
    recipe = fill_recipe("tiny.yaml", out, **size.model_dump(), seed=seed, training=training)
    return compare_recipe(recipe, progress=progress, log=log)


def make_corpus(folder: Path, size: DemoSize, log: Log) -> Path:
    """Write the demo's texts as jsonl files, unless they are there."""

    def fill(folder: Path) -> None:
        log("Reading the English and the code of this Python installation.")
        english, code = read_installation(size.characters)
        dealt = deal(english, {"english": 8, "english-more": 1, "english-test": 1})
        for name, documents in (dealt | deal(code, {"python": 9, "python-test": 1})).items():
            write_documents(folder / f"{name}.jsonl", documents)

    return fill_once(folder, {"characters": size.characters, "python": sys.version}, fill)


def _pretrain(corpus: Path, size: DemoSize, seed: int, folder: Path, *, progress: bool, log: Log) -> None:
    """Pretrain the tiny Llama on the corpus' English, and save it."""
    tokenizer = train_corpus_tokenizer([corpus / "english.jsonl", corpus / "python.jsonl"], size.vocabulary)
    model = random_llama(tokenizer, width=size.width, layers=size.layers, heads=4, length=size.length, seed=seed)
    english = SourceConfig(path=str(corpus / "english.jsonl"))
    data = DataConfig(new=[english], replay_fraction=0, length=size.length, seed=seed)
    training = _training(size, size.pretraining_steps, 3e-3, seed)
    log(f"Pretraining a Llama of {model.num_parameters():,} parameters on English.")
    mixture = build_mixture(data, tokenizer, training.batch_size)
    train(LanguageModel(model), mixture, training, folder / "training", progress=progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fill_recipe(name: str, out: Path, **values: Any) -> Recipe:
    """The comparison of a YAML file in this folder, with its words after a $; it is written to `out/recipe.yaml`."""
    filled = Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    path = write_atomically(out / "recipe.yaml", filled.substitute(values, out=json.dumps(str(out))[1:-1]).encode())
    return Recipe.from_yaml(path)


def random_llama(
    tokenizer: PreTrainedTokenizerBase, *, width: int, layers: int, heads: int, length: int, seed: int
) -> LlamaForCausalLM:
    """An untrained Llama from a seed, with tied embeddings; it can read four times its training rows of `length`."""
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 4 * length}
    return new_model({"model_type": "llama", "tie_word_embeddings": True} | shape, tokenizer, seed)


def train_corpus_tokenizer(files: Iterable[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the texts of jsonl files."""
    documents = build_documents(SourceConfig(path=str(file)) for file in files)
    return train_tokenizer((document.text for document in documents), vocab_size)


def _training(size: DemoSize, steps: int, rate: float, seed: int) -> TrainingConfig:
    return TrainingConfig(
        steps=steps,
        batch_size=size.batch_size,
        learning_rate=rate,
        warmup_steps=max(1, steps // 20),
        precision="fp32",
        seed=seed,
        checkpoint_every=max(1, steps // 2),
    )

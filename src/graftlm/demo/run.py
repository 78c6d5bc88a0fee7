"""The main job, from nothing and on a real chat model.

From nothing: pretrain a tiny Llama on English, freeze it, teach it Python with each method, report. All of it is left
in the folder: corpus, backbone, grafts, report, and the recipe, to imitate with one's own text.

On a real chat model: SmolLM2 learns C++ headers, beside LoRA, and keeps what it says without old text. The new text is
part of PyTorch, so every machine has it. The old text is sampled from the model itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from pydantic import Field
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from graftlm.backbone import Backbone, default_device, end_ids, generate_rows, load_backbone
from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig, build_documents, build_mixture
from graftlm.data.chats import render_question
from graftlm.demo.corpus import deal, read_installation, write_documents
from graftlm.errors import DataError
from graftlm.evaluation import Results
from graftlm.files.writing import fill_once, write_atomically
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import Recipe, compare_recipe
from graftlm.runs.run import Log
from graftlm.store.artifact import load_graft
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel, new_model, train_tokenizer

QUESTION = "What is the capital of France?"
_ANSWER_TOKENS = 24
_HEADERS = ("c10", "ATen/core", "torch/csrc/api/include/torch")
_LEAST_CHARACTERS = 2_000


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
    every: dict[str, Any] = {"warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 2)}
    sizes: dict[str, Any] = {"steps": steps, "batch_size": size.batch_size}
    return TrainingConfig(learning_rate=rate, precision="fp32", seed=seed, **sizes, **every)


class ChatDemoSize(Config):
    """How large the demo is; tokens are the model's.

    Args:
        steps, batch_size, length: of the training of each method.
        own_tokens: sampled by the model as old text.
        own_test_tokens: sampled to measure the divergence.
        scored_tokens: of each test text.
    """

    steps: int = 60
    batch_size: int = Field(2, ge=1)
    length: int = 256
    own_tokens: int = 6000
    own_test_tokens: int = 2048
    scored_tokens: int = 3000


QUICK_CHAT = ChatDemoSize(steps=2, length=64, own_tokens=200, own_test_tokens=100, scored_tokens=200)


def run_chat_demo(
    out: str | Path = "runs/demo", *, quick: bool = False, seed: int = 0, progress: bool = True, log: Log = print
) -> Results:
    """Run the demo in a folder; what an earlier run left there is used again.

    Raises BackboneError if the model is neither installed (the extra smollm2) nor on a hub that can be reached, and
    DataError if the installation of PyTorch has no headers.
    """
    out, size = Path(out), QUICK_CHAT if quick else ChatDemoSize()
    make_texts(out / "corpus", log)
    half = bfloat16_is_faster(default_device())
    kind = {"dtype": "bfloat16", "precision": "bf16"} if half else {"dtype": "float32", "precision": "fp32"}
    settings = size.model_dump() | kind | {"warmup_steps": max(1, size.steps // 10)}
    recipe = fill_recipe("chat.yaml", out, **settings, seed=seed)
    results = compare_recipe(recipe, progress=progress, log=log)
    for name, answer in answers(recipe, out).items():
        log(f"{QUESTION} {name}: {answer}")
    return results


def make_texts(folder: Path, log: Log) -> Path:
    """Write the C++ headers of PyTorch, and English to test on, as jsonl files, unless they are there."""

    def fill(folder: Path) -> None:
        log("Reading the C++ headers of this PyTorch installation.")
        root = Path(torch.__file__).parent / "include"
        files = sorted(file for name in _HEADERS for file in (root / name).rglob("*.h"))
        texts = [text for file in files if len(text := file.read_text("utf-8", "replace")) >= _LEAST_CHARACTERS]
        if len(texts) < 10:
            raise DataError(
                f"PyTorch has {len(texts)} C++ headers in {root}, and the demo learns from more: run graft demo --tiny."
            )
        for name, documents in deal(texts, {"cpp": 9, "cpp-test": 1}).items():
            write_documents(folder / f"{name}.jsonl", documents)
        write_documents(folder / "english-test.jsonl", read_installation(1).english)

    return fill_once(folder, {"torch": torch.__version__}, fill)


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether a product of matrices takes less time in bfloat16 than in float32, as where a CPU can multiply it."""

    def seconds(dtype: torch.dtype) -> float:
        left, right = (torch.randn(512, 512, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            (left @ right).sum().backward()
            assert left.grad is not None, "of the product"
            left.grad[0, 0].item()  # waits for an accelerator
            times.append(time.perf_counter() - start)
        return min(times[1:])

    return seconds(torch.bfloat16) < seconds(torch.float32)


def answers(recipe: Recipe, out: Path) -> dict[str, str]:
    """What the backbone and each graft of a comparison answer in chat."""
    backbone = load_backbone(recipe.backbone.name, dtype=recipe.backbone.dtype, device=default_device())
    given = {"before": answer(backbone.model, backbone)}
    for name in recipe.methods:
        with GraftedModel(backbone, {"graft": load_graft(out / name / "graft", backbone)}) as model:
            given[f"after, {name}"] = answer(model, backbone)
    return given


def answer(model: Any, backbone: Backbone) -> str:
    """The likeliest answer to the question, its end token shown."""
    tokenizer: Any = backbone.need_tokenizer()
    question = render_question([{"role": "user", "content": QUESTION}], tokenizer)
    prompts = [tokenizer(question, add_special_tokens=False)["input_ids"]]
    options: dict[str, Any] = {"max_new_tokens": _ANSWER_TOKENS, "do_sample": False}
    (new,) = generate_rows(model, tokenizer, prompts, end_ids(model, tokenizer), **options)
    return repr(tokenizer.decode(new))

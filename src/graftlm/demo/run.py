"""The demo: a chat model learns C++ and keeps what it can do, without any old text.

SmolLM2 is trained on the C++ headers of PyTorch, which every installation has, with neutral residues and with LoRA.
The old text is sampled from the model itself. The output folder contains the texts, the grafts, the report and the
recipe, which can be adapted to other texts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from string import Template

import torch
from pydantic import Field
from transformers import PreTrainedModel

from graftlm.backbone import Backbone, default_device, end_ids, generate_rows, load_backbone
from graftlm.config import Config
from graftlm.data.chats import render_question
from graftlm.demo.corpus import deal, read_english, write_documents
from graftlm.errors import DataError
from graftlm.evaluation import Results
from graftlm.files.writing import fill_once, write_atomically
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import Recipe, compare_recipe
from graftlm.runs.run import Log
from graftlm.store.artifact import load_graft

QUESTION = "What is the capital of France?"
_ANSWER_TOKENS = 24
_HEADER_FOLDERS = ("c10", "ATen/core", "torch/csrc/api/include/torch")
_MIN_HEADER = 2_000  # characters
_MIN_HEADERS = 10
_ENGLISH_CHARACTERS = 100_000
_TIMED_SIZE = 512  # rows and columns of a matrix


class ChatDemoSize(Config):
    """The size of the demo; tokens are the model's.

    Args:
        steps: Training steps of each method.
        batch_size: Rows per training step.
        length: Tokens per row.
        own_tokens: Tokens that the model samples as old text.
        own_test_tokens: Tokens that the model samples to measure the divergence from it.
        scored_tokens: Scored tokens of each test text.
    """

    steps: int = 60
    batch_size: int = Field(2, ge=1)
    length: int = 256
    own_tokens: int = 6000
    own_test_tokens: int = 2048
    scored_tokens: int = 3000


QUICK_CHAT = ChatDemoSize(
    steps=2,
    length=64,
    own_tokens=200,
    own_test_tokens=100,
    scored_tokens=200,
)


def run_chat_demo(
    out: str | Path = "runs/demo",
    *,
    quick: bool = False,
    seed: int = 0,
    progress: bool = True,
    log: Log = print,
) -> Results:
    """Run the demo. A second run in the same folder uses the results of the first one.

    Args:
        out: Output folder.
        quick: Run a smaller demo of the same form.
        seed: Random seed.
        progress: Show progress bars.
        log: Called with each message.

    Raises:
        BackboneError: The model is neither installed (the extra smollm2) nor available from the hub.
        DataError: The installation of PyTorch has no headers.
    """
    out = Path(out)
    make_texts(out / "corpus", log)
    recipe = fill_recipe(out, QUICK_CHAT if quick else ChatDemoSize(), seed)
    results = compare_recipe(recipe, progress=progress, log=log)
    for name, text in answers(recipe, out).items():
        log(f"{QUESTION} {name}: {text}")
    return results


def make_texts(folder: Path, log: Log) -> Path:
    """Write the C++ headers of PyTorch and an English test text as files of JSON lines, unless they exist.

    Raises:
        DataError: The installation of PyTorch has no headers.
    """

    def fill(folder: Path) -> None:
        log("Reading the C++ headers of this PyTorch installation.")
        for name, documents in deal(_read_headers(), {"cpp": 9, "cpp-test": 1}).items():
            write_documents(folder / f"{name}.jsonl", documents)
        write_documents(folder / "english-test.jsonl", read_english(_ENGLISH_CHARACTERS))

    return fill_once(folder, {"torch": torch.__version__}, fill)


def _read_headers() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    files: list[Path] = []
    for name in _HEADER_FOLDERS:
        files.extend((root / name).rglob("*.h"))
    headers = []
    for file in sorted(files):
        text = file.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _MIN_HEADER:
            headers.append(text)
    if len(headers) < _MIN_HEADERS:
        raise DataError(
            f"{root} has {len(headers)} long C++ headers, but the demo needs at least {_MIN_HEADERS}: install PyTorch "
            "from its wheel, which contains them."
        )
    return headers


def fill_recipe(out: Path, size: ChatDemoSize, seed: int) -> Recipe:
    """Fill the words after a dollar sign in `chat.yaml`, and write the recipe to `out/recipe.yaml`.

    Args:
        out: Output folder.
        size: The size of the demo.
        seed: Random seed.
    """
    is_half = bfloat16_is_faster(default_device())
    template = Template(Path(__file__).with_name("chat.yaml").read_text(encoding="utf-8"))
    text = template.substitute(
        size.model_dump(),
        dtype="bfloat16" if is_half else "float32",
        precision="bf16" if is_half else "fp32",
        warmup_steps=max(1, size.steps // 10),
        seed=seed,
        out=json.dumps(str(out))[1:-1],  # escaped, since the template puts it into quotes
    )
    path = write_atomically(out / "recipe.yaml", text.encode())
    return Recipe.from_yaml(path)


def bfloat16_is_faster(device: torch.device) -> bool:
    """Return whether a matrix product takes less time in bfloat16 than in float32."""
    return _product_seconds(torch.bfloat16, device) < _product_seconds(torch.float32, device)


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a matrix product and its gradients, the least of three after one for warming up."""
    shape = (_TIMED_SIZE, _TIMED_SIZE)
    left = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    right = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (left @ right).sum().backward()
        assert left.grad is not None
        left.grad[0, 0].item()  # waits for an accelerator
        times.append(time.perf_counter() - start)
    return min(times[1:])


def answers(recipe: Recipe, out: Path) -> dict[str, str]:
    """Return the answers to `QUESTION` of the backbone and of each graft of a comparison.

    Args:
        recipe: The recipe of the comparison.
        out: Folder of the comparison.
    """
    device = default_device()
    backbone = load_backbone(recipe.backbone.name, dtype=recipe.backbone.dtype, device=device)
    texts = {"before": answer(backbone.model, backbone)}
    for name in recipe.methods:
        graft = load_graft(out / name / "graft", backbone)
        with GraftedModel(backbone, {"graft": graft}) as model:
            texts[f"after, {name}"] = answer(model, backbone)
    return texts


def answer(model: PreTrainedModel, backbone: Backbone) -> str:
    """Return the greedy answer to `QUESTION`, with its end token."""
    tokenizer = backbone.need_tokenizer()
    prompt = render_question([{"role": "user", "content": QUESTION}], tokenizer)
    encoded = tokenizer(prompt, add_special_tokens=False)
    (new_ids,) = generate_rows(
        model,
        tokenizer,
        [encoded["input_ids"]],
        end_ids(model, tokenizer),
        max_new_tokens=_ANSWER_TOKENS,
        do_sample=False,
    )
    return repr(tokenizer.decode(new_ids))

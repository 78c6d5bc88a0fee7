"""A real pretrained model learns German from novels by the command line; a fresh process loads the graft and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from graftlm.backbone import load_backbone
from graftlm.evaluation import Results, score, value_of
from stories import convert_stories

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big dog."
)


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_stories(data_dir / "models" / "stories260K", tmp_path_factory.mktemp("stories"))


def graft(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "graftlm", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_converted_model_knows_stories(stories: Path) -> None:
    backbone = load_backbone(stories)
    tokenizer = backbone.need_tokenizer()
    assert tokenizer.decode(tokenizer(STORY)["input_ids"], skip_special_tokens=True) == STORY
    assert score(backbone.model, tokenizer, [STORY]).value("nats_per_token") < 0.7
    gibberish = STORY[::-1]
    assert score(backbone.model, tokenizer, [gibberish]).value("nats_per_token") > 4


@pytest.mark.slow
@pytest.mark.slow
def test_it_learns_german_and_keeps_its_stories(stories: Path, data_dir: Path, tmp_path: Path) -> None:
    german = str(data_dir / "lm_text" / "eltec_deu.jsonl")
    tales = tmp_path / "tales"
    tales.mkdir()
    tokenizer = load_backbone(stories).need_tokenizer()
    write_tales(stories, tales, tokenizer)
    recipe = {
        "backbone": {"name": str(stories)},
        "graft": {"kind": "neutral-residues", "alpha": 10},
        "data": {
            "new": [{"path": german, "documents": "0:2", "limit_characters": 400_000}],
            "old": [{"path": str(tales / "some.txt")}],
            "length": 128,
            "test": {
                "new": [{"path": german, "documents": "24:25", "limit_characters": 20_000}],
                "old": [{"path": str(tales / "others.txt")}],
            },
        },
        "training": {"steps": 100, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10},
        "evaluation": {"decode_prompts": 0, "limit_tokens": 5000},
        "out": str(tmp_path / "run"),
    }
    (tmp_path / "german.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    graft("train", str(tmp_path / "german.yaml"), "--json")
    row = Results.read(tmp_path / "run").rows[-1]
    learned, forgotten = value_of(row.metrics["learned"]), value_of(row.metrics["forgotten"])
    assert learned > 0.5
    assert forgotten < learned / 4

    written = json.loads(graft("generate", str(tmp_path / "run" / "graft"), "Es war einmal", "--json"))
    assert "Es war einmal" in json.dumps(written, ensure_ascii=False)


def write_tales(stories: Path, folder: Path, tokenizer: object) -> None:
    """Old-domain text of the model itself: it was trained on such stories, and no file of them is at hand."""
    import torch

    model = load_backbone(stories).model
    torch.manual_seed(0)
    start = torch.full((24, 1), model.config.bos_token_id)
    tokens = model.generate(start, do_sample=True, max_new_tokens=200, pad_token_id=2)  # type: ignore[operator]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)  # type: ignore[attr-defined]
    (folder / "some.txt").write_text("\n\n".join(texts[:16]), encoding="utf-8")
    (folder / "others.txt").write_text("\n\n".join(texts[16:]), encoding="utf-8")

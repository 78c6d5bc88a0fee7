"""SmolLM2 learns to answer questions in conversations: what does it forget, with and without its own text?

Rates are searched for every row alike, on conversations of another source than the tests, with the first seed and
half of the steps.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments import Options
from experiments.keep_smollm2.behaviour import BehaviourRun
from experiments.study import Study, aim, check_files, numbers_of, over_seeds, training_config, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.grafts import graft_config

NAME = "chat-smollm2"
MODEL = "smollm2-135m-instruct"
WIKITEXT, SHAKESPEARE = "lm_text/wikitext2_valid_test/test.txt", "lm_text/tinyshakespeare/input.txt"
MATHS, MATHS_TEST = "routing/math/gsm8k/train.jsonl", "routing/math/gsm8k/test.jsonl"
CODE, READING, SVAMP = (
    "routing/code/mbpp/mbpp.jsonl",
    "routing/reading/qed/qed-dev.jsonlines",
    "routing/math/svamp/SVAMP.json",
)
FILES = (WIKITEXT, SHAKESPEARE, MATHS, MATHS_TEST, CODE, READING, SVAMP)
CHARACTERS = 600  # of the longest conversation; a row holds 320 tokens
TESTS = 40  # conversations of each kind


class ChatRow(NamedTuple):
    """A row: its label, its graft, the rates that are searched, and its share of old text."""

    label: str
    graft: dict[str, Any]
    rates: tuple[float, ...]
    replay: float = 0.0


LORA, LORA_RATES = {"kind": "lora", "capacity": 0.1, "scale": 2.0}, (5e-4, 1e-3, 2e-3)
NEUTRAL, NEUTRAL_RATES = {"kind": "neutral-residues", "capacity": 0.1, "init": "he"}, (1.5e-3, 3e-3, 6e-3)
ADAPTER = {"kind": "adapter", "capacity": 0.1}
ROWS = {
    "lora": ChatRow("LoRA", LORA, LORA_RATES),
    "lora_replay": ChatRow("LoRA, replay of its own text", LORA, LORA_RATES, 0.25),
    "adapter_replay": ChatRow("adapter, replay of its own text", ADAPTER, LORA_RATES, 0.25),
    "neutral_replay": ChatRow("neutral residues, replay of its own text", NEUTRAL, NEUTRAL_RATES, 0.25),
}


def conversations(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Questions and answers: `train`, three sets for tests, `validation`.

    No question of the others is in `train`, and no answer of more than 40 characters.
    """
    maths, maths_test = (list(_maths(data / name)) for name in (MATHS, MATHS_TEST))
    code = [(row["text"], row["code"].replace("\r", "").strip()) for row in _lines(data / CODE)]
    reading = list(_reading(data / READING))
    svamp = json.loads((data / SVAMP).read_text(encoding="utf-8"))
    sets = {
        "train": maths[:1500] + code[:600] + reading[:900],
        "test_maths": maths_test,
        "test_code": code[600:],
        "test_reading": reading[900:],
        "validation": [(f"{row['Body']} {row['Question']}", f"{row['Answer']:g}") for row in svamp],
    }
    sets = {name: [pair for pair in pairs if len("".join(pair)) <= CHARACTERS] for name, pairs in sets.items()}
    known = {text for question, answer in sets["train"] for text in (question, answer[40:] and answer)}
    return {name: [pair for pair in pairs if name == "train" or not known & {*pair}] for name, pairs in sets.items()}


def _maths(path: Path) -> Iterator[tuple[str, str]]:
    for row in _lines(path):
        yield row["question"], re.sub(r"<<.*?>>", "", row["answer"]).replace("####", "The answer is")


def _reading(path: Path) -> Iterator[tuple[str, str]]:
    for row in _lines(path):
        yield f"{row['paragraph_text']}\n\n{row['question_text']}?", row["original_nq_answers"][0][0]["string"]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class ChatStudy(Study):
    """The runs of the experiment; `rates` has the chosen one of each row."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.rates: dict[str, float] = {}
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        for name, pairs in conversations(options.data).items():
            roles = [dict(zip(("user", "assistant"), pair, strict=True)) for pair in pairs]
            rows = [{"messages": [{"role": r, "content": text} for r, text in row.items()]} for row in roles]
            write_lines(options.out / "chats" / f"{name}.jsonl", rows)

    def source(self, name: str, limit: int | None = None) -> dict[str, Any]:
        """A source of conversations."""
        path = str(self.options.out / "chats" / f"{name}.jsonl")
        return {"path": path, "messages_column": "messages", "limit_documents": limit}

    def run(self, name: str, rate: float, seed: int, *, search: bool = False) -> BehaviourRun:
        """A row at one rate: on the tests, or in half of the steps on validation."""
        row, quick = ROWS[name], self.options.quick
        tests = ["validation"] if search else ["test_maths", "test_code", "test_reading"]
        text = {"path": str(self.options.data / (SHAKESPEARE if search else WIKITEXT)), "limit_characters": 60_000}
        tokens, steps = (300, 3) if quick else (2048, 16 if search else 32)
        data = {
            "new": [self.source("train")],
            "old": [{"self": True, "tokens": 300 if quick else 24_000}] if row.replay else [],
            "replay_fraction": row.replay,
            "length": 320,
            "boundaries": "whole",
            "test": {
                "new": [self.source(test, 4 if quick else 3 * TESTS if search else TESTS) for test in tests],
                "old": [text],
            },
            "seed": seed,
        }
        sizes = {"limit_tokens": 3 * tokens, "own_tokens": tokens if search else 2 * tokens, "batch_size": 8}
        seeds = {"own_seed": 7} if search else {}
        return BehaviourRun(
            id=f"search_{name}_lr{rate:g}" if search else f"{name}_s{seed}",
            label=row.label,
            backbone=self.backbone,
            graft=graft_config(row.graft),
            data=DataConfig.parse(data),
            training=training_config(steps, 2, rate, seed, warmup_steps=steps // 10, precision="bf16"),
            evaluation=EvaluationConfig.parse(sizes | seeds | {"precision": "bf16", "decode_prompts": 0}),
            chats=0 if search else 2 if quick else 16,
        )


def run(options: Options) -> Results:
    """Search every row's rate, then train all rows."""
    check_files(options, FILES)
    study = ChatStudy(options)
    searched = {
        name: [study.run(name, rate, study.seeds[0], search=True) for rate in row.rates[: 1 if options.quick else None]]
        for name, row in ROWS.items()
    }
    for name, best in study.choose(searched, ("new", "old", "own_kl"), "the rates").items():
        study.rates[name] = best.training.learning_rate
    runs = {(name, seed): study.run(name, study.rates[name], seed) for name in ROWS for seed in study.seeds}
    bare = runs["lora", study.seeds[0]].model_copy(update={"id": "backbone", "label": "backbone", "graft": None})
    measured = study.execute([bare, *runs.values()], "chats")
    rows = [measured["backbone"].row]
    for name, row in ROWS.items():
        rows.append(over_seeds([measured[runs[name, seed].id] for seed in study.seeds], name, row.label))
    details: Mapping[str, Any] = {"rates": study.rates, "searched": study.searched, "seconds": study.seconds}
    return study.write(NAME, rows, aims=_aims(numbers_of(rows)), details=dict(details))


def _aims(numbers: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    ours, lost = numbers["neutral_replay"], "stops lost by neutral residues with replay"
    return [
        aim("learned on answers", "learned", 0.0, ours["learned"], operator.gt),
        aim(lost, "stops", 0.1, numbers["backbone"]["stops"] - ours["stops"], operator.le),
        aim("own_kl over that of LoRA with replay", "own_kl", 1.0, ours["own_kl"] / numbers["lora_replay"]["own_kl"]),
    ]

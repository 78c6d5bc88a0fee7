"""SmolLM2 learns to answer questions in conversations: what does it forget, with and without its own text?

Rates are searched for every row in the same way, on conversations of another source than the tests, with the first seed
and half of the steps.
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
from experiments.study import (
    Study,
    aim,
    all_runs,
    check_files,
    numbers_of,
    over_seeds,
    training_config,
    write_lines,
)
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.grafts import graft_config

NAME = "chat-smollm2"
MODEL = "smollm2-135m-instruct"
WIKITEXT = "lm_text/wikitext2_valid_test/test.txt"
SHAKESPEARE = "lm_text/tinyshakespeare/input.txt"
MATHS = "routing/math/gsm8k/train.jsonl"
MATHS_TEST = "routing/math/gsm8k/test.jsonl"
CODE = "routing/code/mbpp/mbpp.jsonl"
READING = "routing/reading/qed/qed-dev.jsonlines"
SVAMP = "routing/math/svamp/SVAMP.json"
FILES = (WIKITEXT, SHAKESPEARE, MATHS, MATHS_TEST, CODE, READING, SVAMP)
CHARACTERS = 600  # of the longest conversation, which fits into a row of 320 tokens
TESTS = 40  # conversations of each kind

Pair = tuple[str, str]


class ChatRow(NamedTuple):
    """A row.

    Attributes:
        label: label of the row.
        graft: config of its graft.
        rates: learning rates of the search.
        replay: share of old text, which the model samples itself.
    """

    label: str
    graft: dict[str, Any]
    rates: tuple[float, ...]
    replay: float = 0.0


LORA = {"kind": "lora", "capacity": 0.1, "scale": 2.0}
LORA_RATES = (5e-4, 1e-3, 2e-3)
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1, "init": "he"}
NEUTRAL_RATES = (1.5e-3, 3e-3, 6e-3)
ADAPTER = {"kind": "adapter", "capacity": 0.1}
ROWS = {
    "lora": ChatRow("LoRA", LORA, LORA_RATES),
    "lora_replay": ChatRow("LoRA, replay of its own text", LORA, LORA_RATES, 0.25),
    "adapter_replay": ChatRow("adapter, replay of its own text", ADAPTER, LORA_RATES, 0.25),
    "neutral_replay": ChatRow("neutral residues, replay of its own text", NEUTRAL, NEUTRAL_RATES, 0.25),
}


def conversations(data: Path) -> dict[str, list[Pair]]:
    """Return questions and answers: `train`, three test sets and `validation`.

    No question of the other sets is in `train`, and no answer of more than 40 characters.
    """
    maths = list(_maths(data / MATHS))
    code = [(row["text"], row["code"].replace("\r", "").strip()) for row in _lines(data / CODE)]
    reading = list(_reading(data / READING))
    all_sets = {
        "train": maths[:1500] + code[:600] + reading[:900],
        "test_maths": list(_maths(data / MATHS_TEST)),
        "test_code": code[600:],
        "test_reading": reading[900:],
        "validation": list(_svamp(data / SVAMP)),
    }
    short_sets = {}
    for name, pairs in all_sets.items():
        short_sets[name] = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= CHARACTERS]
    known = set()
    for question, answer in short_sets["train"]:
        known.add(question)
        if len(answer) > 40:
            known.add(answer)
    disjoint_sets = {"train": short_sets.pop("train")}
    for name, pairs in short_sets.items():
        disjoint_sets[name] = [pair for pair in pairs if known.isdisjoint(pair)]
    return disjoint_sets


def _maths(path: Path) -> Iterator[Pair]:
    for row in _lines(path):
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        yield row["question"], answer.replace("####", "The answer is")


def _reading(path: Path) -> Iterator[Pair]:
    for row in _lines(path):
        question = f"{row['paragraph_text']}\n\n{row['question_text']}?"
        yield question, row["original_nq_answers"][0][0]["string"]


def _svamp(path: Path) -> Iterator[Pair]:
    for row in json.loads(path.read_text(encoding="utf-8")):
        yield f"{row['Body']} {row['Question']}", f"{row['Answer']:g}"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class ChatStudy(Study):
    """The runs of the experiment.

    Attributes:
        rates: chosen learning rate of each row.
        backbone: config of the backbone.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.rates: dict[str, float] = {}
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        for name, pairs in conversations(options.data).items():
            rows = [_messages(question, answer) for question, answer in pairs]
            write_lines(options.out / "chats" / f"{name}.jsonl", rows)

    def source(self, name: str, limit: int | None = None) -> dict[str, Any]:
        """Return the source config of a set of conversations."""
        return {
            "path": str(self.options.out / "chats" / f"{name}.jsonl"),
            "messages_column": "messages",
            "limit_documents": limit,
        }

    def run(self, name: str, rate: float, seed: int, *, search: bool = False) -> BehaviourRun:
        """Return the run of a row at one rate: on the tests, or on validation with half of the steps."""
        row = ROWS[name]
        steps = 16 if search else 32
        chats = 16
        if self.options.quick:
            steps = 3
            chats = 2
        return BehaviourRun(
            id=f"search_{name}_lr{rate:g}" if search else f"{name}_s{seed}",
            label=row.label,
            backbone=self.backbone,
            graft=graft_config(row.graft),
            data=self._data(row, seed, search),
            training=training_config(
                steps,
                2,
                rate,
                seed,
                warmup_steps=steps // 10,
                precision="bf16",
            ),
            evaluation=self._evaluation(search),
            chats=0 if search else chats,
        )

    def _data(self, row: ChatRow, seed: int, search: bool) -> DataConfig:
        quick = self.options.quick
        if search:
            tests = ["validation"]
            limit = 3 * TESTS
            text = SHAKESPEARE
        else:
            tests = ["test_maths", "test_code", "test_reading"]
            limit = TESTS
            text = WIKITEXT
        if quick:
            limit = 4
        old = [{"self": True, "tokens": 300 if quick else 24_000}]
        return DataConfig.parse(
            {
                "new": [self.source("train")],
                "old": old if row.replay else [],
                "replay_fraction": row.replay,
                "length": 320,
                "boundaries": "whole",
                "test": {
                    "new": [self.source(test, limit) for test in tests],
                    "old": [{"path": str(self.options.data / text), "limit_characters": 60_000}],
                },
                "seed": seed,
            }
        )

    def _evaluation(self, search: bool) -> EvaluationConfig:
        tokens = 300 if self.options.quick else 2048
        seeds: dict[str, Any] = {"own_seed": 7} if search else {}
        return EvaluationConfig(
            limit_tokens=3 * tokens,
            own_tokens=tokens if search else 2 * tokens,
            batch_size=8,
            precision="bf16",
            decode_prompts=0,
            **seeds,
        )


def _messages(question: str, answer: str) -> dict[str, Any]:
    """Return a conversation of one question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def run(options: Options) -> Results:
    """Search every row's rate, then train all rows."""
    check_files(options, FILES)
    study = ChatStudy(options)
    candidates = {}
    for name, row in ROWS.items():
        rates = row.rates[:1] if options.quick else row.rates
        candidates[name] = [study.run(name, rate, study.seeds[0], search=True) for rate in rates]
    chosen = study.choose(candidates, ("new", "old", "own_kl"), "the rates")
    study.rates = {name: best.training.learning_rate for name, best in chosen.items()}
    runs = {}
    for name in ROWS:
        runs[name] = [study.run(name, study.rates[name], seed) for seed in study.seeds]
    bare = runs["lora"][0].model_copy(update={"id": "backbone", "label": "backbone", "graft": None})
    measured = study.execute([bare, *all_runs(runs)], "chats")
    rows = [measured["backbone"].row]
    for name, row in ROWS.items():
        measurements = [measured[run.id] for run in runs[name]]
        rows.append(over_seeds(measurements, name, row.label))
    details = {
        "rates": study.rates,
        "searched": study.searched,
        "seconds": study.seconds,
    }
    return study.write(NAME, rows, aims=_aims(numbers_of(rows)), details=details)


def _aims(numbers: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    ours = numbers["neutral_replay"]
    stops_lost = numbers["backbone"]["stops"] - ours["stops"]
    ratio = ours["own_kl"] / numbers["lora_replay"]["own_kl"]
    return [
        aim("learned on answers", "learned", 0.0, ours["learned"], operator.gt),
        aim("stops lost by neutral residues with replay", "stops", 0.1, stops_lost, operator.le),
        aim("own_kl over that of LoRA with replay", "own_kl", 1.0, ratio),
    ]

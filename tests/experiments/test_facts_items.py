"""The file of judged answers: what is written is read back, and damaged or unlike files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.facts.items import ITEMS_FILE, RATE, JudgedRows, read_items, write_items
from experiments.facts.rows import SEARCH_SEED
from experiments.protocol import RateSearch
from graftlm.errors import EvaluationError, GraftError, RecipeError

LORA_3 = {"generalization": {"a": 1.0, "b": 0.0, "c": 1.0}, "spill": {"d": 0.0}}
LORA_4 = {"generalization": {"a": 0.0, "c": 1.0, "e": 1.0}}
BARE_3 = {"generalization": {"a": 0.0, "b": 0.0, "c": 0.0}, "locality_near": {"f": 1.0}}


def judged() -> JudgedRows:
    rows = JudgedRows()
    rows.add_search("lora", RateSearch({5e-4: 0.5, 1e-3: 1.25, 2e-3: 1.0}), "bf16")
    rows.add("backbone", 3, BARE_3, {}, "bf16")
    rows.add("lora", 3, LORA_3, {"new": 0.07, RATE: 1e-3}, "bf16")
    rows.add("lora", 4, LORA_4, {"new": 0.08, RATE: 1e-3}, "fp32")
    return rows


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = judged()
    read = read_items(write_items(rows, tmp_path))
    assert read == rows
    assert read.seeds == [3, 4]
    assert read.has("lora", 4)
    assert not read.has("backbone", 4)


def test_values_are_one_character_each_and_ids_are_written_once(tmp_path: Path) -> None:
    content = json.loads(write_items(judged(), tmp_path).read_text(encoding="utf-8"))
    assert content["ids"] == {"generalization": ["a", "b", "c", "e"], "locality_near": ["f"], "spill": ["d"]}
    assert content["rows"]["lora"]["3"]["values"] == {"generalization": "101-", "spill": "0"}
    assert content["rows"]["lora"]["4"]["values"] == {"generalization": "0-11"}
    assert content["precisions"] == {"3": "bf16", "4": "fp32", "100": "bf16"}


def test_seeds_of_two_files_are_pooled() -> None:
    rows = JudgedRows()
    rows.add("lora", 5, LORA_4, {RATE: 1e-3}, "bf16")
    rows.pool(judged(), seeds=[4, 5])
    assert rows.items == {"lora": {4: LORA_4, 5: LORA_4}}
    assert rows.precisions == {4: "fp32", 5: "bf16", SEARCH_SEED: "bf16"}
    assert rows.searches["lora"].best == 1e-3


def test_two_precisions_within_a_seed_are_refused() -> None:
    rows = JudgedRows()
    rows.add("routed", 3, LORA_3, {RATE: 2e-3}, "fp32")
    with pytest.raises(EvaluationError, match="Seed 3"):
        rows.pool(judged(), seeds=[3])
    with pytest.raises(EvaluationError, match="Seed 3"):
        rows.add("lora", 3, LORA_3, {RATE: 1e-3}, "bf16")
    rows.pool(judged(), seeds=[4])


def test_two_precisions_of_searches_are_refused() -> None:
    rows = JudgedRows()
    rows.add_search("routed", RateSearch({1e-3: 1.0}), "fp32")
    with pytest.raises(EvaluationError, match=f"Seed {SEARCH_SEED}"):
        rows.pool(judged(), seeds=[])


def test_two_rates_within_a_row_are_refused() -> None:
    with pytest.raises(EvaluationError, match=RATE):
        judged().add("lora", 5, LORA_4, {RATE: 2e-3}, "bf16")


def test_other_values_than_yes_and_no_are_refused(tmp_path: Path) -> None:
    rows = JudgedRows()
    rows.add("lora", 3, {"nats": {"a": 0.5}}, {}, "fp32")
    with pytest.raises(EvaluationError, match="item a"):
        write_items(rows, tmp_path)


def shorten_values(content: Any) -> None:
    content["rows"]["lora"]["3"]["values"]["generalization"] = "10"


def add_a_character(content: Any) -> None:
    content["rows"]["lora"]["3"]["values"]["generalization"] = "10x-"


def name_another_metric(content: Any) -> None:
    content["rows"]["lora"]["3"]["values"]["other"] = "1"


def repeat_an_id(content: Any) -> None:
    content["ids"]["generalization"] = ["a", "b", "c", "a"]


def drop_a_precision(content: Any) -> None:
    del content["precisions"]["4"]


def drop_the_precision_of_searches(content: Any) -> None:
    del content["precisions"]["100"]


def change_a_precision(content: Any) -> None:
    content["precisions"]["4"] = "fp8"


def change_the_rules(content: Any) -> None:
    content["rules"] = 1


def change_a_rate(content: Any) -> None:
    content["rows"]["lora"]["4"]["metrics"][RATE] = 5e-4


def drop_the_ids(content: Any) -> None:
    del content["ids"]


@pytest.mark.parametrize(
    ("damage", "error", "key"),
    [
        (shorten_values, RecipeError, "rows.lora.3.values.generalization"),
        (add_a_character, RecipeError, "rows.lora.3.values.generalization"),
        (name_another_metric, RecipeError, "rows.lora.3.values.other"),
        (repeat_an_id, RecipeError, "ids.generalization"),
        (drop_a_precision, RecipeError, "seed 4"),
        (drop_the_precision_of_searches, RecipeError, "seed 100"),
        (change_a_precision, RecipeError, "precisions.4"),
        (change_the_rules, RecipeError, "rules"),
        (change_a_rate, EvaluationError, RATE),
        (drop_the_ids, RecipeError, "ids"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, damage: Callable[[Any], None], error: type[GraftError], key: str
) -> None:
    path = write_items(judged(), tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    damage(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(error, match=key):
        read_items(path)


@pytest.mark.parametrize("text", ['{"rules": 2, "ro', "\udcff", ""])
def test_files_that_are_not_json_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / ITEMS_FILE
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(EvaluationError, match=ITEMS_FILE):
        read_items(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=ITEMS_FILE):
        read_items(tmp_path / ITEMS_FILE)

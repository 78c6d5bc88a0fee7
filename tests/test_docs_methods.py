"""The pages of methods say how a paper's components are computed here, by keys that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from graftlm.grafts import graft_class
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.pipelines.clarify.templates import Exemplar, Template
from graftlm.pipelines.summarize import SelectorTrainingConfig, WriterTrainingConfig
from graftlm.pipelines.summarize.prompt_layout import PromptLayout
from graftlm.runs.recipe import ClassifierRecipe, LanguageModelRecipe, Recipe, TaskRecipe

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = ["paper", "here", "key", "deviation and reason"]
MOST_WORDS = 25
RECIPES: list[type[BaseModel]] = [Recipe, TaskRecipe, LanguageModelRecipe]
CONFIGS: dict[str, list[type[BaseModel]]] = {
    "clarify": [Template, Exemplar],
    "summarize": [SelectorTrainingConfig, WriterTrainingConfig, PromptLayout],
    "block-state": [LanguageModelRecipe, ClassifierRecipe],
}
"""Configs of the pages that describe no kind of graft."""
MODEL_CONFIGS = {"block-state": BlockStateConfig}
"""Configs of architectures, whose keys are annotated attributes."""
WITHOUT_TABLE = {"baselines"}  # methods of others, mostly as PEFT implements them


def pages() -> dict[str, str]:
    return {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "methods").glob("*.md"))}


def rows_of(text: str) -> list[list[str]]:
    """The rows of the tables with these columns."""
    head = f"|{'|'.join(COLUMNS)}|\n|---|---|---|---|\n"
    rows = []
    for part in text.split(head)[1:]:
        table, _, _ = part.partition("\n\n")
        rows.extend([cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines())
    return rows


ROWS = {name: rows for name, text in pages().items() if (rows := rows_of(text))}
KEYS = [(name, key) for name, rows in ROWS.items() for row in rows for key in re.findall(r"`([^`]+)`", row[2])]


def test_every_page_of_a_paper_has_the_table() -> None:
    assert pages().keys() - ROWS.keys() <= WITHOUT_TABLE
    assert {name for name, _ in KEYS} == ROWS.keys()


@pytest.mark.parametrize("page", ROWS)
def test_cells_are_complete_and_short(page: str) -> None:
    for row in ROWS[page]:
        paper, here, key, deviation = row
        assert all([paper, here, deviation]), row
        assert re.sub(r"`[^`]+`(, )?", "", key) == "", f"{key} has text beside keys"
        assert max(len(cell.split()) for cell in row) <= MOST_WORDS, row


@pytest.mark.parametrize(("page", "key"), KEYS)
def test_every_key_exists_and_takes_the_value(page: str, key: str) -> None:
    path, _, value = key.partition(": ")
    if path.startswith("--"):
        assert path in options_of(page)
        return
    if page in MODEL_CONFIGS and path in MODEL_CONFIGS[page].__annotations__:
        return
    roots = CONFIGS[page] if page in CONFIGS else [graft_class(page).Config]
    keys = path.split(".")
    fields = [*fields_at(roots, keys)] or [*fields_at(RECIPES, keys)]
    assert fields, f"{page}.md names the key {path}, which no config has"
    if not value:
        return
    if path == "preset":
        assert value in graft_class(page).Config.presets
        return
    for field in fields:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(yaml.safe_load(value))


def options_of(verb: str) -> set[str]:
    """The options of a verb, from the generated table of the command line's page."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    _, _, section = text.partition(f"<!-- generated: options {verb} -->")
    table, _, _ = section.partition("<!-- end -->")
    return set(re.findall(r"^\|`(--[\w-]+)", table, re.MULTILINE))


def fields_at(models: Sequence[type[BaseModel]], path: Sequence[str]) -> Iterator[FieldInfo]:
    """Yield the fields that a path of keys leads to. The path leaves out the keys of a mapping of configs."""
    first, *rest = path
    for model in models:
        field = model.model_fields.get(first)
        if field is None:
            continue
        if not rest:
            yield field
        else:
            yield from fields_at([*models_in(field.annotation)], rest)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def test_a_key_is_found_in_mappings_of_configs_and_a_wrong_one_is_not() -> None:
    config = graft_class("composition").Config
    assert [*fields_at([config], ["augmenting", "name"])]
    assert not [*fields_at([config], ["augmenting", "nam"])]
    assert not [*fields_at([config], ["name"])]

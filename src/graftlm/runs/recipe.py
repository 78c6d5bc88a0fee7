"""The recipe: one YAML file that reproduces one training run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from graftlm.config import Config, parse_overridden, read_yaml
from graftlm.data import DataConfig
from graftlm.errors import RecipeError
from graftlm.evaluation import TaskConfig
from graftlm.grafts import GraftConfig, default_config, graft_class, kinds
from graftlm.training.config import TrainingConfig
from graftlm.runs.language_recipe import KIND, LanguageModelRecipe
from graftlm.runs.sections import AnyGraft, BackboneConfig
from graftlm.runs.task_recipe import KEY, TaskRecipe

AnyRecipe: TypeAlias = "Recipe | LanguageModelRecipe | TaskRecipe"


class EvaluationConfig(Config):
    """What is measured after training, on the recipe's test texts and on tasks of its own."""

    length: int | None = Field(None, ge=2, description="Tokens per window; the data's row length when absent.")
    batch_size: int = Field(16, ge=1)
    limit_tokens: int | None = Field(50_000, ge=1, description="Tokens scored per test set; all when null.")
    precision: Literal["fp32", "bf16"] = "fp32"
    decode_prompts: int = Field(2, ge=0, description="Prompts per domain for the decoding speed; 0 leaves it out.")
    decode_tokens: int = Field(32, ge=1, description="Tokens decoded per prompt.")
    tasks: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    forgetting_budget: float | None = Field(
        None, description="Nats per token of the old domain that the run may lose; more makes it fail."
    )


class MethodConfig(Config):
    """One row of a comparison: a graft, and what its training changes of the recipe's."""

    label: str = ""
    graft: AnyGraft
    training: dict[str, Any] = Field({}, description="Keys of the training section, such as learning_rate.")


class Recipe(Config):
    """One training run, or a comparison of several on the same data."""

    backbone: BackboneConfig
    graft: AnyGraft | None = Field(None, description="What to train; `kind` names the method.")
    methods: dict[str, MethodConfig] = Field({}, description="For graft compare: what to train, by row id.")
    data: DataConfig = DataConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    out: str = Field("runs/graft", description="Folder for the graft, its report and the checkpoints.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.graft is not None and self.graft.needs_tasks:
            raise ValueError(
                f"a graft of the kind {self.graft.kind} learns tasks, and the recipe has none: name some under tasks, "
                "in the place of data"
            )
        if self.graft is None and not self.methods:
            raise ValueError("a recipe has a graft section, or methods to compare; both are missing")
        if "backbone" in self.methods:
            raise ValueError("the method id backbone is taken by the backbone's own row; choose another")
        if self.training.steps and not self.data.new:
            raise ValueError("a run with steps needs text: name some under data.new, or set training.steps to 0")
        for name, method in self.methods.items():
            method_training(self.training, method.training, f"methods.{name}.training")
        return self

    def method(self, name: str) -> tuple[GraftConfig, TrainingConfig]:
        """Graft and training config of one method of a comparison."""
        chosen = self.methods[name]
        return chosen.graft, method_training(self.training, chosen.training, f"methods.{name}.training")

    def comparison(self) -> Self:
        """The recipe with the methods to compare: its own, or its graft beside every kind that needs no settings."""
        if self.methods:
            return self
        assert self.graft is not None
        rows = {self.graft.kind: MethodConfig(graft=self.graft)}
        for kind in kinds():
            if (config := default_config(kind)) is not None:
                rows.setdefault(kind, MethodConfig(graft=config))
        return self.model_copy(update={"methods": rows})


def method_training(base: TrainingConfig, changes: dict[str, Any], where: str) -> TrainingConfig:
    """The training section with some keys changed.

    Raises:
        RecipeError: a key is unknown or its value does not fit.
    """
    return TrainingConfig.parse(base.model_dump() | changes, where=where)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe: of a graft on text or, where it has tasks, on those; of a language model where its `kind` says so.

    Args:
        path: of a YAML file; local paths in it are relative to the working folder.
        overrides: of the form `training.steps=200`.

    Raises:
        RecipeError: one sentence on the first thing that does not fit.
    """
    where = str(path)
    return parse_overridden(lambda values: parse_recipe(values, where), read_yaml(path), overrides, where)


def parse_recipe(values: dict[str, Any], where: str) -> AnyRecipe:
    """The recipe in plain values; `kind` and `tasks` decide which of the three forms it has.

    Raises:
        RecipeError: one sentence on the first problem.
    """
    kind = values.get("kind")
    if kind is None and KEY in values:
        return TaskRecipe.parse(values, where=where)
    if kind is None:
        return Recipe.parse(values, where=where)
    if kind != KIND:
        raise RecipeError(
            f"{where}: kind is {kind!r}, but {KIND} is expected: leave kind out of a recipe that trains a graft."
        )
    return LanguageModelRecipe.parse(values, where=where)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors: every kind of graft with its own keys, and language models."""
    of_grafts, of_models, of_tasks = (one.model_json_schema() for one in (Recipe, LanguageModelRecipe, TaskRecipe))
    definitions = of_grafts.pop("$defs") | of_models.pop("$defs") | of_tasks.pop("$defs")
    of_models["required"] = sorted({*of_models["required"], "kind"})
    variants = []
    for kind in kinds():
        variant = copy.deepcopy(graft_class(kind).Config.model_json_schema())
        definitions |= variant.pop("$defs", {})
        variant["required"] = sorted({*variant.get("required", []), "kind"})
        variants.append(variant)
    definitions["GraftConfig"] = {"title": "Graft", "oneOf": variants}
    return {"title": "Recipe", "oneOf": [of_grafts, of_models, of_tasks], "$defs": definitions}

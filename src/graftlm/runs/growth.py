"""Growth: several grafts trained one after the other, each beside those before it, and attached together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig
from graftlm.evaluation import Row, value_of
from graftlm.grafts.base import ReplacesModel
from graftlm.runs.graft_run import BACKBONE_ROW, GRAFT_NAME, AnyGraft, EvaluationConfig, GraftRun, check_sections
from graftlm.runs.run import Run
from graftlm.training.config import TrainingConfig


class StageConfig(Config):
    """One stage: what it is taught, and the keys that differ from the recipe's."""

    label: str = ""
    graft: AnyGraft | None = Field(None, description="The stage's graft; the recipe's when absent.")
    training: dict[str, Any] = Field({}, description="Keys of the training section, such as learning_rate.")
    data: dict[str, Any] = Field({}, description="Keys of the data section, such as new.")


class GrowthRecipe(Config):
    """Grafts trained one after the other on one backbone.

    A stage's model has the grafts of the stages before it, which don't change any more. To its old text come the new
    texts of those stages, so that its graft is silent on what the others know.
    """

    backbone: BackboneConfig
    graft: AnyGraft | None = Field(None, description="What each stage trains, unless it has a graft of its own.")
    stages: dict[str, StageConfig] = Field(description="The stages in order, by name.")
    one_graft: bool = Field(False, description="Train one graft further in every stage instead of a new one.")
    data: DataConfig = DataConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    out: str = Field("runs/growth", description="Folder for the grafts, the report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if not self.stages:
            yield "there are no stages: name at least one, with its text under data.new"
        if BACKBONE_ROW in self.stages:
            yield "the stage name backbone is taken by the backbone's own row; choose another"
        for name in self.stages:
            if name == GRAFT_NAME or not name.replace("-", "_").isidentifier():
                yield f"a stage can't be called {name!r}: choose letters, digits, _ and -, and not {GRAFT_NAME}"
        grafts = []
        for number, (name, graft, training, data) in enumerate(self._sections()):
            where = f"stages.{name}"
            if not (training.steps and data.new):
                lacks = "new text: name some under its data.new" if training.steps else "steps: set training.steps"
                yield f"{where} has no {lacks}"
            if graft.needs_tasks:
                yield f"{where} has a graft of the kind {graft.kind}, which learns tasks, and stages have text"
            if number and data.replay_fraction and data.old_objective == "distil":
                yield (
                    f"{where} has old_objective distil, which follows the bare backbone, and that does not know what "
                    "the stages before it taught: set it to replay behind the first stage"
                )
            check_sections(training, data, self.evaluation)
            grafts.append(graft)
        replacing = [graft for graft in grafts if issubclass(graft.graft_class, ReplacesModel)]
        if len(replacing) > 1 and not self.one_graft:
            yield (
                f"grafts of the kind {replacing[1].kind} change the backbone's modules, and two of that sort can't be "
                "attached together: choose another kind for all stages but one, or set one_graft to train one further"
            )
        if self.one_graft and any(graft != grafts[0] for graft in grafts):
            yield "one_graft trains one graft further, and the stages name different ones: name it once"

    def _sections(self) -> Iterator[tuple[str, Any, TrainingConfig, DataConfig]]:
        """Name, graft, training and data of each stage; its old text has the new text of the stages before it."""
        earlier: list[Any] = []
        for name, stage in self.stages.items():
            graft = stage.graft or self.graft
            if graft is None:
                raise ValueError(f"stages.{name} has no graft: name one, or one for all stages under graft")
            training, data = changed_sections(self, stage, "stages", name)
            yield name, graft, training, data.model_copy(update={"old": [*data.old, *earlier]})
            earlier += data.new

    def runs(self) -> list[Run]:
        """The bare backbone's run, where there is something to measure, and the stages' in order."""
        shared: dict[str, Any] = {"backbone": self.backbone, "evaluation": self.evaluation}
        measured = self.data.test or self.evaluation.tasks
        runs: list[Run] = []
        if measured:
            runs.append(GraftRun(id=BACKBONE_ROW, data=self.data, training=self.training, **shared))
        before: list[str] = []
        for name, graft, training, data in self._sections():
            label = self.stages[name].label or f"after {name}: {graft.label}"
            fields = {"label": label, "graft": graft, "training": training, "data": data, **shared}
            depends_on = before[-1:] if self.one_graft else before
            runs.append(GraftRun(id=name, depends_on=tuple(depends_on), continues=self.one_graft, **fields))
            before.append(name)
        return runs

    def compared(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what the model of each stage learned and lost of texts that have a stage's name.

        `learned_NAME` is the loss of the bare backbone minus the row's, and `lost_NAME`, behind that stage, the row's
        minus that of the model of the stage, in nats per token on the same tokens.
        """
        by_id, compared = {row.id: row for row in rows}, list(rows)
        names = [name for name in self.stages if BACKBONE_ROW in by_id and name in by_id[BACKBONE_ROW].metrics]
        for number, row in enumerate(rows):
            metrics = dict(row.metrics)
            for name in names if row.id in self.stages else []:
                loss = value_of(row.metrics[name])
                metrics[f"learned_{name}"] = value_of(by_id[BACKBONE_ROW].metrics[name]) - loss
                if list(self.stages).index(name) < list(self.stages).index(row.id):
                    metrics[f"lost_{name}"] = loss - value_of(by_id[name].metrics[name])
            compared[number] = row.model_copy(update={"metrics": metrics})
        return compared


def changed_sections(recipe: Any, row: Any, kind: str, name: str) -> tuple[TrainingConfig, DataConfig]:
    """The training and data sections of a recipe's row, under `kind`: the recipe's, with the keys that the row sets."""
    where = f"{kind}.{name}"
    if changed := row.data.keys() & {"test", "validation"}:
        raise ValueError(f"{where}.data has the key {min(changed)}, and all {kind} are measured on the same texts")
    training = TrainingConfig.parse(recipe.training.model_dump() | row.training, where=f"{where}.training")
    return training, DataConfig.parse(recipe.data.model_dump() | row.data, where=f"{where}.data")

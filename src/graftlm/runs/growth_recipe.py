"""The recipe of grafts that are trained one after the other on one backbone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pydantic import Field

from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.differences import WindowChanges, paired_differences
from graftlm.evaluation.evaluator import BACKBONE_ROW, OLD_SET
from graftlm.evaluation.scores import learned_name
from graftlm.grafts import GraftConfig
from graftlm.grafts.base import ReplacesModel
from graftlm.runs.graft_recipe import MethodConfig, TextRecipe, check_sections
from graftlm.runs.graft_run import GRAFT_NAME, AnyGraft, GraftRun
from graftlm.runs.run import Run
from graftlm.training.config import TrainingConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class StageConfig(MethodConfig):
    """One stage: what it is taught, and the keys that differ from the recipe's."""

    label: str = Field("", description="Name in tables; by default the stage's and the method's.")
    graft: AnyGraft | None = Field(None, description="The stage's graft; the recipe's when absent.")


@dataclass(frozen=True)
class _Stage:
    """A stage with the sections that it trains with; its old text includes the new text of earlier stages."""

    name: str
    graft: GraftConfig
    training: TrainingConfig
    data: DataConfig


class GrowthRecipe(TextRecipe):
    """Grafts trained one after the other on one backbone.

    The model of a stage has the grafts of all earlier stages, which are frozen. The new texts of those stages are added
    to its old text, so that its graft learns not to act on them.
    """

    graft: AnyGraft | None = Field(None, description="What each stage trains, unless it has a graft of its own.")
    stages: dict[str, StageConfig] = Field(description="The stages in order, by name.")
    one_graft: bool = Field(False, description="Train one graft further in every stage instead of a new one.")
    out: str = Field("runs/growth", description="Folder for the grafts, the report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.backbone.add_tokens is not None:
            yield (
                "backbone.add_tokens gives one graft the rows of the tokens, but stages train several grafts: train "
                "one graft with graft train, or leave add_tokens out"
            )
        if not self.stages:
            yield "there are no stages: name at least one, with its text under data.new"
        if BACKBONE_ROW in self.stages:
            yield "the stage name backbone is the id of the backbone's own row: choose another"
        for name in self.stages:
            if name == GRAFT_NAME or not _NAME.fullmatch(name):
                yield (
                    f"the stage name {name!r} can't be used: take letters, digits, _ and -, begin with a letter or _, "
                    f"and don't take {GRAFT_NAME}"
                )
        grafts = []
        for number, stage in enumerate(self._trained_stages()):
            yield from self._problems_of_stage(stage, is_first=number == 0)
            grafts.append(stage.graft)
        yield from self._problems_of_grafts(grafts)

    def _problems_of_stage(self, stage: _Stage, *, is_first: bool) -> Iterator[str]:
        where = f"stages.{stage.name}"
        if not stage.training.has_steps:
            yield f"{where} has no steps: set training.steps"
        if not stage.data.new:
            yield f"{where} has no new text: name some under its data.new"
        if stage.data.sets.are_named:
            yield f"{where} has named sets of texts, but stages have names already: list the sources without sets"
        if stage.graft.needs_tasks:
            yield (
                f"{where} has a graft of the kind {stage.graft.kind}, which learns tasks, but stages have text: choose "
                "another kind"
            )
        if not is_first and stage.data.replay_fraction and stage.data.old_objective == "distil":
            yield (
                f"{where} has old_objective distil, which follows the bare backbone, but the bare backbone has not "
                "learned the earlier stages: set old_objective to replay after the first stage"
            )
        if not is_first and stage.data.anchor:
            yield (
                f"{where} has an anchor, which is the bare backbone, but the bare backbone has not learned the earlier "
                "stages: set anchor to 0 after the first stage"
            )
        check_sections(stage.training, stage.data, self.evaluation)

    def _problems_of_grafts(self, grafts: Sequence[GraftConfig]) -> Iterator[str]:
        replacing = [graft for graft in grafts if issubclass(graft.graft_class, ReplacesModel)]
        if len(replacing) > 1 and not self.one_graft:
            yield (
                f"a graft of the kind {replacing[1].kind} changes the backbone's modules, and two such grafts can't be "
                "attached together: choose another kind for all stages but one, or set one_graft to train one further"
            )
        if self.one_graft and any(graft != grafts[0] for graft in grafts):
            yield "one_graft trains one graft further, but the stages name different ones: name it once"

    def _trained_stages(self) -> Iterator[_Stage]:
        """Yield the stages in order with their sections; earlier new text is added to the old text of later stages."""
        earlier: list[SourceConfig] = []
        for name, stage in self.stages.items():
            graft = stage.graft or self.graft
            if graft is None:
                raise ValueError(f"stages.{name} has no graft: name one, or one for all stages under graft")
            training, data = self.changed_sections(stage, f"stages.{name}")
            old = [*data.old, *earlier]
            yield _Stage(name=name, graft=graft, training=training, data=data.model_copy(update={"old": old}))
            # Their weights are relative to each other, and not to the other old text.
            earlier.extend(source.model_copy(update={"weight": None}) for source in data.new)

    def runs(self) -> list[Run]:
        """Return the run of the bare backbone, unless there is nothing to measure, and those of the stages in order."""
        runs = self.backbone_runs()
        earlier: list[str] = []
        for stage in self._trained_stages():
            depends_on = earlier[-1:] if self.one_graft else earlier
            run = GraftRun(
                id=stage.name,
                label=self.stages[stage.name].label or f"after {stage.name}: {stage.graft.label}",
                depends_on=tuple(depends_on),
                continues=self.one_graft,
                backbone=self.backbone,
                graft=stage.graft,
                data=stage.data,
                training=stage.training,
                evaluation=self.evaluation,
            )
            runs.append(run)
            earlier.append(stage.name)
        return runs

    def compared(self, rows: Sequence[Row], windows: Mapping[str, WindowChanges]) -> list[Row]:
        """Add what later stages lost on the test texts that have a stage's name, with paired intervals.

            lost_NAME = loss of the row's model - loss of the model of stage NAME, in rows after that stage

        Args:
            rows: the measured rows of all stages and of the backbone.
            windows: what was learned in each window of text, by row id.

        Returns:
            The rows, with each stage's losses on the test sets that are named after earlier stages.
        """
        return [self._compared_row(row, windows) if row.id in windows else row for row in rows]

    def _compared_row(self, row: Row, windows: Mapping[str, WindowChanges]) -> Row:
        """Return the row of a stage with `lost_NAME` of earlier stages."""
        metrics: dict[str, Metric] = dict(row.metrics)
        for name in takewhile(lambda stage: stage != row.id, self.stages):
            taught = windows.get(name, {})
            if name == OLD_SET:
                lost = paired_differences(windows[row.id], taught).get("forgotten")
            else:
                lost = paired_differences(taught, windows[row.id]).get(learned_name(name))
            if lost is not None:
                metrics[f"lost_{name}"] = lost
        return row.model_copy(update={"metrics": metrics})

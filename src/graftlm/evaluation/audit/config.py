"""What an audit measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.evaluation.benchmarks import HarnessTaskConfig, PresetName
from graftlm.evaluation.benchmarks.config import duplicate_problem
from graftlm.evaluation.benchmarks.presets import with_preset
from graftlm.evaluation.tasks import TaskConfig

_OWN_SEED = 2**31 - 2  # Neither the seed of training nor that of own_kl in a run.


class AuditConfig(Config):
    """What an audit measures."""

    tokens: int = Field(10_000, ge=0, description="Tokens of text that BASE samples; 0 leaves them out.")
    seed: int = Field(_OWN_SEED, ge=0, description="Seed of that text.")
    length: int = Field(256, ge=3, description="Most tokens of a sampled text, and of a window of the user's texts.")
    answers: int = Field(32, ge=0, description="Questions of the sampled conversations that both models answer.")
    max_new_tokens: int = Field(128, ge=1, description="Most tokens of an answer.")
    prompts: list[str] = Field([], description="Questions instead of those that BASE samples.")
    new: list[SourceConfig] = Field(
        [], description="Text that TUNED was trained on; answers that name its things unasked count as spill."
    )
    examples: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    tasks: list[str] = Field([], description="Tasks of lm-evaluation-harness.")
    limit: int | None = Field(None, ge=1, description="Most questions of such a task.")
    harness: list[HarnessTaskConfig] = Field([], description="Tasks of lm-evaluation-harness, compared item by item.")
    preset: PresetName | None = Field(None, description="retention: items of IFEval, BIG-Bench Hard and NQ-open.")
    eval_data: str | None = Field(None, description="Folder of the preset's data; by default $GRAFTLM_EVAL_DATA.")
    confirm_unsafe_code: bool = Field(False, description="Run tasks that execute code which the model writes.")
    limit_tokens: int | None = Field(50_000, ge=1, description="Most tokens scored of each of the user's texts.")
    batch_size: int = Field(8, ge=1, description="Rows per forward pass.")
    budget: dict[str, float] = Field({}, description="Most that the tuned model may have of a metric.")
    quantize: Literal["int8", "int4"] | None = Field(None, description="Audit TUNED with its weights in fewer bits.")
    backbone: str | None = Field(None, description="Where the model below a graft or an adapter is now.")
    device: str | None = Field(None, description="Torch device; by default the fastest available.")
    dtype: str = Field("auto", description="Precision of models that are loaded; by default their own.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with a model.")

    def benchmarks(self) -> list[HarnessTaskConfig]:
        """Return the tasks that are compared item by item, with those of the preset.

        Raises:
            DataError: the folder of the preset's data lacks the data of a task.
            EvaluationError: the preset has a task of the same name as another one.
        """
        return with_preset(self.harness, self.preset, self.eval_data)

    def _problems(self) -> Iterator[str]:
        problem = duplicate_problem(self.harness)
        if problem is not None:
            yield problem
        if self.eval_data is not None and self.preset is None:
            yield "eval_data is set, but only a preset reads it: set preset, or leave eval_data out"

"""The run that measures a bare backbone on tasks of lm-evaluation-harness, once for all rows of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Self

from graftlm.backbone.load import BackboneConfig
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.benchmarks import HarnessTaskConfig, measure_benchmarks
from graftlm.evaluation.benchmarks.local_files import file_beside
from graftlm.evaluation.benchmarks.result import read_results, write_results
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.processes import process_state
from graftlm.runs.run import Run, RunContext
from graftlm.runs.shared import load_shared, load_shared_benchmarks, release_shared

BARE_RESULTS = "benchmarks.json"


def settings_of(task: HarnessTaskConfig) -> dict[str, object]:
    """Return what determines the items of a task, as plain JSON values: its keys, and the file of its shots."""
    settings = task.model_dump(mode="json")
    beside = None if task.data is None else file_beside(task.task, task.data)
    if beside is not None:
        settings["shots_data"] = str(beside)
    return settings


class BenchmarkRun(Run):
    """Measure a bare backbone on benchmarks. Runs with equal settings have the same id, and so share the results.

    Args:
        backbone: the backbone.
        harness: the benchmarks.
        batch_size: rows per batch; it affects speed only.
        confirm_unsafe_code: whether tasks that execute generated code are run.
    """

    backbone: BackboneConfig
    harness: list[HarnessTaskConfig]
    batch_size: int = 16
    confirm_unsafe_code: bool = False

    @classmethod
    def of(
        cls,
        backbone: BackboneConfig,
        harness: Sequence[HarnessTaskConfig],
        *,
        batch_size: int,
        confirm_unsafe_code: bool,
    ) -> Self:
        """Return the run that measures a backbone on benchmarks; the arguments are those of the class."""
        settings = [backbone.model_dump(mode="json"), [task.model_dump(mode="json") for task in harness]]
        return cls(
            id=f"benchmarks-{digest(settings)[:8]}",
            label=", ".join(task.label for task in harness),
            backbone=backbone,
            harness=list(harness),
            batch_size=batch_size,
            confirm_unsafe_code=confirm_unsafe_code,
        )

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        del settings["batch_size"], settings["confirm_unsafe_code"]
        settings["harness"] = [settings_of(task) for task in self.harness]
        return settings

    def artefacts(self) -> tuple[str, ...]:
        return (BARE_RESULTS,)

    def check(self) -> None:
        """Load the benchmarks, so that what is wrong with them is known before anything trains.

        Raises:
            GraftError: see `load_benchmarks`.
        """
        load_shared_benchmarks(tuple(self.harness), self.confirm_unsafe_code)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        context.log(f"Measuring {backbone.name} on {self.label}.")
        started = perf_counter()
        path = context.folder / BARE_RESULTS
        with process_state().main_process_first():  # The other processes read its file.
            if process_state().is_main_process:
                results = measure_benchmarks(
                    backbone.model,
                    backbone.need_tokenizer(),
                    load_shared_benchmarks(tuple(self.harness), self.confirm_unsafe_code),
                    batch_size=self.batch_size,
                    progress=context.progress,
                )
                write_results(results, path)
        metrics: dict[str, Metric] = {}
        for label, result in read_results(path).items():
            metrics.update(result.metrics(label))
        metrics["seconds"] = perf_counter() - started
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))

    @classmethod
    def release(cls) -> None:
        release_shared()

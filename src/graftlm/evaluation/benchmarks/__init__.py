"""Tasks of lm-evaluation-harness before and after training, from the hub or from local files, with paired intervals."""

from graftlm.evaluation.benchmarks.config import HarnessTaskConfig
from graftlm.evaluation.benchmarks.loading import Benchmark, load_benchmarks
from graftlm.evaluation.benchmarks.measuring import measure_benchmarks
from graftlm.evaluation.benchmarks.presets import PresetName, preset_tasks
from graftlm.evaluation.benchmarks.result import BenchmarkResult

__all__ = [
    "Benchmark",
    "BenchmarkResult",
    "HarnessTaskConfig",
    "PresetName",
    "load_benchmarks",
    "measure_benchmarks",
    "preset_tasks",
]

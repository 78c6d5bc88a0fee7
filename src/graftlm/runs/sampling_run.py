"""The run that samples a backbone's own text, which others train or measure on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import SelfSourceConfig
from graftlm.data.own_text import sample_own_text
from graftlm.evaluation import Row
from graftlm.io import digest
from graftlm.runs.run import Measurement, Run, RunContext

FILE = "samples.jsonl"


class SamplingRun(Run):
    """Samples text from one backbone; every run with these settings shares the file."""

    backbone: BackboneConfig
    source: SelfSourceConfig
    length: int

    @classmethod
    def of(cls, backbone: BackboneConfig, source: SelfSourceConfig, length: int) -> Self:
        """The run that samples texts of at most `length` tokens, where the source names no length."""
        source = source.model_copy(update={"length": source.length or length})
        settings = [backbone.model_dump(mode="json"), source.model_dump(mode="json")]
        name = f"own-text-{digest(settings)[:8]}"
        return cls(id=name, label=source.name, backbone=backbone, source=source, length=length)

    def artefacts(self) -> tuple[str, ...]:
        return (FILE,)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        context.log(f"Sampling {self.source.tokens:,} tokens of {backbone.name}'s own text.")
        started = perf_counter()
        path = context.folder / FILE
        samples = sample_own_text(backbone, self.source, self.length, path, key=context.key, progress=context.progress)
        metrics: dict[str, Any] = {
            "texts": len(samples),
            "tokens": sum(sample.tokens for sample in samples),
            "chat_texts": sum(sample.is_chat for sample in samples),
            "seconds": perf_counter() - started,
        }
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))

    @classmethod
    def release(cls) -> None:
        load_shared.cache_clear()


@lru_cache(maxsize=2)
def load_shared(backbone: BackboneConfig) -> Backbone:
    """A loaded backbone, which the runs of one process share."""
    return backbone.load()


def own_text_file(folder: Path) -> Path:
    """The file of samples in a sampling run's folder."""
    return folder / FILE

"""The run that samples text from a backbone, to train on or to measure on."""

from __future__ import annotations

from time import perf_counter
from typing import Any, ClassVar, Self

from accelerate import PartialState

from graftlm.backbone.load import BackboneConfig
from graftlm.data import SelfSourceConfig
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.runs.run import Run, RunContext
from graftlm.runs.shared import load_shared, release_shared

SAMPLES = "samples.jsonl"


class SamplingRun(Run):
    """Sample text from one backbone. All runs with equal settings share the file."""

    key_name: ClassVar[str | None] = "graftlm.runs.graft_run.SamplingRun"
    backbone: BackboneConfig
    source: SelfSourceConfig
    length: int

    @classmethod
    def of(cls, backbone: BackboneConfig, source: SelfSourceConfig, length: int) -> Self:
        """Return the run that samples the texts of a source.

        Args:
            backbone: the backbone that samples.
            source: number of tokens, seed and form of the texts.
            length: maximum tokens of a text if the source has no length.
        """
        source = source.model_copy(update={"length": source.length or length})
        settings = [backbone.model_dump(mode="json"), source.model_dump(mode="json")]
        return cls(
            id=f"own-text-{digest(settings)[:8]}",
            label=source.name,
            backbone=backbone,
            source=source,
            length=length,
        )

    def artefacts(self) -> tuple[str, ...]:
        return (SAMPLES,)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        context.log(f"Sampling {self.source.tokens:,} tokens of {backbone.name}'s own text.")
        started = perf_counter()
        with PartialState().main_process_first():  # The other processes read its file.
            samples = sample_own_text(
                backbone,
                self.source,
                self.length,
                context.folder / SAMPLES,
                key=context.key,
                progress=context.progress,
            )
        n_chats = sum(sample.is_chat for sample in samples)
        if backbone.need_tokenizer().chat_template:
            context.log(f"{n_chats:,} of {len(samples):,} texts are conversations.")
        metrics: dict[str, Any] = {
            "texts": len(samples),
            "tokens": sum(sample.tokens for sample in samples),
            "chat_texts": n_chats,
            "seconds": perf_counter() - started,
        }
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))

    @classmethod
    def release(cls) -> None:
        release_shared()

"""The run that samples text from a backbone, to train on or to measure on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar, Self

from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import SelfSourceConfig, SourceConfig, build_documents
from graftlm.data.near_text import LEFT_OUT, sample_near_text
from graftlm.data.own_answers import ANSWER_REASONS, sample_answers
from graftlm.data.own_text import OwnText
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.processes import process_state
from graftlm.runs.run import Run, RunContext
from graftlm.runs.shared import load_shared, release_shared

SAMPLES = "samples.jsonl"


class SamplingRun(Run):
    """Sample text from one backbone. Runs with equal settings have the same id, and so share the file of texts.

    Args:
        backbone: the backbone that samples.
        source: number of tokens, seed and form of the texts.
        length: maximum number of tokens of a text if the source has no length.
        new: the sources of the new text, if the sampled texts shall be near it; otherwise empty.
    """

    key_name: ClassVar[str | None] = "graftlm.runs.graft_run.SamplingRun"
    backbone: BackboneConfig
    source: SelfSourceConfig
    length: int
    new: list[SourceConfig] = []

    @classmethod
    def of(
        cls,
        backbone: BackboneConfig,
        source: SelfSourceConfig,
        length: int,
        new: Sequence[SourceConfig] = (),
    ) -> Self:
        """Return the run that samples the texts of a source.

        Args:
            backbone: the backbone that samples.
            source: number of tokens, seed and form of the texts.
            length: maximum number of tokens of a text if the source has no length.
            new: the sources of the new text; they are used only if `source.near` is set.
        """
        no_part = {"weight": None, "set": None}  # of the mixture, which does not change what is sampled
        source = source.model_copy(update={"length": source.length or length, **no_part})
        settings: list[object] = [backbone.model_dump(mode="json"), source.model_dump(mode="json")]
        near = [config.model_copy(update=no_part) for config in new] if source.near is not None else []
        if near:
            settings.append([config.model_dump(mode="json") for config in near])
        return cls(
            id=f"own-text-{digest(settings)[:8]}",
            label=source.name,
            backbone=backbone,
            source=source,
            length=length,
            new=near,
        )

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        if not self.new:
            del settings["new"]
        return settings

    def artefacts(self) -> tuple[str, ...]:
        return (SAMPLES,)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        kind = self.source.name.removeprefix("the backbone's ")
        context.log(f"Sampling {self.source.tokens:,} tokens of {backbone.name}'s {kind}.")
        started = perf_counter()
        with process_state().main_process_first():  # The other processes read its file.
            drawn = self._sample(backbone, context)
        samples = [sample for sample in drawn if not sample.left_out]
        n_chats = sum(sample.is_chat for sample in samples)
        if backbone.need_tokenizer().chat_template:
            context.log(f"Texts: {len(samples):,}, of which conversations: {n_chats:,}.")
        metrics: dict[str, Metric] = {
            "texts": len(samples),
            "tokens": sum(sample.tokens for sample in samples),
            "chat_texts": n_chats,
            "seconds": perf_counter() - started,
        }
        if self.source.near is not None:
            reasons = Counter(sample.left_out for sample in drawn if sample.left_out)
            log_reasons(reasons, len(drawn), context)
            metrics["left_out"] = reasons.total()
            for reason in ANSWER_REASONS if self.source.near == "prompts" else LEFT_OUT:
                metrics[f"left_out_{reason.replace(' ', '_')}"] = reasons[reason]
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))

    def _sample(self, backbone: Backbone, context: RunContext) -> list[OwnText]:
        """Return all texts that are drawn, with those that are left out."""
        path = context.folder / SAMPLES
        if self.source.near is None:
            return sample_own_text(
                backbone,
                self.source,
                self.length,
                path,
                key=context.key,
                progress=context.progress,
            )
        if self.source.near == "prompts":
            return sample_answers(
                backbone,
                self.source,
                build_documents(self.new),
                self.length,
                path,
                key=context.key,
                progress=context.progress,
            )
        return sample_near_text(
            backbone,
            self.source,
            build_documents(self.new),
            self.length,
            path,
            key=context.key,
            progress=context.progress,
            log=context.log,
        )

    @classmethod
    def release(cls) -> None:
        release_shared()


def log_reasons(reasons: Counter[str], drawn: int, context: RunContext) -> None:
    """Log how many texts are used, and how many are left out for each reason.

    Args:
        reasons: number of texts that are left out for each reason.
        drawn: number of all texts.
        context: where to log.
    """
    used = drawn - reasons.total()
    counts = [f"{count:,} ({reason})" for reason, count in reasons.most_common()]
    left_out = ", ".join(counts) or "none"
    context.log(f"Sampled texts: {drawn:,}, of which used: {used:,}, left out: {left_out}.")

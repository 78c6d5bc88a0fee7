"""The run in which a backbone writes the answers of new conversations in its own words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from graftlm.backbone.load import BackboneConfig
from graftlm.data import SourceConfig, build_documents
from graftlm.data.config import RewriteConfig
from graftlm.data.conversations import ChatExample
from graftlm.data.own_answers import REWRITE_REASONS, rewrite_answers, rewritten
from graftlm.data.sources import Document
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import by_content, digest
from graftlm.files.writing import write_atomically
from graftlm.processes import process_state
from graftlm.runs.run import Run, RunContext
from graftlm.runs.sampling_run import SAMPLES, log_reasons
from graftlm.runs.shared import load_shared, release_shared

_MESSAGES = "messages"


class RewritingRun(Run):
    """Rewrite the answers of new conversations. Runs with equal settings and texts have one id, and share the files.

    Args:
        backbone: the backbone that writes.
        config: how it writes.
        length: maximum number of tokens of a conversation.
        new: the sources of the conversations.
    """

    backbone: BackboneConfig
    config: RewriteConfig
    length: int
    new: list[SourceConfig]

    @classmethod
    def of(
        cls,
        backbone: BackboneConfig,
        config: RewriteConfig,
        length: int,
        new: Sequence[SourceConfig],
    ) -> Self:
        """Return the run that rewrites the answers of some sources.

        Args:
            backbone: the backbone that writes.
            config: how it writes.
            length: maximum number of tokens of a conversation.
            new: the sources of the conversations.
        """
        settings = [each.model_dump(mode="json") for each in (backbone, config, *new)]
        name = digest(by_content(settings), length)[:8]
        return cls(id=f"own-words-{name}", backbone=backbone, config=config, length=length, new=list(new))

    def artefacts(self) -> tuple[str, ...]:
        return (SAMPLES, *(_file_name(number) for number in range(len(self.new))))

    def rewritten_sources(self, folder: Path) -> list[SourceConfig]:
        """Return the sources with the rewritten answers.

        Args:
            folder: the run's folder.
        """
        selection = dict.fromkeys(
            ("dataset", "subset", "pattern", "prompt_column", "tools_column", "documents", "limit_documents")
        )
        sources = []
        for number, source in enumerate(self.new):
            update = {"path": str(folder / _file_name(number)), "messages_column": _MESSAGES, **selection}
            sources.append(source.model_copy(update=update))
        return sources

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        by_source = [build_documents([source]) for source in self.new]
        documents = [document for each in by_source for document in each]
        context.log(f"Rewriting the answers of {len(documents):,} conversations in {backbone.name}'s own words.")
        with process_state().main_process_first():  # The other processes read its file.
            samples = rewrite_answers(
                backbone,
                self.config,
                documents,
                self.length,
                context.folder / SAMPLES,
                key=context.key,
                progress=context.progress,
            )
        reasons = Counter(sample.left_out for sample in samples if sample.left_out)
        log_reasons(reasons, len(samples), context)
        if process_state().is_main_process:
            remaining = iter(samples)
            tokenizer = backbone.need_tokenizer()
            for number, each in enumerate(by_source):
                chats = [rewritten(document, next(remaining), tokenizer) for document in each]
                lines = [json.dumps(_row(chat), ensure_ascii=False) for chat in chats]
                write_atomically(context.folder / _file_name(number), "\n".join(lines).encode())
        metrics: dict[str, Metric] = {"texts": len(samples), "rewritten": len(samples) - reasons.total()}
        for reason in REWRITE_REASONS:
            metrics[f"left_out_{reason.replace(' ', '_')}"] = reasons[reason]
        return Measurement(Row(id=self.id, label="own words", metrics=metrics))

    @classmethod
    def release(cls) -> None:
        release_shared()


def _file_name(number: int) -> str:
    """Return the name of the file with the rewritten conversations of a source."""
    return f"new-{number}.jsonl"


def _row(document: Document) -> dict[str, object]:
    """Return a conversation as a row with messages, of which those that are not learned have the weight 0."""
    chat = document.chat
    assert isinstance(chat, ChatExample), "the sources have conversations"
    messages = []
    for number, message in enumerate(chat.messages):
        is_unlearned = message["role"] == "assistant" and number in chat.unlearned
        messages.append({**message, "weight": 0} if is_unlearned else message)
    row: dict[str, object] = {_MESSAGES: messages}
    if chat.tools:
        row["tools"] = list(chat.tools)
    return row

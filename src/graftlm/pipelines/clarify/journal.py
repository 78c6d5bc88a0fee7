"""Replies kept in an append-only file, so that an interrupted run continues without repeating requests."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from filelock import FileLock, Timeout

from graftlm.errors import DataError, EvaluationError, RecipeError, first_line
from graftlm.files.digests import digest
from graftlm.files.writing import write_errors
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.models import ChatModel, Reply, ScoringModel
from graftlm.pipelines.clarify.prompts import Prompt


class Journal:
    """The replies of models, one JSON line each, in a file to which lines are only appended.

    As a context manager it closes the file at the end of the block. Several threads may use it, and one process at a
    time. A line that a killed process left incomplete is removed.

    Args:
        path: the file. It is created if it does not exist, and so is its folder.

    Raises:
        DataError: a complete line is not a reply.
        EvaluationError: the file can't be written, or another process uses it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._guard = threading.Lock()
        self._requests: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        with write_errors(self.path, EvaluationError, "free some space or choose another folder"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._use = FileLock(f"{self.path}.lock", timeout=0)
        try:
            self._use.acquire()
        except Timeout:
            raise EvaluationError(
                f"Another process writes to {self.path}: wait for its end, or choose another file."
            ) from None
        try:
            with write_errors(self.path, EvaluationError, "free some space or choose another folder"):
                self._file: BinaryIO = self.path.open("a+b")
                self._replies = self._read()
        except BaseException:
            self._use.release()
            raise

    def _read(self) -> dict[str, Reply]:
        """Read the replies by key, and remove an incomplete last line."""
        self._file.seek(0)
        content = self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            self._file.truncate(len(complete))
        replies: dict[str, Reply] = {}
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                values = json.loads(line)
                replies[values["key"]] = Reply(
                    text=values["text"],
                    cost=Cost.parse(values["cost"]),
                    truncated=values["truncated"],
                )
            except (ValueError, KeyError, TypeError, RecipeError) as error:
                raise DataError(
                    f"{self.path}:{number} is not a reply ({first_line(error)}): name a file that an earlier run "
                    "wrote, or a new one."
                ) from None
        return replies

    def wrap(self, model: ChatModel, identity: str) -> ChatModel:
        """Return a model whose replies are looked up in the journal and added to it.

        Args:
            model: the model.
            identity: what determines its replies besides the prompt, such as its name and its limit of tokens. A reply
                is found again only under the same identity.
        """
        if isinstance(model, ScoringModel):
            return _ScoringJournaledModel(self, model, identity)
        return _JournaledModel(self, model, identity)

    def reply(self, key: str, request: Callable[[], Reply]) -> Reply:
        """Return the reply of a key, and request and append it if there is none.

        Threads that ask for the same key at the same time cause one request.
        """
        with self._guard:
            own = self._requests[key]
        with own:
            if key not in self._replies:
                reply = request()
                self._append(key, reply)
                self._replies[key] = reply
            return self._replies[key]

    def _append(self, key: str, reply: Reply) -> None:
        values = {
            "key": key,
            "text": reply.text,
            "cost": reply.cost.model_dump(),
            "truncated": reply.truncated,
        }
        line = json.dumps(values, ensure_ascii=False).encode() + b"\n"
        with self._guard, write_errors(self.path, EvaluationError, "free some space, then continue the run"):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._use.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _JournaledModel:
    """A model whose replies are kept in a journal."""

    def __init__(self, journal: Journal, model: ChatModel, identity: str) -> None:
        self._journal = journal
        self._model = model
        self._identity = identity

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._model.name

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Return the reply of the journal, or that of the model. A reply of the journal is passed on in one piece."""
        was_requested = False

        def request() -> Reply:
            nonlocal was_requested
            was_requested = True
            return self._model.generate(prompt, on_text=on_text)

        key = digest(self._identity, prompt.label, prompt.messages())
        reply = self._journal.reply(key, request)
        if on_text is not None and not was_requested:
            on_text(reply.text)
        return reply


class _ScoringJournaledModel(_JournaledModel):
    """A model that also scores outputs. Scores cost no request, so they are computed again."""

    def __init__(self, journal: Journal, model: ScoringModel, identity: str) -> None:
        super().__init__(journal, model, identity)
        self._scoring = model

    def score(self, prompt: Prompt, outputs: Sequence[str]) -> list[float]:
        """Compute the log-probability of each output, in nats, with the model."""
        return self._scoring.score(prompt, outputs)

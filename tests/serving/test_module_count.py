"""A streamed completion passes through few modules of GraftLM between HTTP and its tokens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from starlette.testclient import TestClient

import graftlm
from graftlm.backbone import Backbone
from graftlm.grafts import build_graft, graft_config
from graftlm.serving.app import create_app
from graftlm.serving.service import open_service
from graftlm.store.artifact import save_graft
from tiny import tiny_model, tiny_tokenizer

MOST_MODULES = 15
PACKAGE = f"{Path(graftlm.__file__).parent}/"


class ModuleProfiler:
    """Records the modules of GraftLM whose functions are called, in every thread that starts while it is installed.

    Attributes:
        modules: paths below the package's folder.
        recording: calls count only while it is True.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.recording = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if self.recording and event == "call" and file.startswith(PACKAGE):
            self.modules.add(file.removeprefix(PACKAGE))

    @contextmanager
    def installed(self) -> Iterator[ModuleProfiler]:
        """Profile this thread and all that start later."""
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield self
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]  # None removes the profiler
            sys.setprofile(None)

    def record(self, call: Callable[[], object]) -> set[str]:
        """The modules that one call enters."""
        self.modules.clear()
        self.recording = True
        try:
            call()
        finally:
            self.recording = False
        return set(self.modules)


def modules_of_a_streamed_completion(folder: Path) -> set[str]:
    """The modules between the receipt of a request for a neutral-residues graft and its last event."""
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    save_graft(build_graft(graft_config({"kind": "neutral-residues"}), backbone), backbone, folder / "danish")
    body = {"model": "danish", "prompt": "the fox", "max_tokens": 4, "stream": True}
    with ModuleProfiler().installed() as profiler:
        service = open_service(backbone, {"danish": folder / "danish"}, name="tiny")
        with TestClient(create_app(service), base_url="http://localhost") as client:

            def stream() -> None:
                events = client.post("/v1/completions", json=body).text.strip().split("\n\n")
                assert events[-1] == "data: [DONE]", events
                assert len(events) > 2, events  # tokens that are ready at once share an event

            return profiler.record(stream)


def test_a_streamed_completion_enters_few_modules(tmp_path: Path) -> None:
    modules = modules_of_a_streamed_completion(tmp_path)
    assert len(modules) <= MOST_MODULES, f"{len(modules)} modules, {MOST_MODULES} at most: {', '.join(sorted(modules))}"

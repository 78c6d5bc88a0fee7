"""The engines of several backbones as one: each request goes to the engine that knows its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.protocol import EngineStats, GenerationRequest, RequestStream, ServingError, check_model


class EngineRouter:
    """An `Engine` of `protocol.py` over several; requests that are submitted together are for one backbone."""

    def __init__(self, engines: Sequence[ThreadedEngine]) -> None:
        self.engines = tuple(engines)

    def _owners(self) -> dict[str, ThreadedEngine]:
        """The engine of each name: the backbones' names first, then the grafts' names."""
        names = [(engine, engine.names) for engine in self.engines]
        grafts = {graft: engine for engine, (_, *grafts) in names for graft in grafts}
        return {engine.name: engine for engine in self.engines} | grafts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._owners())

    def of(self, model: str) -> ThreadedEngine:
        """The engine of a model. Raises UnknownModelError, and ServingError for a mixture over two backbones."""
        owners = self._owners()
        check_model([*owners], model)
        engines = {owners[part].name: owners[part] for part in model.split("+")}
        if len(engines) > 1:
            why = f"{model!r} joins what belongs to the backbones {' and '.join(engines)}: join grafts of one."
            raise ServingError(why, "model")
        return next(iter(engines.values()))

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        return self.of(requests[0].model).submit(requests)

    def replace(self, name: str, graft: object | None) -> None:
        """Use a graft on its own backbone; a graft of the same name on another one is gone."""
        for engine in sorted(self.engines, key=lambda engine: not engine.fits(graft)):  # which may refuse it
            engine.replace(name, graft if engine.fits(graft) else None)

    def stats(self) -> EngineStats:
        each = [engine.stats() for engine in self.engines]
        finished = sum((Counter(stats.finished) for stats in each), Counter[str]())
        running, waiting, tokens = map(
            sum, zip(*((stats.running, stats.waiting, stats.tokens) for stats in each), strict=True)
        )
        return EngineStats(running, waiting, tokens, finished)

    def close(self, grace: float) -> bool:
        with ThreadPoolExecutor(len(self.engines)) as pool:  # all have the same seconds
            return all([*pool.map(lambda engine: engine.close(grace), self.engines)])

"""The engines of several backbones as one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.protocol import EngineStats, GenerationRequest, RequestStream, ServingError, check_model


class EngineRouter:
    """An `Engine` that sends requests to the engine of their model.

    Requests that are submitted together are for one backbone.

    Args:
        engines: the engines of the backbones.
    """

    def __init__(self, engines: Sequence[ThreadedEngine]) -> None:
        self.engines = tuple(engines)

    def _owners(self) -> dict[str, ThreadedEngine]:
        """Return the engine of each name; the backbones' names come first."""
        owners = {engine.name: engine for engine in self.engines}
        for engine in self.engines:
            for graft in engine.names[1:]:
                owners[graft] = engine
        return owners

    @property
    def names(self) -> tuple[str, ...]:
        """The backbones' names, followed by the grafts' names."""
        return tuple(self._owners())

    def of(self, model: str) -> ThreadedEngine:
        """Return the engine of a model.

        Raises:
            UnknownModelError: a name is unknown.
            ServingError: a mixture has grafts of several backbones, or a wrong weight.
        """
        owners = self._owners()
        engines = {owners[name].name: owners[name] for name in check_model(list(owners), model)}
        if len(engines) > 1:
            raise ServingError(
                f"The mixture {model!r} has models of the backbones {' and '.join(engines)}: join grafts of the same "
                "backbone.",
                "model",
            )
        return next(iter(engines.values()))

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        """Submit at least one request, all to the engine of the first request's model.

        Raises:
            ServingError: the model is unknown, its grafts have several backbones, or its engine refuses a request.
        """
        return self.of(requests[0].model).submit(requests)

    def replace(self, name: str, graft: object | None) -> None:
        """Use a graft on its own backbone, and remove the name from the engines of other backbones.

        Raises:
            GraftError: an engine rejects the name or the graft; the engines before it have changed already.
        """
        # The engine of the graft comes first, because it may reject the graft.
        engines = sorted(self.engines, key=lambda engine: not engine.fits(graft))
        for engine in engines:
            engine.replace(name, graft if engine.fits(graft) else None)

    def stats(self) -> EngineStats:
        """Return the sums of the numbers of all engines."""
        stats_of_engines = [engine.stats() for engine in self.engines]
        finished: Counter[str] = Counter()
        for stats in stats_of_engines:
            finished.update(stats.finished)
        return EngineStats(
            running=sum(stats.running for stats in stats_of_engines),
            waiting=sum(stats.waiting for stats in stats_of_engines),
            tokens=sum(stats.tokens for stats in stats_of_engines),
            finished=finished,
        )

    def close(self, grace: float) -> bool:
        """Close all engines at the same time.

        Args:
            grace: maximum number of seconds to wait for running requests.

        Returns:
            True if all requests of all engines finished in time.
        """
        with ThreadPoolExecutor(len(self.engines)) as pool:
            results = list(pool.map(lambda engine: engine.close(grace), self.engines))
        return all(results)

"""The models of a vLLM server by their names in requests, while grafts come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from graftlm.errors import ArtifactError, GraftError
from graftlm.grafts import Graft
from graftlm.serving.errors import LOG
from graftlm.serving.protocol import UnknownModelError
from graftlm.serving.vllm.adapters import AdapterWriter, ServedGraft
from graftlm.serving.vllm.process import VllmProcess


class ServedModels:
    """The backbone and its grafts. All methods belong to one event loop.

    A new version of a graft replaces the old one at once; the adapters of the old one are unloaded when the last
    request that uses them has ended.

    Args:
        backbone: name of the backbone in requests and in vLLM.
        process: vLLM.
        writer: writes the adapters of grafts.
        bare: an adapter without effect that answers for the backbone; None if the backbone answers itself.
    """

    def __init__(self, backbone: str, process: VllmProcess, writer: AdapterWriter, bare: str | None = None) -> None:
        self.backbone = backbone
        self._process = process
        self._writer = writer
        self._bare = bare
        self._grafts: dict[str, ServedGraft] = {}
        self._members: dict[str, Graft] = {}
        self._mixtures: dict[str, Mapping[str, float]] = {}
        self._loaded: set[str] = set()
        self._retired: set[str] = set()
        self._users: Counter[str] = Counter()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps weak references only

    def name_in_vllm(self, adapter: str | None) -> str:
        """Return the name of an adapter in vLLM; for None, that of the model that answers for the backbone."""
        return adapter or self._bare or self.backbone

    @property
    def names(self) -> list[str]:
        """The names of all models, with the backbone first."""
        return [self.backbone, *sorted(self._grafts)]

    def of(self, name: str) -> ServedGraft | None:
        """Return the graft of a name; None for the backbone.

        Raises:
            UnknownModelError: there is no such model.
        """
        if name == self.backbone:
            return None
        if name in self._grafts:
            return self._grafts[name]
        if "+" in name or name.rpartition(":")[0] in self._grafts:
            raise UnknownModelError(
                f"There is no model {name[:100]!r}: with the engine vllm, a sum of grafts has the name and the "
                "weights that the server was started with (--mix NAME=A:X+B:Y).",
                "model",
            )
        raise UnknownModelError(f"There is no model {name[:100]!r}: use one of {', '.join(self.names)}.", "model")

    @contextmanager
    def use(self, adapter: str | None) -> Iterator[None]:
        """Keep an adapter loaded while a request uses it.

        Args:
            adapter: an adapter of a graft that `of` has just returned; None for the backbone.
        """
        if adapter is None:
            yield
            return
        self._users[adapter] += 1
        try:
            yield
        finally:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
            self._unload_unused()

    async def put(self, name: str, graft: Graft | None) -> None:
        """Put a graft or a new version of it into service, or remove its name.

        Args:
            name: its name.
            graft: the graft; None removes the name.

        Raises:
            ArtifactError: vLLM can't serve the graft, or can't without a restart.
            GraftError: vLLM refuses an adapter.
        """
        async with self._changing:
            if graft is None:
                self._members.pop(name, None)
                self._retire(self._grafts.pop(name, None))
            else:
                await self._add(await asyncio.to_thread(self._writer.write, name, graft))
                self._members[name] = graft
            for mixture, weights in self._mixtures.items():
                if name in weights:
                    await self._update_mixture(mixture, weights)

    async def put_mixture(self, name: str, weights: Mapping[str, float]) -> None:
        """Put a weighted sum of grafts into service. It changes with its grafts.

        Args:
            name: its name, which no graft may have.
            weights: the weight of each graft, which must be in service.
        """
        async with self._changing:
            self._mixtures[name] = weights
            await self._update_mixture(name, weights)

    async def _update_mixture(self, name: str, weights: Mapping[str, float]) -> None:
        """Write a mixture of the present versions of its grafts; withdraw it while one is missing or does not fit."""
        try:
            missing = [member for member in weights if member not in self._members]
            if missing:
                raise ArtifactError(f"The graft {missing[0]} is not in service.")
            served = await asyncio.to_thread(self._writer.write_mixture, name, weights, self._members)
            await self._add(served)
        except GraftError as error:
            LOG.warning("mixture %s: withdrawn (%s)", name, error)
            self._retire(self._grafts.pop(name, None))

    async def _add(self, served: ServedGraft) -> None:
        try:
            for adapter in served.adapters.values():
                await self._process.load(adapter, self._writer.folder / adapter)
                self._loaded.add(adapter)
        except BaseException:
            self._retire(served)
            raise
        previous = self._grafts.get(served.name)
        self._grafts[served.name] = served
        self._retire(previous)

    def _retire(self, served: ServedGraft | None) -> None:
        if served is None:
            return
        for adapter in served.adapters.values():
            if adapter in self._loaded:
                self._retired.add(adapter)
            else:
                self._writer.remove(adapter)
        self._unload_unused()

    def _unload_unused(self) -> None:
        for adapter in [adapter for adapter in self._retired if not self._users[adapter]]:
            self._retired.discard(adapter)
            self._loaded.discard(adapter)
            task = asyncio.get_running_loop().create_task(self._unload(adapter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _unload(self, adapter: str) -> None:
        await self._process.unload(adapter)
        self._writer.remove(adapter)

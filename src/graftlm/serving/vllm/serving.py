"""Start vLLM with a backbone and its grafts, and serve until a signal."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, BackboneError, GraftError
from graftlm.export.folder import check_weights
from graftlm.export.many import Mixtures, checked_entries
from graftlm.export.vllm import check_server, vllm_variables
from graftlm.grafts import Graft
from graftlm.serving.errors import LOG
from graftlm.serving.server import address_of
from graftlm.serving.settings import ApiKeys, ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.vllm.adapters import AdapterWriter, Needs, model_for_vllm
from graftlm.serving.vllm.installation import Installation
from graftlm.serving.vllm.models import ServedModels
from graftlm.serving.vllm.process import VllmProcess, VllmUnreachableError
from graftlm.serving.vllm.proxy import Proxy

_SPARE_SLOTS = 1
_WATCH_SECONDS = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is started.

    Attributes:
        installation: its environment.
        slots: number of different adapters in one batch; None for all that are there at the start, and two more.
        mixtures: names of weighted sums of grafts.
        arguments: further arguments of its server.
    """

    installation: Installation
    slots: int | None = None
    mixtures: Mixtures = field(default_factory=dict)
    arguments: Sequence[str] = ()


def serve_with_vllm(
    backbone: Backbone,
    name: str,
    given: Mapping[str, Path],
    folder: Path | None,
    options: VllmOptions,
    *,
    settings: ServerSettings,
    keys: ApiKeys,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a backbone and its grafts by vLLM until SIGTERM or SIGINT. SIGHUP loads changed grafts.

    Args:
        backbone: a causal language model with its tokenizer.
        name: its name in requests.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders, which is watched.
        options: how vLLM is started.
        settings: settings of the HTTP server.
        keys: API keys; without keys every client is accepted.
        on_ready: called with the address once the server accepts requests.

    Raises:
        ArtifactError: vLLM can't serve a graft in `given`.
        BackboneError: the backbone is not a causal language model.
        GraftError: vLLM does not start or ends, a name can't be used, or the address is in use.
    """
    if backbone.kind != "causal-lm":
        raise BackboneError(
            f"{backbone.name} is loaded as {backbone.kind}, but vLLM serves causal language models here: leave out "
            "--engine."
        )
    check_weights(backbone)
    server = _Server(backbone, name, given, folder, options, settings, keys)
    asyncio.run(server.run(on_ready))


class _Server:
    """The parts of the server, see `serve_with_vllm`."""

    def __init__(
        self,
        backbone: Backbone,
        name: str,
        given: Mapping[str, Path],
        folder: Path | None,
        options: VllmOptions,
        settings: ServerSettings,
        keys: ApiKeys,
    ) -> None:
        self.backbone = backbone
        self.name = name
        self.options = options
        self.settings = settings
        self.keys = keys
        self.refused: dict[str, str] = {}
        self.store = GraftStore({name: backbone}, given, folder)
        self.grafts = self.store.open(check=self._check)
        entries = checked_entries(self.grafts, options.mixtures) if options.mixtures else {}
        self.mixtures = {mixture: entries[mixture] for mixture in options.mixtures}
        for mixture in self.mixtures:
            if mixture == name:
                raise GraftError(f"The mixture {mixture} has the name of the backbone: choose another name.")
        self.needs = Needs.of(self.grafts, self.mixtures, backbone)
        if self.needs.settings is None:
            LOG.info("no graft is there: grafts that come later need a restart, because vLLM starts without adapters")
        if self.needs.carrier is not None:
            check_server(backbone, target="vllm")

    def _check(self, name: str, graft: Graft) -> None:
        """Raise `ArtifactError` if vLLM can't serve a graft, or its name is taken."""
        if name in self.options.mixtures:
            raise ArtifactError(f"The graft's name {name} is that of a mixture (--mix): choose another name.")
        try:
            Needs.of({name: graft}, {}, self.backbone)
        except ArtifactError as error:
            raise ArtifactError(f"{str(error).rstrip('.')}. vLLM can't serve {name}.") from None

    async def run(self, on_ready: Callable[[str], None] | None) -> None:
        """Start vLLM, load the grafts, and serve."""
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):  # a signal while vLLM starts
            await self._run(on_ready)

    async def _run(self, on_ready: Callable[[str], None] | None) -> None:
        with tempfile.TemporaryDirectory(prefix="graftlm-vllm-") as scratch:
            process = VllmProcess(
                self.options.installation,
                await asyncio.to_thread(model_for_vllm, self.needs.carrier, self.backbone),
                self._arguments(Path(scratch)),
                Path(scratch),
                environment=vllm_variables(self.backbone) if self.needs.carrier is not None else None,
            )
            try:
                await process.start()
                proxy = await self._proxy(process, Path(scratch))
                await self._serve(proxy, on_ready)
            except VllmUnreachableError:
                raise GraftError("vLLM ended while it loaded the grafts: read its log above.") from None
            finally:
                await process.stop()

    def _arguments(self, scratch: Path) -> list[str]:
        """Return the arguments of vLLM's server."""
        dtype = str(self.backbone.model.dtype).removeprefix("torch.")  # vLLM would round float32 by itself
        arguments = ["--served-model-name", self.name, "--dtype", dtype]
        settings = self.needs.settings
        if settings is not None:
            slots = self.options.slots or settings.max_loras + _SPARE_SLOTS
            if self.options.installation.is_for_cpus:
                slots += 1  # for the bare model
            arguments += settings._replace(max_loras=slots).arguments(has_carrier=self.needs.carrier is not None)
        if self.settings.chat_template is not None:
            template = scratch / "chat_template.jinja"
            template.write_text(self.settings.chat_template, encoding="utf-8")
            arguments += ["--chat-template", str(template)]
        return [*arguments, *self.options.arguments]

    async def _proxy(self, process: VllmProcess, scratch: Path) -> Proxy:
        """Load all grafts into vLLM, and return the proxy."""
        adapters = scratch / "adapters"
        adapters.mkdir()
        writer = AdapterWriter(self.backbone, self.needs.carrier, adapters, self.needs.settings)
        bare = None
        if self.needs.settings is not None and self.options.installation.is_for_cpus:
            # While all slots are taken, the CPU build of vLLM 0.32 lets the last adapter act on rows without one. Slots
            # stay taken after an adapter was unloaded.
            bare = writer.write_blank(self.needs.blank)
            await process.load(bare, adapters / bare)
        models = ServedModels(self.name, process, writer, bare)
        for name, graft in self.grafts.items():
            try:
                await models.put(name, graft)
            except GraftError as error:
                if name in self.store.given or name in _members(self.mixtures):
                    raise
                LOG.warning("graft %s: %s", name, error)
                self.refused[name] = str(error)
        for name, weights in self.mixtures.items():
            await models.put_mixture(name, weights)
        return Proxy(
            models=models,
            process=process,
            tokenizer=ServingTokenizer(self.backbone, self.settings.chat_template),
            settings=self.settings,
            keys=self.keys,
            vllm_version=self.options.installation.version,
            problems=lambda: {**self.refused, **self.store.problems()},
        )

    async def _serve(self, proxy: Proxy, on_ready: Callable[[str], None] | None) -> None:
        config = uvicorn.Config(
            proxy.app(),
            host=self.settings.host,
            port=self.settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(self.settings.grace)),
        )
        server = _HttpServer(config, proxy, on_ready)
        watching = asyncio.create_task(self._watch_grafts(proxy))
        guarding = asyncio.create_task(_end_with_vllm(proxy, server))
        try:
            await server.serve()
        except SystemExit:  # uvicorn has logged the reason
            self.settings.check_address()
            raise
        finally:
            watching.cancel()
            guarding.cancel()
        if server.failed:
            raise GraftError("vLLM ended while it served: read its log above, and start the server again.")

    async def _watch_grafts(self, proxy: Proxy) -> None:
        """Check the grafts' files at intervals, and at SIGHUP."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, asked.set)

        def replace(name: str, graft: Graft | None) -> None:
            if graft is not None:
                self._check(name, graft)
            asyncio.run_coroutine_threadsafe(proxy.models.put(name, graft), loop).result()
            self.refused.pop(name, None)

        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), self.settings.reload_seconds or None)
            now = asked.is_set()
            asked.clear()
            try:
                await asyncio.to_thread(self.store.refresh, replace, None, now=now)
            except Exception:  # for example, a folder that can't be listed for some time
                LOG.exception("the grafts' files could not be checked; the next check tries again")


class _HttpServer(uvicorn.Server):
    """A uvicorn server that says when it is ready, and refuses requests once it stops.

    Attributes:
        failed: whether it stopped because vLLM ended.
    """

    def __init__(self, config: uvicorn.Config, proxy: Proxy, on_ready: Callable[[str], None] | None) -> None:
        super().__init__(config)
        self._proxy = proxy
        self._on_ready = on_ready
        self.failed = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, and at once at the second; uvicorn's own handlers would end the process."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(address_of(self))

    async def shutdown(self, sockets: list | None = None) -> None:
        self._proxy.closing.set()
        await super().shutdown(sockets)


async def _end_with_vllm(proxy: Proxy, server: _HttpServer) -> None:
    """Stop the server when vLLM ends."""
    while proxy.process.is_running:
        await asyncio.sleep(_WATCH_SECONDS)
    server.failed = True
    server.should_exit = True


def _members(mixtures: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Return the names of the grafts in mixtures."""
    return {name for weights in mixtures.values() for name in weights}

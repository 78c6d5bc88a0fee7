"""The server of `graft serve` under Ray Serve: as many replicas as the load needs, behind one address.

    pip install 'graftlm[serve]' 'ray[serve]'
    python serve_replicas.py --backbone google/gemma-2-2b --grafts runs/served --replicas 1 --most 4

Each replica is a whole server: it loads the backbone, answers in batches of its own, and reads grafts anew when their
files change. A prompt goes to the replica that has read the longest beginning of it for the same model, whose prefix
cache then has it. Where that replica has a full batch, or nobody knows the prompt, it goes to the replica with the
fewest requests. Ray starts and stops replicas as requests come.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import signal
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from graftlm.serving.errors import error_response
from graftlm.serving.protocol import QueueFullError, ServingError
from graftlm.serving.settings import ServerSettings, read_keys

BLOCK = 256  # characters; about 64 tokens, two blocks of the servers' prefix cache
MAX_BLOCKS = 64  # of a prompt that are looked at
KEPT = 20_000  # blocks that are remembered for each replica
BATCH = 16  # requests that a replica generates at a time
MAX_BODY = 8 * 2**20  # bytes, as a server takes them at most


def prefixes(body: bytes) -> list[str]:
    """Hashes of all beginnings of a request's prompt in whole blocks, shortest first; each depends on the model."""
    try:
        values = json.loads(body)
        prompt = values.get("prompt") or values.get("messages") or values.get("input") or values.get("text") or ""
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        running = hashlib.sha256(str(values.get("model")).encode())
    except (ValueError, AttributeError):  # the replica says what is wrong with it
        return []
    found = []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        running.update(text[start : start + BLOCK].encode("utf-8", "surrogatepass"))
        found.append(running.hexdigest())
    return found


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has read the longest beginning of its prompt, else to the least busy."""

    def initialize_state(self) -> None:
        self._read: dict[Any, OrderedDict[str, None]] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of replicas: of the first with room for another request, Ray takes the one with the fewest."""
        hashes = pending_request.args[0] if pending_request is not None and pending_request.args else []
        least_busy = random.sample(candidate_replicas, len(candidate_replicas))  # in any order, as Ray compares them

        def known(replica: Any) -> int:
            return sum(one in self._read.get(replica.replica_id, ()) for one in hashes)

        def has_room(replica: Any) -> bool:
            return (self.replica_queue_len_cache.get(replica.replica_id) or 0) < BATCH

        readers = [replica for replica in candidate_replicas if known(replica) and has_room(replica)]
        return [*([replica] for replica in sorted(readers, key=known, reverse=True)), least_busy]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        read = self._read.setdefault(replica_id, OrderedDict())
        for one in pending_request.args[0] if pending_request.args else []:
            read[one] = None
            read.move_to_end(one)
        while len(read) > KEPT:
            read.popitem(last=False)

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        names = {replica.replica_id for replica in replicas}
        self._read = {name: read for name, read in getattr(self, "_read", {}).items() if name in names}


class Replica:
    """A whole server, whose application is called with the parts of a request and yields those of its answer."""

    def __init__(self, backbone: str, grafts: str | None, host: str) -> None:
        from graftlm.backbone import default_device, load_backbone
        from graftlm.serving.app import create_app
        from graftlm.serving.service import open_service

        settings = ServerSettings(host=host)  # where Ray's proxy listens: a local one answers to local names alone
        model = load_backbone(backbone, device=default_device())
        self._app = create_app(open_service(model, folder=grafts, settings=settings, keys=read_keys()))
        self._lifespan: Any = None

    async def answer(self, prefixes: list[str], scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
        """(status, headers), then the chunks of the body; the router has read `prefixes`."""
        if self._lifespan is None:  # it watches the grafts' files
            self._lifespan = self._app.router.lifespan_context(self._app)
            await self._lifespan.__aenter__()
        sent: asyncio.Queue[Any] = asyncio.Queue()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Future()  # a client that leaves cancels all of it

        task = asyncio.create_task(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                start = message["type"] == "http.response.start"
                yield (message["status"], message["headers"]) if start else message.get("body", b"")
        finally:
            task.cancel()


def too_large() -> Response:
    """The error that `graft serve` sends."""
    message = f"The request is larger than {MAX_BODY:,} bytes, which is the most: send less text."
    return error_response(ServingError(message, status=413, code="request_too_large"))


class Front:
    """Reads the bodies of requests, by which replicas are chosen, and passes answers on as they come.

    It checks key and size before it reads a body; whatever else is wrong, the replica says.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas, self._keys = replicas.options(stream=True), read_keys()

    async def __call__(self, request: Request) -> Response:
        headers, body = request.headers, bytearray()
        if self._keys and request.method == "POST" and not self._keys.name_of_header(headers.get("authorization", "")):
            message = "The API key is missing or wrong: send the header Authorization: Bearer KEY."
            return error_response(ServingError(message, status=401, code="invalid_api_key"))
        if int(headers.get("content-length") or 0) > MAX_BODY:
            return too_large()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return too_large()
        keys = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
        scope = {key: request.scope[key] for key in keys if key in request.scope}
        parts = self._parts(prefixes(bytes(body)), {**scope, "root_path": ""}, bytes(body))
        try:
            status, headers = await anext(parts)
        except BackPressureError:
            return error_response(QueueFullError("The queue of all replicas is full: try again in a moment."))
        except RayActorError:
            message = "The replica that had the request has died: send it again, and another one answers."
            return error_response(ServingError(message, status=503, code="replica_died"))
        answer = StreamingResponse(parts, status_code=status)
        answer.raw_headers = [(bytes(name), bytes(value)) for name, value in headers]
        return answer

    async def _parts(self, *request: Any) -> AsyncGenerator[Any, None]:
        """What a replica yields, which stops when the client leaves."""
        parts = self._replicas.answer.remote(*request)
        try:
            async for part in parts:
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            parts.cancel()  # of 250 that left at once, Ray alone left 13 running
            raise


def application(
    backbone: str, grafts: str | None, replicas: int, most: int, cpus: float, gpus: float, host: str = "127.0.0.1"
) -> serve.Application:
    """Replicas behind a front; Ray keeps their number between `replicas` and `most`.

    Args:
        backbone: a model's name or folder, the same on every machine.
        grafts: a folder of grafts' folders, on a disk that every machine sees.
        replicas, most: the least and the most.
        cpus, gpus: of each.
        host: where Ray's proxy listens.
    """
    scaling = AutoscalingConfig(
        min_replicas=replicas,
        max_replicas=most,
        target_ongoing_requests=BATCH,
        upscale_delay_s=10,
        downscale_delay_s=600,  # a new replica begins with an empty prefix cache
    )
    limits: dict[str, Any] = {
        "max_ongoing_requests": 2 * BATCH,
        "max_queued_requests": 256,
        "graceful_shutdown_timeout_s": 60,
    }
    deployment = serve.deployment(
        autoscaling_config=scaling,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **limits,
    )
    front = serve.deployment(max_ongoing_requests=1024, max_queued_requests=256, ray_actor_options={"num_cpus": 0})
    return front(Front).bind(deployment(Replica).bind(backbone, grafts, host))


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="a model's name or folder")
    parser.add_argument("--grafts", help="a folder of grafts' folders")
    parser.add_argument("--replicas", type=int, default=1, help="the least")
    parser.add_argument("--most", type=int, default=4, help="the most")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": chosen.host, "port": chosen.port, "request_timeout_s": 600})
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # after Ray, which sets a handler of its own
    sizes = (max(1, chosen.replicas), max(chosen.replicas, chosen.most), chosen.cpus, chosen.gpus, chosen.host)
    serve.run(application(chosen.backbone, chosen.grafts, *sizes))
    print(f"serving at http://{chosen.host}:{chosen.port}", flush=True)  # noqa: T201  # what a user waits for
    try:
        while not stop.wait(1):
            pass
    except KeyboardInterrupt:
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

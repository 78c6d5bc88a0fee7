"""The server of `graft serve` under Ray Serve: several replicas behind one address.

    pip install 'graftlm[serve]' 'ray[serve]'
    python serve_replicas.py --backbone google/gemma-2-2b --grafts runs/served --replicas 2

Each replica is a whole server: it loads the backbone, answers in batches of its own, and reads grafts anew when their
files change. Ray's proxy sends each request to a replica with few under way, and passes streams on.
"""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

import ray
from ray import serve


def application(backbone: str, grafts: str | None, replicas: int, cpus: float, gpus: float) -> serve.Application:
    """Replicas of the server's application, each of which loads models when it starts.

    Args:
        backbone: a model's name or folder, the same on every machine.
        grafts: a folder of grafts' folders, on a disk that every machine sees.
        replicas: how many.
        cpus, gpus: of each.
    """

    def build() -> Any:
        from graftlm.backbone import default_device, load_backbone
        from graftlm.serving.app import create_app
        from graftlm.serving.service import open_service
        from graftlm.serving.settings import ServerSettings, read_keys

        settings = ServerSettings(host="0.0.0.0")  # noqa: S104  # Ray's proxy listens, under any name
        model = load_backbone(backbone, device=default_device())
        return create_app(open_service(model, folder=grafts, settings=settings, keys=read_keys()))

    limits = {"max_ongoing_requests": 256, "graceful_shutdown_timeout_s": 60}
    resources = {"num_cpus": cpus, "num_gpus": gpus}
    deployment = serve.deployment(num_replicas=replicas, ray_actor_options=resources, **limits)
    return deployment(serve.ingress(build)()).bind()


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="a model's name or folder")
    parser.add_argument("--grafts", help="a folder of grafts' folders")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1.0, help="of each replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": chosen.host, "port": chosen.port, "request_timeout_s": 600})
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # after Ray, which sets a handler of its own
    serve.run(application(chosen.backbone, chosen.grafts, chosen.replicas, chosen.cpus, chosen.gpus))
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

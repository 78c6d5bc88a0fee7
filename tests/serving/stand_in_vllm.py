"""A stand-in for vLLM's server: the routes that `graft serve --engine vllm` uses, with answers that say who answered.

It runs as `python stand_in_vllm.py -m vllm.entrypoints.openai.api_server --model ...`, in place of vLLM's Python. A
text that contains "slowly" is answered after a second. The prompt "die" ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VERSION = "0.32.0"


class StandIn:
    """The state of the server: its adapters, and what it was asked to do."""

    def __init__(self, arguments: argparse.Namespace, others: list[str]) -> None:
        self.name = arguments.served_model_name
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.cancelled = 0
        self.adapters: set[str] = set()

    def write_log(self) -> None:
        """Write what was asked for to the file that an environment variable names."""
        file = os.environ.get("STAND_IN_LOG")
        if file:
            log = {"loads": self.loads, "unloads": self.unloads, "cancelled": self.cancelled}
            draft = Path(f"{file}.part")
            draft.write_text(json.dumps(log))
            draft.rename(file)

    def app(self) -> Starlette:
        routes = [
            Route("/health", lambda request: Response()),
            Route("/v1/models", self.models),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/metrics", lambda request: Response("requests 1\n", media_type="text/plain")),
        ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"data": [{"id": self.name, "max_model_len": 77}]})

    async def load(self, request: Request) -> Response:
        body = await request.json()
        adapter = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        if adapter["r"] == 5:
            return JSONResponse({"error": {"message": "five is not a rank. Sorry."}}, 400)
        self.adapters.add(body["lora_name"])
        self.loads.append(body["lora_name"])
        self.write_log()
        return Response("loaded")

    async def unload(self, request: Request) -> Response:
        body = await request.json()
        self.adapters.discard(body["lora_name"])
        self.unloads.append(body["lora_name"])
        self.write_log()
        return Response("unloaded")

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        if body["model"] not in {self.name, *self.adapters}:
            return JSONResponse({"error": {"message": f"no model {body['model']}", "code": 404}}, 404)
        if "die" in json.dumps(body.get("prompt")):
            os._exit(3)
        if body.get("stream"):
            return StreamingResponse(self.events(body), media_type="text/event-stream")
        if "slowly" in json.dumps(body):
            for _ in range(20):
                await asyncio.sleep(0.05)
                if await request.is_disconnected():
                    self.cancelled += 1
                    self.write_log()
                    return Response()
            if body["model"] not in {self.name, *self.adapters}:
                return JSONResponse({"error": {"message": f"{body['model']} was unloaded", "code": 500}}, 500)
        return JSONResponse({"model": body["model"], "choices": [{"text": f"answer of {body['model']}"}]})

    async def events(self, body: dict[str, object]) -> AsyncIterator[str]:
        try:
            for number in range(3):
                text = f'{number} "model":"{body["model"]}"\u2028\x85'
                chunk = {"model": body["model"], "choices": [{"text": text}]}
                yield f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"
                if "slowly" in json.dumps(body):
                    await asyncio.sleep(0.3)
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            self.write_log()
            raise


def main() -> None:
    if sys.argv[1] == "-I":
        print(os.environ.get("STAND_IN_VERSION", f"vllm {VERSION}"))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, others = parser.parse_known_args(sys.argv[3:])
    if not Path(arguments.model, "config.json").exists():
        print(f"no model {arguments.model}", file=sys.stderr)
        sys.exit(5)
    if "--fail" in others:
        print("no such device", file=sys.stderr)
        sys.exit(4)
    uvicorn.run(StandIn(arguments, others).app(), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()

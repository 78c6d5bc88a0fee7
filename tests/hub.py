"""A local stand-in of the hub: the part of its HTTP interface that huggingface_hub and datasets use.

Repositories live in memory, as {kind/OWNER/NAME: {path: bytes}}. `HF_ENDPOINT` of a child process is its `url`; the
variable is read when huggingface_hub is imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"


class Hub:
    """The server; `repositories` may be filled before, and are looked at after, what a child process does."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.uploads: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, kind: str, name: str, folder: Path) -> None:
        """Put a folder's files into a repository of the kind models or datasets."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[f"{kind}/{name}"] = files

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """What a child process has to have set; nothing that is fetched outlives `home`."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        own |= {"TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        return own | ({"HF_TOKEN": token} if token else {"HF_TOKEN": ""})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {'/'.join(parts)}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if parts[0] == "uploads":
            self.hub.uploads[parts[1]] = body
            self._send({})
        elif self.command == "POST" and not (known or parts[-1] == "validate-yaml" or "paths-info" in parts):
            self._send({"error": "Invalid username or password."}, 401)
        elif parts[:2] == ["api", "repos"]:
            self._create(json.loads(body))
        elif parts[:2] == ["api", "validate-yaml"]:
            self._validate(json.loads(body)["content"])
        elif parts[:2] == ["api", "whoami-v2"]:
            self._send({"name": "me", "type": "user"}) if known else self._send({"error": "Invalid token"}, 401)
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self._batch(json.loads(body))
        elif parts[0] == "api":
            self._repository(parts[1], "/".join(parts[2:4]), parts[4:], body, known)
        else:
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            self._file(kind, "/".join(parts[:2]), "/".join(parts[4:]), known)

    def _send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _create(self, values: dict[str, Any]) -> None:
        name = f"{values.get('organization') or 'me'}/{values['name']}"
        if values.get("organization") not in (None, "me"):
            return self._send({"error": "You don't have the rights to create a model there"}, 403)
        known = f"models/{name}" in self.hub.repositories
        self.hub.repositories.setdefault(f"models/{name}", {})
        if values.get("private") or values.get("visibility") == "private":
            self.hub.private.add(f"models/{name}")
        return self._send({"url": f"{self.hub.url}/{name}"}, 409 if known else 200)

    def _validate(self, card: str) -> None:
        wrong = "base_model: ./" in card or "base_model: /" in card
        problem = {"errors": [{"message": '"base_model" is no model of the hub'}], "warnings": []}
        self._send(problem if wrong else {"errors": [], "warnings": []}, 400 if wrong else 200)

    def _batch(self, values: dict[str, Any]) -> None:
        actions = lambda oid: {"upload": {"href": f"{self.hub.url}/uploads/{oid}"}}  # noqa: E731
        objects = [{**each, "actions": actions(each["oid"])} for each in values["objects"]]
        self._send({"transfer": "basic", "objects": objects})

    def _repository(self, kind: str, name: str, rest: list[str], body: bytes, known: bool) -> None:
        files = self._visible(kind, name, known)
        if files is None:
            return None
        action = rest[0] if rest else "info"
        if action == "preupload":
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"  # noqa: E731
            listed = [{**each, "uploadMode": mode(each["path"])} for each in json.loads(body)["files"]]
            return self._send({"files": [{**each, "shouldIgnore": False, "oid": None} for each in listed]})
        if action == "commit":
            return self._commit(files, [json.loads(line) for line in body.splitlines()], name)
        if action == "tree":
            return self._send(
                [self._entry(files, path) for path in sorted(files) if path.startswith("/".join(rest[2:]))]
            )
        if action == "paths-info":
            values = json.loads(body) if body[:1] == b"{" else _form(body)
            return self._send([self._entry(files, path) for path in values["paths"] if path in files])
        siblings = [{"rfilename": path} for path in sorted(files)]
        info = {
            "id": name,
            "modelId": name,
            "sha": commit_of(files),
            "siblings": siblings,
            "private": False,
            "tags": [],
        }
        return self._send({**info, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "cardData": {}})

    def _entry(self, files: dict[str, bytes], path: str) -> dict[str, Any]:
        oid = hashlib.sha1(files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(files[path]), "oid": oid}

    def _commit(self, files: dict[str, bytes], lines: list[dict[str, Any]], name: str) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = commit_of(files)
        self._send({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def _visible(self, kind: str, name: str, known: bool) -> dict[str, bytes] | None:
        repository = f"{kind}/{name}"
        if repository not in self.hub.repositories or (repository in self.hub.private and not known):
            problem = {"error": "Repository not found"}
            self._send(
                problem, 404 if known else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found"
            )
            return None
        return self.hub.repositories[repository]

    def _file(self, kind: str, name: str, path: str, known: bool) -> None:
        files = self._visible(kind, name, known)
        if files is None:
            return None
        commit = commit_of(files)
        if path not in files:
            return self._send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        tag = hashlib.sha1(files[path]).hexdigest()
        return self._send(files[path], X_Repo_Commit=commit, ETag=f'"{tag}"', Accept_Ranges="none")


def _form(body: bytes) -> dict[str, list[str]]:
    from urllib.parse import parse_qs

    return parse_qs(body.decode())

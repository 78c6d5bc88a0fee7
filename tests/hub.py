"""A local server with the part of the hub's HTTP interface that huggingface_hub and datasets use.

Repositories are kept in memory, as {kind/OWNER/NAME: {path: bytes}}. Set `HF_ENDPOINT` of a child process to the
server's `url`: huggingface_hub reads the variable when it is imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stand_in"


class Hub:
    """The server. Tests fill `repositories` before a child process runs, and inspect them afterwards."""

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
        """Put the files of a folder into a repository of the kind `models` or `datasets`."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[f"{kind}/{name}"] = files

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Return the variables of a child process that uses this hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_TOKEN": token or "",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def commit_of(files: dict[str, bytes]) -> str:
    content = b"".join(path.encode() + files[path] for path in sorted(files))
    return hashlib.sha1(content).hexdigest()


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
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        is_public = parts[-1] == "validate-yaml" or "paths-info" in parts
        if parts[0] == "uploads":
            self.hub.uploads[parts[1]] = body
            self._send({})
        elif self.command == "POST" and not has_token and not is_public:
            self._send({"error": "Invalid username or password."}, 401)
        elif parts[:2] == ["api", "repos"]:
            self._create(json.loads(body))
        elif parts[:2] == ["api", "validate-yaml"]:
            self._validate(json.loads(body)["content"])
        elif parts[:2] == ["api", "whoami-v2"]:
            self._whoami(has_token)
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self._batch(json.loads(body))
        elif parts[0] == "api":
            self._repository(parts[1], "/".join(parts[2:4]), parts[4:], body, has_token)
        elif parts[0] == "datasets":
            self._file("datasets", "/".join(parts[1:3]), "/".join(parts[5:]), has_token)
        else:
            self._file("models", "/".join(parts[:2]), "/".join(parts[4:]), has_token)

    def _send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _whoami(self, has_token: bool) -> None:
        if has_token:
            self._send({"name": "me", "type": "user"})
        else:
            self._send({"error": "Invalid token"}, 401)

    def _create(self, values: dict[str, Any]) -> None:
        owner = values.get("organization") or "me"
        if owner != "me":
            self._send({"error": "You don't have the rights to create a model there"}, 403)
            return
        name = f"{owner}/{values['name']}"
        exists = f"models/{name}" in self.hub.repositories
        self.hub.repositories.setdefault(f"models/{name}", {})
        if values.get("private") or values.get("visibility") == "private":
            self.hub.private.add(f"models/{name}")
        self._send({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)

    def _validate(self, card: str) -> None:
        if "base_model: ./" in card or "base_model: /" in card:
            self._send({"errors": [{"message": '"base_model" is no model of the hub'}], "warnings": []}, 400)
        else:
            self._send({"errors": [], "warnings": []})

    def _batch(self, values: dict[str, Any]) -> None:
        objects = []
        for entry in values["objects"]:
            upload = {"href": f"{self.hub.url}/uploads/{entry['oid']}"}
            objects.append({**entry, "actions": {"upload": upload}})
        self._send({"transfer": "basic", "objects": objects})

    def _repository(self, kind: str, name: str, rest: list[str], body: bytes, has_token: bool) -> None:
        files = self._visible(kind, name, has_token)
        if files is None:
            return
        action = rest[0] if rest else "info"
        if action == "preupload":
            self._preupload(json.loads(body)["files"])
        elif action == "commit":
            self._commit(files, [json.loads(line) for line in body.splitlines()], name)
        elif action == "tree":
            folder = "/".join(rest[2:])
            paths = [path for path in sorted(files) if path.startswith(folder)]
            self._send([self._entry(files, path) for path in paths])
        elif action == "paths-info":
            values = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
            paths = [path for path in values["paths"] if path in files]
            self._send([self._entry(files, path) for path in paths])
        else:
            self._send(self._info(files, name))

    def _preupload(self, files: list[dict[str, Any]]) -> None:
        entries = []
        for file in files:
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            entries.append({**file, "uploadMode": mode, "shouldIgnore": False, "oid": None})
        self._send({"files": entries})

    def _info(self, files: dict[str, bytes], name: str) -> dict[str, Any]:
        return {
            "id": name,
            "modelId": name,
            "sha": commit_of(files),
            "siblings": [{"rfilename": path} for path in sorted(files)],
            "private": False,
            "tags": [],
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "cardData": {},
        }

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

    def _visible(self, kind: str, name: str, has_token: bool) -> dict[str, bytes] | None:
        """Return the files of a repository, or send an error and return None."""
        repository = f"{kind}/{name}"
        is_hidden = repository in self.hub.private and not has_token
        if repository in self.hub.repositories and not is_hidden:
            return self.hub.repositories[repository]
        self._send(
            {"error": "Repository not found"},
            404 if has_token else 401,
            X_Error_Code="RepoNotFound",
            X_Error_Message="Repository not found",
        )
        return None

    def _file(self, kind: str, name: str, path: str, has_token: bool) -> None:
        files = self._visible(kind, name, has_token)
        if files is None:
            return
        commit = commit_of(files)
        if path not in files:
            self._send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        tag = hashlib.sha1(files[path]).hexdigest()
        self._send(files[path], X_Repo_Commit=commit, ETag=f'"{tag}"', Accept_Ranges="none")

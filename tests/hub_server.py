"""A stand-in for the Hugging Face Hub on 127.0.0.1: as much of its API as downloads of models and data sets ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the stand-in has. Names are those of the API: "models/owner/name" or "datasets/owner/name".

    `folders`: the files of each repository; `refused`: HTTP status (and the Hub's error code) of repositories that it
    does not give; `broken`: "owner/name/file" of downloads that end too early; `asked`: the requests so far.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if path.startswith("/api/"):
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
        else:
            kind, owner, name, *rest = _of_file(path)
        repository = f"{kind}/{owner}/{name}"
        if repository in self.hub.refused:
            status, code = self.hub.refused[repository]
            self._json(status, {"error": "refused"}, {"X-Error-Code": code} if code else {})
        elif repository not in self.hub.folders:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            self._api(repository, rest)
        else:
            self._file(repository, "/".join(rest[2:]))

    do_HEAD = do_POST = do_GET

    def _api(self, repository: str, rest: list[str]) -> None:
        files = sorted(file for file in self.hub.folders[repository].iterdir() if file.is_file())
        if rest and rest[0] in ("tree", "paths-info"):
            self._json(200, [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _tag(f)} for f in files])
            return
        content = {"id": repository.partition("/")[2], "sha": COMMIT, "private": False, "gated": False, "downloads": 0}
        self._json(200, content | {"tags": [], "siblings": [{"rfilename": file.name} for file in files]})

    def _file(self, repository: str, name: str) -> None:
        file = self.hub.folders[repository] / name
        if not file.is_file():
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        is_broken = f"{repository.partition('/')[2]}/{name}" in self.hub.broken
        headers = {"ETag": f'"{_tag(file)}"', "X-Repo-Commit": COMMIT}
        self._send(200, content[: len(content) // 3] if is_broken else content, len(content), headers)
        if is_broken:
            self.close_connection = True

    def _json(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self._send(status, body, len(body), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, body: bytes, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""


def _of_file(path: str) -> list[str]:
    """Kind, owner, name and the rest of a file's path, which names the kind for data sets only."""
    parts = path.strip("/").split("/")
    return parts if parts[0] == "datasets" else ["models", *parts]


def _tag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A running stand-in at `url`, still empty."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

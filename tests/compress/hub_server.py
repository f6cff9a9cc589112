"""A stand-in for the Hugging Face Hub on 127.0.0.1: a good data set, a private one, and one whose download breaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"text": f"Row {i} of the good data set, about rivers and bridges."} for i in range(60)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
REPOSITORIES = ("acme/good", "acme/broken")


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        path = unquote(urlsplit(self.path).path)
        if "/paths-info/" in path and any(f"/datasets/{name}/" in path for name in REPOSITORIES):
            self._json(200, [_entry()])
        else:
            self._refuse(path, with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        name = next((name for name in REPOSITORIES if f"datasets/{name}" in path), None)
        if name is None:
            self._refuse(path, with_body)
        elif path.startswith("/api/datasets/") and "/tree/" in path:
            self._json(200, [_entry()])
        elif path.startswith("/api/datasets/"):
            self._json(200, {"id": name, "sha": SHA, "private": False, "gated": False, "tags": [], "downloads": 0,
                             "siblings": [{"rfilename": "train.jsonl"}]})  # fmt: skip
        elif path.endswith("/train.jsonl"):
            self._file(broken=name == "acme/broken", with_body=with_body)
        else:
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _refuse(self, path: str, with_body: bool) -> None:
        if "acme/private" in path:
            self._json(401, {"error": "Invalid username or password."}, {"X-Error-Message": "Invalid credentials"})
        else:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _json(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, broken: bool, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.send_header("ETag", f'"{SHA}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        if with_body:
            self.wfile.write(CONTENT[: len(CONTENT) // 3] if broken else CONTENT)
        if broken:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Keep the tests' output clean."""


def _entry() -> dict[str, object]:
    return {"type": "file", "path": "train.jsonl", "size": len(CONTENT), "oid": SHA}


@contextmanager
def hub_server() -> Iterator[str]:
    """The address of a running stand-in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

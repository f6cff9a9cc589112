"""`octavo chat` against a server that answers by script."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from octavo.cli.chat_client import ChatClient
from octavo.cli.main import main
from octavo.errors import OctavoError, UserError


def _chunk(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class Script(BaseHTTPRequestHandler):
    """Echoes how many messages it got; a message `fail` is refused and `break` ends in an error event."""

    seen: ClassVar[list[dict]] = []

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "first-model"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"body": body, "key": self.headers.get("Authorization")})
        last = body["messages"][-1]["content"]
        if last == "fail":
            self._send(400, json.dumps({"error": {"message": "max_tokens is 0; it must be at least 1"}}).encode())
        elif last == "break":
            self._send(200, _chunk("half") + b'data: {"error": {"message": "the engine ended"}}\n\n')
        else:
            count = str(len(body["messages"]))
            self._send(
                200, _chunk(None) + _chunk("n=") + b": comment\n\n" + _chunk(count) + b"data: [DONE]\n\n" + _chunk("x")
            )

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Script.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_quick_message(url, capsys):
    words = [
        "chat",
        "--url",
        url + "/v1",
        "-q",
        "hello",
        "--system-prompt",
        "be brief",
        "--api-key",
        "k",
        "--temperature",
        "0",
    ]
    assert main(words) == 0
    assert capsys.readouterr().out == "n=2\n"
    sent = Script.seen[0]
    assert sent["key"] == "Bearer k"
    assert sent["body"] == {
        "model": "first-model",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": 512,
        "temperature": 0.0,
    }


def test_a_conversation_remembers_and_forgets(url, capsys, monkeypatch):
    lines = iter(["one", "two", "/clear", "three"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--url", url, "--model-name", "mine"]) == 0
    assert capsys.readouterr().out == "n=1\nn=3\nn=1\n\n"
    assert Script.seen[1]["body"]["messages"][1] == {"role": "assistant", "content": "n=1"}
    assert Script.seen[0]["body"]["model"] == "mine"


def test_what_the_server_refuses_is_shown(url, capsys):
    assert main(["chat", "--url", url, "-q", "fail"]) == 1
    assert "the server answered 400: max_tokens is 0; it must be at least 1" in capsys.readouterr().err


def test_an_error_in_the_stream_is_shown(url):
    out = io.StringIO()
    with pytest.raises(OctavoError, match="broke off: the engine ended"):
        ChatClient(url, None, None, 8, None).answer([{"role": "user", "content": "break"}], out)
    assert out.getvalue() == "half"


def test_a_url_without_scheme_is_refused():
    with pytest.raises(UserError, match="'localhost:8000'; it must start with http"):
        ChatClient("localhost:8000", None, None, 8, None)

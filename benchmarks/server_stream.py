"""How many streamed chunks a second one server process sustains, and what each costs it.

    python benchmarks/server_stream.py [--streams 200] [--seconds 10] [--step-ms 50] [--chat] [--profile FILE]

The real server (HTTP, validation, detokenizer, metrics, the socket to the engine) runs over `stub_engine.py`, which
makes a token a request a step without a model. A lean client of its own process keeps `--streams` requests of 512
tokens in and 128 out open, and reads one answer in full to check it. The figure is the server process's CPU time a
chunk, requests and everything else included: unlike a rate, it says the same on a machine that has other work.
With --step-ms 0 the engine is never waited for, and the rate is what the server can do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

HERE = Path(__file__).parent
TEXT = (HERE.parent / "README.md").read_text(encoding="utf-8")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128


def serve(port: int, step_ms: float, profile: str | None) -> None:
    """The server's process."""
    os.environ["STUB_STEP_MS"] = str(step_ms)
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    from octavo.engine.client import EngineClient
    from octavo.engine.config import EngineConfig
    from octavo.server.config import ServerConfig
    from octavo.server.run import serve as run_server

    EngineClient.engine_module = "stub_engine"
    engine = EngineConfig(model="demo")
    settings = ServerConfig(port=port, uvicorn_log_level="error", disable_uvicorn_access_log=True)
    if profile is None:
        run_server(engine, settings)
    else:
        import cProfile

        cProfile.runctx("run_server(engine, settings)", globals(), locals(), profile)


class Stream(asyncio.Protocol):
    """One connection that asks again and again until `deadline`."""

    def __init__(self, request: bytes, deadline: float, counts: dict[str, int], answer: bytearray | None) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._request, self._deadline, self._counts, self._answer = request, deadline, counts, answer
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._counts["chunks"] += data.count(b"data: {")
        self._counts["reads"] += 1
        if self._answer is not None:
            self._answer += data
        self._tail = (self._tail + data)[-5:]
        if self._tail != b"0\r\n\r\n":
            return
        self._counts["requests"] += 1
        self._answer = None
        if time.perf_counter() < self._deadline:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


def load(pipe: Connection, port: int, body: bytes, path: str, streams: int, seconds: float) -> None:
    """The client's process; sends what it counted, and one whole answer."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body

    async def main() -> None:
        loop = asyncio.get_running_loop()
        counts, answer = {"chunks": 0, "reads": 0, "requests": 0}, bytearray()
        deadline = time.perf_counter() + seconds
        opened = []
        for i in range(streams):
            kept = None if i else answer
            _, stream = await loop.create_connection(
                lambda k=kept: Stream(request, deadline, counts, k), "127.0.0.1", port
            )
            opened.append(stream.done)
            await asyncio.sleep(0.002)
        await asyncio.gather(*opened)
        pipe.send((counts, bytes(answer)))

    uvloop.run(main())


def text_of(answer: bytes, is_chat: bool) -> str:
    """The text of a whole HTTP answer in chunked encoding."""
    events = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})", answer, re.MULTILINE)]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"]["content"] if is_chat else c["text"] for c in choices)


def measure(args: argparse.Namespace) -> dict[str, float]:
    from octavo.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("demo")
    ids = tokenizer.encode(TEXT, add_special_tokens=False)[:PROMPT_TOKENS]
    body: dict[str, Any] = {"model": "demo", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
                            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    body |= {"messages": [{"role": "user", "content": TEXT[:1600]}]} if args.chat else {"prompt": ids}
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(port, args.step_ms, args.profile))
    server.start()
    try:
        wait_until_up(port)
        ours, theirs = context.Pipe()
        process = psutil.Process(server.pid)
        load_args = (theirs, port, json.dumps(body).encode(), path, args.streams, args.seconds)
        client = context.Process(target=load, args=load_args)
        before, begin = process.cpu_times(), time.perf_counter()
        client.start()
        counts, answer = ours.recv()
        cpu, wall = process.cpu_times(), time.perf_counter() - begin
        client.join()
    finally:
        server.terminate()
        server.join()
    if not args.chat:
        expected = tokenizer.decode(ids[:OUTPUT_TOKENS])
        assert text_of(answer, args.chat) == expected, "the streamed text is not what the engine said"
    chunks = counts["requests"] * OUTPUT_TOKENS
    user, system = cpu.user - before.user, cpu.system - before.system
    return {
        "chunks": chunks, "requests": counts["requests"], "wall_s": wall, "chunks_s": chunks / wall,
        "cpu_us_chunk": 1e6 * (user + system) / chunks, "user_us": 1e6 * user / chunks,
        "system_us": 1e6 * system / chunks, "chunks_s_core": chunks / (user + system),
        "reads_chunk": counts["reads"] / chunks,
    }  # fmt: skip


def wait_until_up(port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10, help="after which no new request is begun")
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--profile", metavar="FILE", help="run the server under cProfile (slower) and write FILE")
    result = measure(parser.parse_args())
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()

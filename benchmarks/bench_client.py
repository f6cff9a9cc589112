"""What one streamed chunk costs the load generator: Octavo's own HTTP client beside httpx, on the same server.

    python benchmarks/bench_client.py [--requests 64] [--tokens 256] [--rounds 3]

A small server in a process of its own sends chunks as fast as it can to 16 streams at once. Both clients parse every
chunk and count its tokens; the figure is this process's CPU time a chunk, the rounds are interleaved. A client that
costs a tenth of a millisecond a chunk cannot load a server that makes ten thousand tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import httpx

from octavo.bench.client import StreamSink
from octavo.bench.http1 import HttpClient
from octavo.bench.records import RequestRecord

STREAMS = 16


def serve(pipe: Connection, num_tokens: int) -> None:
    """Answers every POST with `num_tokens` chunks, each in a write of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for i in range(1, num_tokens + 1):
                    usage = {"prompt_tokens": 5, "completion_tokens": i}
                    event = {"id": "cmpl-1", "choices": [{"index": 0, "text": " word"}], "usage": usage}
                    data = b"data: %b\n\n" % json.dumps(event).encode()
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    await asyncio.sleep(0)
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def with_octavo(url: str, num_requests: int) -> int:
    """Tokens counted by Octavo's client."""
    http, left, total = HttpClient(url), num_requests, 0

    async def stream() -> None:
        nonlocal left, total
        while left > 0:
            left -= 1
            record = RequestRecord(0, 0)
            await http.request("POST", "/v1/completions", b"{}", StreamSink(record))
            total += len(record.token_ns)

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    await http.close()
    return total


async def with_httpx(url: str, num_requests: int) -> int:
    """Tokens counted over httpx's line iterator, the usual way."""
    left, total = num_requests, 0

    async def stream(client: httpx.AsyncClient) -> None:
        nonlocal left, total
        while left > 0:
            left -= 1
            async with client.stream("POST", url + "/v1/completions", content=b"{}") as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        total += bool(json.loads(line[6:])["choices"][0]["text"])

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, args.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    costs: dict[str, list[float]] = {"octavo": [], "httpx": []}
    for _ in range(args.rounds):
        for name, client in (("octavo", with_octavo), ("httpx", with_httpx)):
            begun = time.process_time()
            counted = asyncio.run(client(url, args.requests))
            costs[name].append((time.process_time() - begun) / counted * 1e6)
            assert counted == args.requests * args.tokens, f"{name} counted {counted} tokens"
    server.terminate()
    for name, values in costs.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name:7} {statistics.median(values):6.1f} us of CPU a chunk ({spread}, {args.rounds} rounds)")
    print(f"ratio   {statistics.median(costs['httpx']) / statistics.median(costs['octavo']):.1f}")


if __name__ == "__main__":
    main()

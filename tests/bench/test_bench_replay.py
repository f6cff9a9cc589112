"""Recorded traffic comes back at its own times, with its lengths and its shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mock_server import MockServer

from octavo.bench.config import BenchConfig
from octavo.bench.run import run
from octavo.bench.trace import read_trace
from octavo.errors import UserError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,37,4\r\n"
    "2023-11-16 18:15:46.9805900,39,0\r\n2023-11-16 18:15:47.0805901,5,2"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 200, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
    {"timestamp": 200, "input_length": 530, "output_length": 2, "hash_ids": [0, 9]},
]


def replay(server: MockServer, path: Path, **settings: object) -> list[dict]:
    config = BenchConfig(
        target=server.url, profile="replay", data=str(path), output_dir=str(path.parent), save_requests=True, **settings
    )
    result = run(config, quiet=True)
    assert result.exit_code == 0
    return [json.loads(line) for line in (path.parent / "requests.jsonl").read_text().splitlines()]


def test_times_and_lengths_of_a_csv_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, newline="")
    with MockServer() as server:
        records = replay(server, path, rate="2")
        bodies = [s.body for s in server.loads()]
    assert [r["scheduled_ms"] for r in records] == pytest.approx([0, 150, 200], abs=0.01)
    assert [len(b["prompt"]) for b in bodies] == [37, 39, 5]
    assert [b["max_tokens"] for b in bodies] == [4, 1, 2], "no server takes a request for no token"


def test_prefixes_of_a_jsonl_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in MOONCAKE))
    with MockServer() as server:
        replay(server, path)
        prompts = sorted((s.body["prompt"] for s in server.loads()), key=len)
    other, first, second = prompts
    assert [len(p) for p in prompts] == [530, 600, 1100]
    assert first == second[:600]
    assert other[:512] == first[:512]
    assert other[512:] != first[512:530]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "needs the columns"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "t.csv:2 is no trace entry"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,2\n", "a prompt of 0 tokens"),
        ("t.jsonl", '{"timestamp": 1}\n', "t.jsonl:1 is no trace entry"),
        ("t.jsonl", "", "no requests"),
        ("t.txt", "", "takes a trace"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path / name)

"""The client's figures against what the mock server knows about itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from mock_server import Behaviour, MockServer

from octavo.bench.client import StreamSink
from octavo.bench.config import BenchConfig
from octavo.bench.records import RequestRecord
from octavo.bench.run import BenchResult, run
from octavo.errors import OctavoError, UserError

# The same event is seen from both ends: the client never earlier than the server, and in the median at most so much
# later. Single cases may be late on a machine whose cores are held by others.
TYPICAL_LAG_MS = 15.0


def load(server: MockServer, folder: Path, **settings: Any) -> BenchResult:
    values: dict[str, Any] = {
        "target": server.url,
        "profile": "synchronous",
        "max_requests": 5,
        "data": "prompt_tokens=8,output_tokens=6",
        "output_dir": str(folder),
        "scrape_interval": 0.0,
        "save_requests": True,
        "timeout": 20.0,
    }
    return run(BenchConfig(**(values | settings)), quiet=True)


def requests_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_times_agree_with_the_server(tmp_path: Path) -> None:
    gaps = [0.01, 0.06, 0.01, 0.03, 0.01]
    with MockServer(Behaviour(ttft_s=0.03, gaps_s=gaps)) as server:
        result = load(server, tmp_path, max_requests=6)
        served = server.loads()
    assert result.exit_code == 0
    records = requests_of(tmp_path)
    assert len(records) == len(served) == 6
    lags: list[float] = []
    stalls: list[float] = []
    for record, truth in zip(records, served, strict=True):
        ttft = record["token_ms"][0] - record["scheduled_ms"]
        lags.append(ttft - (truth.sent_ns[0] - truth.arrived_ns) / 1e6)
        client_gaps = [b - a for a, b in itertools.pairwise(record["token_ms"])]
        server_gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(truth.sent_ns)]
        lags += [abs(ours - theirs) for ours, theirs in zip(client_gaps, server_gaps, strict=True)]
        stalls.append(client_gaps[1])
        assert record["output_tokens"] == 6
        assert record["end_ms"] >= record["token_ms"][-1]
    assert min(lags) > -0.5, "a token cannot be here before it left there"
    assert statistics.median(lags) < TYPICAL_LAG_MS
    assert statistics.median(stalls) > 60 - TYPICAL_LAG_MS
    metrics = result.runs[0]["metrics"]
    assert metrics["itl_ms"]["count"] == 6 * 5
    assert metrics["itl_ms"]["p90"] > 60 - TYPICAL_LAG_MS, "the stall is in the tail of the gaps"
    assert metrics["tpot_ms"]["mean"] >= sum(gaps) / 5 * 1000 * 0.95, "which each request's mean hides"


def test_metrics_follow_from_the_records(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft_s=0.01, itl_s=0.002)) as server:
        result = load(server, tmp_path, profile="concurrent", rate="3", max_requests=12)
        assert server.max_in_flight == 3
    records, metrics = requests_of(tmp_path), result.runs[0]["metrics"]
    ttfts = [r["token_ms"][0] - r["scheduled_ms"] for r in records]
    latencies = [r["end_ms"] - r["scheduled_ms"] for r in records]
    tpots = [(r["token_ms"][-1] - r["token_ms"][0]) / 5 for r in records]
    for name, values in (("ttft_ms", ttfts), ("request_latency_ms", latencies), ("tpot_ms", tpots)):
        assert metrics[name]["mean"] == pytest.approx(sum(values) / 12, abs=0.01)
        assert metrics[name]["max"] == pytest.approx(max(values), abs=0.01)
    entry = result.runs[0]
    assert entry["requests_per_second"] == pytest.approx(12 / entry["duration_s"])
    assert entry["output_tokens_per_second"] == pytest.approx(72 / entry["duration_s"])


def test_open_loop_counts_from_the_schedule(tmp_path: Path) -> None:
    """One slot for requests that come faster than they are served: the wait is in the latency, not hidden by it."""
    with MockServer(Behaviour(ttft_s=0.05)) as server:
        result = load(server, tmp_path, profile="constant", rate="100", max_requests=8, max_concurrency=1)
        assert server.max_in_flight == 1
    records = requests_of(tmp_path)
    for i, record in enumerate(records):
        assert record["scheduled_ms"] == pytest.approx(i * 10, abs=0.01)
        # request i waits for i answers of at least 50 ms, less the 10 ms i that it came later
        assert record["sent_ms"] - record["scheduled_ms"] >= i * (50 - 10) - 1
    metrics = result.runs[0]["metrics"]
    assert metrics["ttft_ms"]["max"] >= metrics["queue_delay_ms"]["max"] >= 7 * 40 - 1
    assert any("late" in w for w in result.runs[0]["warnings"])


@pytest.mark.parametrize("request_format", ["completions", "chat"])
def test_request_is_what_was_asked_for(tmp_path: Path, request_format: str) -> None:
    with MockServer() as server:
        result = load(server, tmp_path, request_format=request_format, api_key="secret-key", max_requests=3)
        bodies = [s.body for s in server.loads()]
        assert all(s.headers["authorization"] == "Bearer secret-key" for s in server.served)
    for body in bodies:
        assert body["stream"] is True
        assert body["ignore_eos"] is True
        assert body["model"] == "mock"
        if request_format == "chat":
            assert len(body["messages"][0]["content"].split()) == 8
            assert body["max_completion_tokens"] == 6
        else:
            assert len(body["prompt"]) == 8
            assert all(isinstance(i, int) for i in body["prompt"])
            assert body["max_tokens"] == 6
    assert len({json.dumps(b, sort_keys=True) for b in bodies}) == 3, "every prompt is new"
    assert result.runs[0]["tokens"]["output_mismatches"] == 0
    assert "secret-key" not in (tmp_path / "benchmark.json").read_text()
    assert "secret-key" not in (tmp_path / "benchmark.html").read_text()


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("reset", 200, "disconnect"),
        ("truncate", 200, "disconnect"),
        ("stream_error", 200, "stream"),
        ("garbage", 200, "protocol"),
        (None, 503, "http_503"),
        (None, 429, "http_429"),
        ("hang", 200, "timeout"),
    ],
)
def test_failures_are_classified(tmp_path: Path, fault: str | None, status: int, kind: str) -> None:
    def behave(body: dict[str, Any], index: int) -> Behaviour:
        return Behaviour(fault=fault, status=status) if index in (2, 4) else Behaviour()

    with MockServer(behave) as server:
        result = load(server, tmp_path, timeout=0.5, slo="ttft_ms=10000")
    entry = result.runs[0]
    assert entry["requests"] == {"completed": 3, "failed": 2, "cancelled": 0}
    assert entry["errors"] == {kind: 2}
    assert entry["metrics"]["ttft_ms"]["count"] == 3
    assert entry["slo"]["attainment"] == pytest.approx(3 / 5)
    assert entry["slo"]["met"] is False
    assert any("failed" in w for w in entry["warnings"])


def test_no_token_is_a_failure(tmp_path: Path) -> None:
    with MockServer(lambda body, index: Behaviour(num_tokens=0 if index == 1 else None)) as server:
        result = load(server, tmp_path, max_requests=2)
    assert result.runs[0]["errors"] == {"empty": 1}


def test_server_gone(tmp_path: Path) -> None:
    with MockServer() as server:
        url = server.url
    config = BenchConfig(target=url, profile="synchronous", output_dir=str(tmp_path), model="m")
    with pytest.raises(OctavoError, match="cannot connect"):
        run(config, quiet=True)


def test_gives_up_when_everything_fails(tmp_path: Path) -> None:
    with MockServer(lambda body, index: Behaviour(status=200 if index == 0 else 500)) as server:
        result = load(server, tmp_path, max_requests=1000)
        assert len(server.loads()) < 100
    assert result.exit_code == 1
    assert result.runs[0]["stop_reason"] == "failures"


def test_preflight_failure_names_the_reason(tmp_path: Path) -> None:
    with MockServer(Behaviour(status=400)) as server, pytest.raises(OctavoError, match=r"refused 400.*--no-ignore-eos"):
        load(server, tmp_path)


def test_server_without_continuous_usage(tmp_path: Path) -> None:
    with MockServer() as server:
        server.refuse_continuous_usage = True
        result = load(server, tmp_path)
    assert result.runs[0]["requests"]["completed"] == 5
    assert result.runs[0]["tokens"]["output_total"] == 30


def test_counts_without_usage_and_with_wrong_lengths(tmp_path: Path) -> None:
    def behave(body: dict[str, Any], index: int) -> Behaviour:
        return Behaviour(usage=index != 1, num_tokens=4 if index == 2 else None)

    with MockServer(behave) as server:
        result = load(server, tmp_path, max_requests=3)
    tokens = result.runs[0]["tokens"]
    assert (tokens["without_usage"], tokens["output_mismatches"], tokens["output_total"]) == (1, 1, 6 + 4 + 6)
    text = " ".join(result.runs[0]["warnings"])
    assert "without usage" in text
    assert "another number of tokens" in text


def test_a_token_without_text_is_a_token(tmp_path: Path) -> None:
    with MockServer(Behaviour(empty_text_at=0, ttft_s=0.02, gaps_s=[0.3, 0, 0, 0, 0])) as server:
        result = load(server, tmp_path, max_requests=2)
        truth = [(s.sent_ns[0] - s.arrived_ns) / 1e6 for s in server.loads()]
    # with the first non-empty chunk as the first token, TTFT would be at least 320 ms
    assert result.runs[0]["metrics"]["ttft_ms"]["min"] < min(truth) + 290
    assert result.runs[0]["metrics"]["itl_ms"]["count"] == 10


def test_text_without_a_token_is_no_token() -> None:
    """A detokenizer's last words come in a chunk of their own when the running count stands still."""
    record = RequestRecord(0, 0)
    sink = StreamSink(record)
    for now, (text, count) in enumerate([("a", 1), ("", 2), ("\u00e9", 2)], 1):
        chunk = {"choices": [{"text": text}], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
        sink(now, b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert list(record.token_ns) == [1, 2]
    assert record.output_tokens == 2


def test_chunks_of_several_tokens_are_reported(tmp_path: Path) -> None:
    with MockServer(Behaviour(tokens_per_chunk=3, itl_s=0.01)) as server:
        result = load(server, tmp_path, max_requests=2)
    entry = result.runs[0]
    assert entry["tokens"]["tokens_per_chunk"] == 3
    assert entry["metrics"]["itl_ms"]["count"] == 2
    assert any("a chunk brings 3.00 tokens" in w for w in entry["warnings"])


@pytest.mark.parametrize("how", [Behaviour(split_writes=True), Behaviour(close=True)])
def test_any_framing_of_the_stream(tmp_path: Path, how: Behaviour) -> None:
    with MockServer(how) as server:
        result = load(server, tmp_path, max_requests=3)
        assert server.num_connections >= (4 if how.close else 1)
    assert result.runs[0]["requests"]["completed"] == 3
    assert result.runs[0]["tokens"]["output_total"] == 18


def test_time_limit_cuts_off_what_does_not_end(tmp_path: Path) -> None:
    with MockServer(lambda body, index: Behaviour(fault="hang" if index == 2 else None, itl_s=0.002)) as server:
        result = load(
            server, tmp_path, profile="constant", rate="10", max_requests=None, max_seconds=0.5, drain_seconds=0.3,
            slo="ttft_ms=10",
        )  # fmt: skip
    entry = result.runs[0]
    assert entry["requests"]["cancelled"] == 1
    assert entry["requests"]["completed"] == 4
    assert entry["slo"]["requests_judged"] == 5, "the one cut off had long broken its limit"


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    import os
    import signal
    import threading

    def behave(body: dict[str, Any], index: int) -> Behaviour:
        if index == 4:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            return Behaviour(fault="hang")
        return Behaviour()

    with MockServer(behave) as server:
        result = load(server, tmp_path, max_requests=50, profile="sweep")
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert result.exit_code == 1
    assert report["interrupted"] is True
    assert len(report["runs"]) == 1
    assert report["runs"][0]["requests"] == {"completed": 3, "failed": 0, "cancelled": 1}


def test_inside_a_running_loop(tmp_path: Path) -> None:
    with MockServer() as server:

        async def call() -> BenchResult:
            return load(server, tmp_path)

        assert asyncio.run(call()).exit_code == 0


def test_samples_fewer_than_requests(tmp_path: Path) -> None:
    with MockServer() as server:
        result = load(server, tmp_path, data="prompt_tokens=8,output_tokens=2,samples=3", max_requests=5)
        prompts = [tuple(s.body["prompt"]) for s in server.loads()]
    assert prompts[3:] == prompts[:2]
    assert len(set(prompts)) == 3
    assert any("samples=3 is less than 5 requests" in note for note in result.report["notes"])
    assert result.runs[0]["tokens"]["repeated_prompts"] == 2


def test_data_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "one two", "output_tokens": 3}\n\n{"prompt": [1, 2, 3], "max_tokens": 2}\n')
    with MockServer() as server:
        load(server, tmp_path, data=str(path), max_requests=2)
        assert [s.body["prompt"] for s in server.loads()] == ["one two", [1, 2, 3]]
        assert [s.body["max_tokens"] for s in server.loads()] == [3, 2]
        with pytest.raises(UserError, match=r"data.jsonl:3 has token ids"):
            load(server, tmp_path, data=str(path), request_format="chat")


def test_server_metrics_beside(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft_s=0.2)) as server:
        result = load(server, tmp_path, profile="concurrent", rate="2", max_requests=4, scrape_interval=0.05)
    metrics = result.runs[0]["server_metrics"]
    assert metrics["running"]["max"] == 2
    assert metrics["kv_cache_usage"]["max"] == 0.25
    assert metrics["generation_tokens"] == 4 * 6
    assert len(metrics["series"]["time_s"]) == metrics["samples"] > 2


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with MockServer() as server:
        server.has_tokenizer = False
        result = load(server, tmp_path)
        assert all(len(s.body["prompt"]) == 8 for s in server.loads())
        chat = load(server, tmp_path, request_format="chat")
    assert "token ids 300" in result.report["workload"]
    assert any("estimates" in note for note in chat.report["notes"])


def test_sweep_spans_floor_to_ceiling(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft_s=0.02)) as server:
        result = load(
            server, tmp_path, profile="sweep", sweep_size=4, max_requests=6, slo="ttft_ms=5000,percentile=50",
            data="prompt_tokens=4,output_tokens=2",
        )  # fmt: skip
    runs = result.runs
    assert [r["profile"] for r in runs[:4]] == ["synchronous", "throughput", "constant", "constant"]
    rates = [r["rate"] for r in runs[2:]]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(runs[1]["requests_per_second"])
    assert len(runs) == 7, "none was overloaded, so three higher rates were tried"
    assert result.report["slo"]["highest_load"] == {"rate": rates[-1], "rate_tried_up_to": rates[-1]}

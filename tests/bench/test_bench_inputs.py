"""Settings, workloads, HTTP framing and server metrics without a server."""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import profiles, vocabulary, workload
from octavo.bench.config import BenchConfig
from octavo.bench.http1 import RequestError, ResponseReader
from octavo.bench.metrics_scrape import parse_prometheus
from octavo.errors import UserError


def config(**settings: Any) -> BenchConfig:
    return BenchConfig(**({"target": "http://127.0.0.1:9", "profile": "synchronous"} | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile": "burst"}, "--profile is 'burst'"),
        ({"target": "localhost:8000"}, "--target is 'localhost:8000'"),
        ({"max_requests": 0}, "--max-requests is 0"),
        ({"max_seconds": -1.0}, "--max-seconds is -1"),
        ({"warmup": -0.1}, "--warmup is -0.1"),
        ({"sweep_size": 2}, "--sweep-size is 2"),
        ({"profile": "constant"}, "needs --rate"),
        ({"profile": "constant", "rate": "1,x"}, "--rate has 'x'"),
        ({"profile": "poisson", "rate": "0"}, "--rate has '0'"),
        ({"profile": "concurrent", "rate": "1.5"}, "whole numbers"),
        ({"profile": "synchronous", "rate": "1"}, "leave --rate out"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made = config(**settings)
        made.check()
        profiles.plans(made)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("output_tokens=5", "prompt_tokens is missing"),
        ("prompt_tokens=5,colour=3", "colour=3"),
        ("prompt_tokens=x", "must be a number"),
        ("prompt_tokens=0", "prompt_tokens is 0"),
        ("prompt_tokens=5,output_tokens_min=9,output_tokens_max=3", "9..3"),
        ("prompt_tokens=5,samples=0", "samples is 0"),
        ("missing-file.txt", "missing-file.txt"),
    ],
)
def test_bad_data_is_refused(data: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        workload.SyntheticSpec.parse(data)


def test_command_repeats_the_load_without_secrets() -> None:
    made = config(profile="poisson", rate="1,2", api_key="hush", ignore_eos=False, label="two words", seed=0)
    assert made.command() == (
        "octavo bench --target http://127.0.0.1:9 --profile poisson --rate 1,2 --no-ignore-eos --label 'two words'"
    )
    assert config(target="http://h:1/v1/").base_url() == "http://h:1"
    assert (config().time_limit(), config(max_requests=3).time_limit()) == (30, None)


def words(count: int = 100) -> vocabulary.Vocabulary:
    return vocabulary.Vocabulary(tuple(f"w{i}" for i in range(count)), tuple(range(1000, 1000 + count)), "test")


def take(data: str, count: int, seed: int = 0, salt: str = "a", as_text: bool = False) -> list[workload.Prompt]:
    supply = workload.synthetic(workload.SyntheticSpec.parse(data), words(), seed, salt, as_text)
    return [supply.take() for _ in range(count)]


def test_prompts_have_the_lengths_and_repeat_nowhere() -> None:
    prompts = take("prompt_tokens=20,output_tokens=7", 200)
    assert {len(p.content) for p in prompts} == {20}
    assert {p.output_tokens for p in prompts} == {7}
    assert len({tuple(p.content[:8]) for p in prompts}) == 200, "a first block repeats"
    text = take("prompt_tokens=20,output_tokens=7", 1, as_text=True)[0]
    assert len(str(text.content).split(" ")) == 20


def test_seed_fixes_lengths_and_salt_fixes_words() -> None:
    data = "prompt_tokens=50,prompt_tokens_stdev=10,output_tokens=20,output_tokens_min=5,output_tokens_max=40"
    first, second, third = take(data, 300), take(data, 300, salt="b"), take(data, 300)
    lengths = [len(p.content) for p in first]
    assert lengths == [len(p.content) for p in second]
    assert [p.output_tokens for p in first] == [p.output_tokens for p in second]
    assert [p.content for p in first] != [p.content for p in second]
    assert [p.content for p in first] == [p.content for p in third]
    assert statistics.fmean(lengths) == pytest.approx(50, abs=2)
    assert statistics.stdev(lengths) == pytest.approx(10, abs=1.5)
    outputs = [p.output_tokens or 0 for p in first]
    assert (min(outputs), max(outputs)) == (5, 40), "only bounds: uniform between them"


def test_prefixes_are_shared() -> None:
    prompts = take("prompt_tokens=8,output_tokens=1,prefix_tokens=16,prefix_count=2", 50)
    assert {len(p.content) for p in prompts} == {24}
    assert len({tuple(p.content[:16]) for p in prompts}) == 2
    assert len({tuple(p.content) for p in prompts}) == 50


def test_vocabulary_keeps_single_tokens() -> None:
    calls = 0

    async def tokenize(text: str) -> list[int]:
        nonlocal calls
        calls += 1
        pieces: list[int] = []
        for word in text.split():
            pieces += [hash(word) % 1000] if len(word) <= 5 else [1, 2]
        return pieces

    found = asyncio.run(vocabulary.find(tokenize, "test"))
    assert found.words
    assert all(len(word) <= 5 for word in found.words)
    assert all(hash(word) % 1000 == i for word, i in zip(found.words, found.token_ids, strict=True))
    assert found.draw(random.Random(0), 3)

    async def by_letter(text: str) -> list[int]:
        return [ord(c) for c in text]

    letters = asyncio.run(vocabulary.find(by_letter, "test"))
    assert set(letters.token_ids) <= {ord(c) for c in "abcdefghijklmnopqrstuvwxyz "}
    length = statistics.fmean(len(letters.text(letters.draw(random.Random(i), 60))) for i in range(50))
    assert length == pytest.approx(60, rel=0.05), "text is measured by the mean word"


def test_processor(tiny_llama: Path, tmp_path: Path) -> None:
    tokenize = vocabulary.processor_tokenize(str(tiny_llama))
    assert len(asyncio.run(tokenize("the cat"))) == 7  # this tokenizer makes a token of every byte
    with pytest.raises(UserError, match="--processor"):
        vocabulary.processor_tokenize(str(tmp_path))


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nWiki\r\n7;x=1\r\npedia i\r\n2\r\nn!\r\n0\r\nT: 1\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11, 1000])
def test_chunked_bodies_in_pieces_of_any_size(step: int) -> None:
    reader = ResponseReader()
    body = b"".join(reader.feed(CHUNKED[i : i + step]) for i in range(0, len(CHUNKED), step))
    assert body == b"Wikipedia in!"
    assert reader.is_complete
    assert reader.keep_alive


def test_random_chunks_and_cuts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        pieces = [rng.randbytes(rng.randint(1, 40)) for _ in range(rng.randint(0, 6))]
        data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        data += b"".join(b"%X\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
        reader, body, position = ResponseReader(), b"", 0
        while position < len(data):
            assert not reader.is_complete
            cut = position + rng.randint(1, 30)
            body += reader.feed(data[position:cut])
            position = cut
        assert body == b"".join(pieces)
        assert reader.is_complete


def test_other_framings_and_malformed_answers() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 404 No\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabcdef") == b"abc"
    assert (reader.is_complete, reader.keep_alive, reader.status) == (True, False, 404)
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not reader.is_complete
    assert reader.at_close()
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    assert not reader.at_close()
    for bad in (
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"x" * 70000,
    ):
        with pytest.raises(RequestError):
            ResponseReader().feed(bad)


def test_prometheus_text() -> None:
    text = (
        "# HELP vllm:num_requests_running n\n"
        'vllm:num_requests_running{engine="0",model_name="a b} c"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 3.0 1700000000\nkv_cache_usage_perc 0.5\nbroken\n\nx{y="1"} NaN\n'
    )
    totals = parse_prometheus(text)
    assert totals["num_requests_running"] == 5
    assert totals["kv_cache_usage_perc"] == 0.5


def test_bench_needs_no_torch() -> None:
    code = "import sys, octavo.bench.run; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_metric_and_its_alias_count_once() -> None:
    text = 'num_requests_running 4\nvllm:num_requests_running{engine="0"} 4\nvllm:num_requests_running{engine="1"} 1\n'
    assert parse_prometheus(text) == {"num_requests_running": 5.0}
    assert parse_prometheus("\n".join(reversed(text.splitlines()))) == {"num_requests_running": 5.0}

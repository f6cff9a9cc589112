"""The engine in its own process: the same tokens, aborts, errors, death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.client import EngineClient
from octavo.engine.config import EngineConfig
from octavo.errors import CheckpointError, EngineDeadError, UserError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def run(config: EngineConfig, body: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = await EngineClient.start(config)
        try:
            await body(client)
        finally:
            await client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


async def collect(client: EngineClient, name: str, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    tokens = []
    async for output in client.generate(name, ids, params):
        tokens += output.token_ids
    return tokens


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.02)


def test_requests_aborts_errors_and_death(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), dtype="float32") as llm:
        prompts = [[10, 20, 30, i] for i in range(5)]
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    async def body(client: EngineClient) -> None:
        assert client.info.max_model_len == 512 and client.is_alive
        answers = await asyncio.gather(*(collect(client, str(i), p) for i, p in enumerate(prompts)))
        assert answers == expected
        assert 1 < client.stats().peak_running <= 5  # though they are over by now
        assert client.stats().peak_kv_usage > 0
        await until(lambda: client.stats().peak_running == 0 and client.stats().peak_kv_usage == 0)
        # An iterator that is left early aborts the request in the engine.
        long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
        async for _ in client.generate("left", [1, 2, 3], long):
            break
        await until(lambda: client.stats().running == 0 and client.stats().kv_usage == 0)
        # A refused request is an error of its own and disturbs nobody.
        with pytest.raises(UserError, match="must be in"):
            await collect(client, "bad", [10**6])
        with pytest.raises(UserError, match="already running"):
            async for _ in client.generate("twice", [1], long):
                await collect(client, "twice", [1])
        assert await collect(client, "good", prompts[0]) == expected[0]
        assert client.stats().generation_tokens >= 6 * 12
        # Death is noticed within two seconds and ends what runs.
        running = asyncio.create_task(collect(client, "doomed", [1, 2, 3], long))
        await asyncio.sleep(0.05)
        os.kill(client._process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError):
            await running
        assert not client.is_alive and time.monotonic() - begin < 2
        with pytest.raises(EngineDeadError):
            await collect(client, "late", [1])

    run(EngineConfig(model=str(tiny_llama), dtype="float32"), body)


def test_the_engines_own_error_comes_through(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes()[:5000])

    async def never(client: EngineClient) -> None:
        pytest.fail("it started")

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        run(EngineConfig(model=str(tmp_path)), never)


def test_the_engine_dies_with_its_parent(tiny_llama: Path) -> None:
    async def body(client: EngineClient) -> None:
        assert client._process.stdin is not None
        client._process.stdin.close()
        await until(lambda: client._process.poll() is not None, 5)

    run(EngineConfig(model=str(tiny_llama)), body)


def test_a_start_that_is_cancelled_leaves_nothing_behind(tiny_llama: Path) -> None:
    async def main() -> None:
        before = set(psutil.Process().children())
        starting = asyncio.create_task(EngineClient.start(EngineConfig(model=str(tiny_llama))))
        await asyncio.sleep(0.3)  # the engine process imports torch now, and reads no message yet
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 10)
        assert set(psutil.Process().children()) == before

    asyncio.run(main())

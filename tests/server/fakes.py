"""An engine client without an engine, for faults that a real one does not produce on demand."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import EngineInfo, EngineOutput, EngineStats
from octavo.errors import EngineDeadError


def fake_info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model": "fake",
        "max_model_len": 128,
        "vocab_size": 259,
        "num_blocks": 64,
        "block_size": 16,
        "kv_bytes_per_token": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "dtype": "float32",
        "device": "cpu",
        "load_seconds": 0.0,
        "weight_bytes": 0,
        "eos_token_ids": [0],
    }
    required = {
        f.name: 0 for f in dataclasses.fields(EngineInfo) if f.default is f.default_factory is dataclasses.MISSING
    }
    return EngineInfo(**required | values | changes)


class FakeClient:
    """Answers every request with `script`, a list of token ids, numbers of seconds to wait, and exceptions to raise.

    `hold` (when given) is waited for before the first token. `running` and `aborted` list request ids.
    """

    def __init__(self, script: list[Any] | None = None, *, hold: bool = False, **info: Any) -> None:
        self.info = fake_info(**info)
        self.script = script if script is not None else [[100, 101, 102]]
        self.is_held = hold
        self.is_alive = True
        self.is_dead = False
        self.requests: list[tuple[str, list[int], SamplingParams, dict[str, Any]]] = []
        self.running: list[str] = []
        self.aborted: list[str] = []

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), peak_running=len(self.running))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[EngineOutput, None]:
        if self.is_dead:
            raise EngineDeadError("the engine process ended")
        self.requests.append((request_id, prompt_token_ids, params, options))
        self.running.append(request_id)
        is_over = False
        try:
            while self.is_held:
                await asyncio.sleep(0.01)
            script = self.script
            for i, item in enumerate(script):
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                    continue
                await asyncio.sleep(0)  # as waiting for a real engine would
                is_over = i == len(script) - 1
                yield EngineOutput(request_id, item, finish_reason="length" if is_over else None)
        finally:
            self.running.remove(request_id)
            if not is_over:
                self.aborted.append(request_id)

"""An engine process without a model, for `server_stream.py`: each request's answer is its own prompt, again and again.

`python -m stub_engine ADDRESS` takes octavo.engine.process's place: the same handshake, the same messages. Every
STUB_STEP_MS milliseconds (an environment variable) each request that runs gets a token; all of them run at once.
"""

from __future__ import annotations

import os
import sys
import time

import zmq

from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from octavo.engine.protocol import FromEngine, decode_config, decode_to_engine, encode, outputs_message


class StubEngine:
    """Answers in the protocol's words. `step` returns the outputs of one step."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[EngineRequest, int]] = {}
        self.num_tokens = 0

    def step(self) -> list[EngineOutput]:
        outputs = []
        for name, (request, done) in list(self.running.items()):
            prompt = request.prompt_token_ids
            output = EngineOutput(name, [prompt[done % len(prompt)]])
            if not done:
                output.queue_s = output.prefill_s = 0.001
            if done + 1 == request.params.max_tokens:
                output.finish_reason = "length"
                del self.running[name]
            else:
                self.running[name] = (request, done + 1)
            outputs.append(output)
        self.num_tokens += len(outputs)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), generation_tokens=self.num_tokens)


def describe(model: str) -> EngineInfo:
    return EngineInfo(
        model=model, max_model_len=8192, vocab_size=49152, num_blocks=65536, block_size=16, block_bytes=1,
        kv_bytes_per_token=1, max_concurrency=128.0, max_num_seqs=1024, max_num_batched_tokens=8192, dtype="bfloat16",
        device="stub", load_seconds=0.0, weight_bytes=0, eos_token_ids=[0],
    )  # fmt: skip


def main() -> None:
    config = decode_config(sys.stdin.buffer.readline())
    step_s = float(os.environ["STUB_STEP_MS"]) / 1000
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(sys.argv[1])
    engine = StubEngine()
    socket.send(encode(FromEngine(info=describe(config.model), stats=engine.stats())))
    due = time.perf_counter()
    while True:
        while socket.poll(0 if engine.running else 500):
            message = decode_to_engine(socket.recv())
            if message.is_shutdown:
                return
            engine.running.update((item.request_id, (item, 0)) for item in message.add)
            for name in message.abort:
                engine.running.pop(name, None)
        due = max(due + step_s, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        socket.send(encode(outputs_message(engine.step(), engine.stats())))


if __name__ == "__main__":
    main()

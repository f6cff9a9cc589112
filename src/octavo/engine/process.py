"""The engine process: `python -m octavo.engine.process ADDRESS`, started by EngineClient.

The configuration is the first line of standard input. The pipe stays open as long as the parent lives: its end means
that the parent is gone, and the engine goes too instead of holding the memory for nobody.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time

import zmq

from octavo.engine.factory import AnyEngine, build_engine
from octavo.engine.messages import EngineOutput, EngineRequest
from octavo.engine.protocol import (
    Failure,
    FromEngine,
    ToEngine,
    decode_config,
    decode_to_engine,
    encode,
    outputs_message,
)
from octavo.errors import OctavoError

IDLE_STATS_INTERVAL_MS = 500
STATS_INTERVAL_SECONDS = 0.05  # while it works; a snapshot a step would cost more than the step's tokens do
logger = logging.getLogger("octavo.engine")


def main() -> int:
    """Load the model, tell the parent, and run steps until the parent says stop or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    config = decode_config(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(sys.argv[1])
    try:
        engine = build_engine(config, is_serving=True)
    except OctavoError as error:
        socket.send(encode(FromEngine(failure=Failure(type(error).__name__, str(error)))))
        socket.close(linger=5000)
        return 1
    socket.send(encode(FromEngine(info=engine.info, stats=engine.stats())))
    gc.collect()
    gc.freeze()  # libraries and weights stay: a full collection would look through them for 0.2 s, amid the steps
    serve(engine, socket)
    return 0


def serve(engine: AnyEngine, socket: zmq.Socket[bytes]) -> None:
    """Alternate between messages and steps until a shutdown message comes."""
    told = 0.0  # when the last snapshot was sent
    while True:
        rejected: list[EngineOutput] = []
        if not engine.has_work and not socket.poll(IDLE_STATS_INTERVAL_MS):
            socket.send(encode(FromEngine(stats=engine.stats())))
            continue
        while socket.poll(0):  # aborts are seen before the next step is computed
            message = decode_to_engine(socket.recv())
            if message.is_shutdown:
                return
            rejected += _apply(engine, message)
        outputs = rejected + engine.step()
        now = time.monotonic()
        is_due = now - told >= STATS_INTERVAL_SECONDS or not engine.has_work
        if is_due:
            told = now
        if outputs or is_due:
            socket.send(encode(outputs_message(outputs, engine.stats() if is_due else None)))


def _apply(engine: AnyEngine, message: ToEngine) -> list[EngineOutput]:
    rejected = [output for item in message.add if (output := _add(engine, item)) is not None]
    for request_id in message.abort:
        engine.abort(request_id)
    for request_id, reason in message.finish:
        engine.finish(request_id, reason)
    return rejected


def _add(engine: AnyEngine, item: EngineRequest) -> EngineOutput | None:
    try:
        engine.add(item)
    except OctavoError as error:
        return EngineOutput(item.request_id, finish_reason="error", error=str(error), stop_reason=type(error).__name__)
    return None


def _die_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock this thread would hold when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

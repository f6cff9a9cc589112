"""Starts and stops a server: the port, the engine, the web server, and what signals mean.

The modules that import torch are imported while the engine process loads its model, not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from octavo.engine.client import EngineClient
from octavo.engine.config import EngineConfig
from octavo.errors import EngineDeadError
from octavo.server.config import ServerConfig, load_template
from octavo.server.listener import address_of, bind, cannot_listen
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.server.middleware import App
    from octavo.server.state import ServerState

logger = logging.getLogger("octavo.server")

LOG_INTERVAL_SECONDS = 10.0
WATCH_INTERVAL_SECONDS = 0.25
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they are the ones who close
BACKLOG = 2048
GC_THRESHOLD = 20_000  # Python's own of 700 is reached with every step of a few hundred streams
TERMINATED = 128 + signal.SIGTERM  # the exit status of a process that SIGTERM ended, by the shells' convention


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve until SIGTERM or Ctrl-C. SIGTERM lets running requests finish (`shutdown_timeout`).

    Raises UserError when the port is taken or the engine cannot load its model, EngineDeadError when the engine died.
    """
    _set_up_logging(server_config)
    listener = bind(server_config)  # first of all: loading a model only to find the port in use wastes minutes
    try:
        load_template(server_config.chat_template)
        _run(_serve(engine_config, server_config, listener))
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        listener.close()
        if server_config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(server_config.uds)


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
    with _cancelled_by_sigterm():
        client, tokenizer = await _start(engine_config)
    try:
        from octavo.server.app import build_app
        from octavo.server.state import ServerState

        state = ServerState.create(client, config, tokenizer)
        try:
            listener.listen(BACKLOG)  # now, and not when bound: until the engine is ready, connections are refused
        except OSError as error:
            raise cannot_listen(config, error) from error
        _announce(state, config, listener)
        gc.set_threshold(GC_THRESHOLD)
        gc.freeze()  # libraries and tokenizer stay: looking through them would take each full collection 0.25 s
        server = WebServer(_uvicorn_config(build_app(state), config))
        watchers = [asyncio.create_task(_watch_engine(client, server, config.engine_death_timeout))]
        if not config.disable_log_stats:
            watchers.append(asyncio.create_task(_log_stats(client)))
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in watchers:
                task.cancel()
        if client.is_dead:
            raise EngineDeadError("the engine process ended; its own message stands above. Start the server again")
    finally:
        await client.shutdown()


async def _start(config: EngineConfig) -> tuple[EngineClient, Any]:
    """The engine and the tokenizer, which load side by side; when one fails, the other is stopped."""
    starting = asyncio.create_task(EngineClient.start(config))
    await asyncio.sleep(0)  # the engine process starts now
    try:
        tokenizer = await asyncio.to_thread(_load_here, config)
        return await starting, tokenizer
    except BaseException:
        starting.cancel()
        # Whichever of the two failed first is what the operator must read; how the other one ended adds nothing.
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await (await starting).shutdown()
        raise


def _load_here(config: EngineConfig) -> Any:
    """The tokenizer (None when there is to be none); imports what the routes need meanwhile."""
    from octavo.engine.tokenizer import load_tokenizer

    return None if config.skip_tokenizer_init else load_tokenizer(config.model, config.tokenizer)


class WebServer(uvicorn.Server):
    """Any second signal quits at once; the first one drains. (uvicorn's own answers a second SIGTERM with patience.)"""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        patience = self.config.timeout_graceful_shutdown
        logger.info(
            "%s: running requests get %s s to finish; a second signal quits", signal.Signals(sig).name, patience
        )


def _uvicorn_config(app: App, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=config.shutdown_timeout,  # type: ignore[arg-type]  # seconds, whole or not
        backlog=BACKLOG,
        server_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
    )


def _run(main: Any) -> None:
    try:
        import uvloop
    except ImportError:  # no wheels for this platform: asyncio's own loop does the same, slower
        asyncio.run(main)
    else:
        uvloop.run(main)


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Any:
    """While the model loads, SIGTERM stops the loading and cleans up, instead of killing the process alone."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received = []

    def stop() -> None:
        received.append(signal.SIGTERM)
        task.cancel()

    # Outside the main thread, and on Windows, somebody else has the signals.
    with contextlib.suppress(NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)


async def _watch_engine(client: EngineClient, server: WebServer, patience: float) -> None:
    """When the engine died, let clients read 503s for a while, then stop, so that a supervisor can start anew."""
    while not client.is_dead:
        await asyncio.sleep(WATCH_INTERVAL_SECONDS)
    logger.error("the engine died; the server answers 503 and exits in %g s", patience)
    await asyncio.sleep(patience)
    server.should_exit = True


async def _log_stats(client: EngineClient) -> None:
    """A line every 10 seconds while something happens."""
    before, then = client.stats(), time.monotonic()
    prompt, generated, steps = before.prompt_tokens, before.generation_tokens, before.steps
    while True:
        await asyncio.sleep(LOG_INTERVAL_SECONDS)
        now, stats = time.monotonic(), client.stats()
        if stats.steps != steps:
            seconds = now - then
            logger.info(
                "%.1f prompt and %.1f generated tokens/s, %d running, %d waiting, cache %.1f %%, prefix hits %.0f %%",
                (stats.prompt_tokens - prompt) / seconds,
                (stats.generation_tokens - generated) / seconds,
                stats.running,
                stats.waiting,
                100 * stats.kv_usage,
                100 * stats.prefix_hits / max(1, stats.prefix_queries),
            )
        prompt, generated, steps, then = stats.prompt_tokens, stats.generation_tokens, stats.steps, now


def _announce(state: ServerState, config: ServerConfig, listener: socket.socket) -> None:
    info = state.client.info
    logger.info(
        "Octavo %s: %s, %s on %s, %.0f MB of weights, loaded in %.1f s",
        __version__, info.model, info.dtype, info.device, info.weight_bytes / 1e6, info.load_seconds,
    )  # fmt: skip
    capacity = info.describe_capacity() if info.can_generate else "embeddings only"
    logger.info("%s; at most %d requests at a time", capacity, info.max_num_seqs)
    logger.info("serving %s at %s", ", ".join(state.model_names), address_of(config, listener))


def _set_up_logging(config: ServerConfig) -> None:
    root = logging.getLogger("octavo")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    level = config.uvicorn_log_level.upper().replace("TRACE", "DEBUG")
    root.setLevel(level)

"""Starts and stops a server: the port, the engine, the web server, and what signals mean."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from octavo import __version__
from octavo.engine.client import EngineClient
from octavo.engine.config import EngineConfig
from octavo.engine.tokenizer import load_tokenizer
from octavo.errors import EngineDeadError, UserError
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.state import ServerState
from octavo.server.templates import load_template

logger = logging.getLogger("octavo.server")

LOG_INTERVAL_SECONDS = 10.0
WATCH_INTERVAL_SECONDS = 0.25
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they are the ones who close
BACKLOG = 2048
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


def bind(config: ServerConfig) -> socket.socket:
    """A socket that is bound to the configured address and does not listen yet.

    Raises UserError that names the address and the way out.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(
            f"host is {config.host!r}, which is no address of this machine: {error}", param="host"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from error
    return listener


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
    with _cancelled_by_sigterm():
        client, tokenizer = await _start(engine_config)
    try:
        state = ServerState.create(client, config, tokenizer)
        try:
            listener.listen(BACKLOG)  # now, and not when bound: until the engine is ready, connections are refused
        except OSError as error:
            raise _cannot_listen(config, error) from error
        _announce(state, config, listener)
        server = WebServer(_uvicorn_config(state, config))
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
    try:
        tokenizer = None
        if not config.skip_tokenizer_init:
            tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.tokenizer)
        return await starting, tokenizer
    except BaseException:
        starting.cancel()
        with contextlib.suppress(BaseException):
            await (await starting).shutdown()
        raise


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


def _uvicorn_config(state: ServerState, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(state),
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

    with contextlib.suppress(
        NotImplementedError, RuntimeError
    ):  # not in the main thread: somebody else has the signals
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
    logger.info("%s; at most %d requests at a time", info.describe_capacity(), info.max_num_seqs)
    logger.info("serving %s at %s", ", ".join(state.model_names), _address(config, listener))


def _address(config: ServerConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise UserError(
            f"uds is {path!r}: {error.strerror}; remove the file if no server uses it, or choose another path",
            param="uds",
        ) from error
    return listener


def _cannot_listen(config: ServerConfig, error: OSError) -> UserError:
    where = f"port {config.port} of {config.host}" if config.uds is None else config.uds
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"{where} is in use by another process; stop it, or choose another port with --port (0 takes a free one)",
            param="port",
        )
    if error.errno == errno.EACCES:
        return UserError(
            f"{where} needs more rights than this user has; choose a --port from 1024 to 65535", param="port"
        )
    return UserError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port", param="host")


def _set_up_logging(config: ServerConfig) -> None:
    root = logging.getLogger("octavo")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    level = config.uvicorn_log_level.upper().replace("TRACE", "DEBUG")
    root.setLevel(level)

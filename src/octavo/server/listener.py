"""The socket that a server listens on, and what is said when it cannot."""

from __future__ import annotations

import errno
import socket

from octavo.errors import UserError
from octavo.server.config import ServerConfig


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
        raise cannot_listen(config, error) from error
    return listener


def address_of(config: ServerConfig, listener: socket.socket) -> str:
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


def cannot_listen(config: ServerConfig, error: OSError) -> UserError:
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

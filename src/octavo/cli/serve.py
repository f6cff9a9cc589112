"""Serve a model over the OpenAI HTTP API: /v1/chat/completions, /v1/completions, /v1/models, /metrics and more.

Flags follow `vllm serve`. The server listens on 127.0.0.1 unless told; Ctrl-C or SIGTERM lets running requests finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.server.config import ServerConfig

EXAMPLES = """
  octavo serve demo
  octavo serve ./model-w4a16 --port 8001 --max-model-len 4k --api-key secret
  octavo serve --config serve.yaml
"""


def settings() -> tuple[type, ...]:
    from octavo.engine.config import EngineConfig
    from octavo.server.config import ServerConfig

    return (EngineConfig, ServerConfig)


def run(engine: EngineConfig, server: ServerConfig) -> int:
    from octavo.server.run import serve

    serve(engine, server)
    return 0

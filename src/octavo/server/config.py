"""The server's settings: one documented field each (flags, environment variables and docs are generated from them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import UserError
from octavo.settings import setting


@dataclass
class ServerConfig:
    """Where the server listens, whom it lets in and what it bounds. Names follow `vllm serve`."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 listens on every interface")
    port: int = setting(8000, "TCP port; 0 takes a free one")
    uds: str | None = setting(None, "path of a Unix socket to listen on instead of host and port", metavar="PATH")
    root_path: str = setting("", "path prefix under which a reverse proxy offers the server")
    ssl_keyfile: str | None = setting(None, "private key file, for HTTPS", metavar="PATH")
    ssl_certfile: str | None = setting(None, "certificate file, for HTTPS", metavar="PATH")
    ssl_ca_certs: str | None = setting(None, "certificate authorities file, for HTTPS", metavar="PATH")

    api_key: list[str] | None = setting(
        None, "keys that clients may present; they guard every route but /health, /version and /metrics", metavar="KEY"
    )
    protect_metrics: bool = setting(False, "ask for the API key at /metrics too")
    allowed_origins: list[str] | None = setting(
        None, "web origins that browsers may call from (CORS); none by default", metavar="ORIGIN"
    )

    served_model_name: list[str] | None = setting(
        None, "names that requests may use; answers and metrics carry the first (default: the model)", metavar="NAME"
    )
    response_role: str = setting("assistant", "role of the messages that the server answers with")
    chat_template: str | None = setting(None, "chat template that replaces the model's: a file or the template itself")
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None, "JSON object of variables for the chat template; a request's chat_template_kwargs win", metavar="JSON"
    )
    trust_request_chat_template: bool = setting(False, "let requests bring a chat template of their own")
    generation_config: str = setting(
        "auto",
        "where sampling defaults come from: 'auto' is the model's generation_config.json, 'octavo' ignores it",
        choices=("auto", "octavo", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = setting(
        None, "JSON object of sampling defaults that win over generation_config", metavar="JSON"
    )
    strict_params: bool = setting(False, "refuse parameters that nobody defines, which are ignored otherwise")

    max_num_queued_reqs: int = setting(4096, "requests that may wait beyond max_num_seqs; more get a 503", metavar="N")
    max_logprobs: int = setting(20, "most log-probabilities a token that a request may ask for; -1 is the vocabulary")
    max_n: int = setting(128, "most answers (n) that one request may ask for")
    max_prompts: int = setting(2048, "most prompts in one completion request")
    max_stop_strings: int = setting(64, "most stop strings of one request, each of at most 1,024 characters")
    max_body_bytes: int = setting(32 * 1024 * 1024, "largest request body", metavar="BYTES")

    stream_interval: int = setting(1, "tokens in one chunk of a stream; the first token is sent at once")
    enable_prompt_tokens_details: bool = setting(False, "report the cached prompt tokens in usage")
    enable_force_include_usage: bool = setting(False, "send usage in every stream, with every chunk")
    enable_log_requests: bool = setting(False, "log each request's id, parameters and size (never its text)")
    disable_log_stats: bool = setting(False, "do not log throughput and queues every 10 seconds")
    disable_uvicorn_access_log: bool = setting(False, "do not log a line for each HTTP request")
    uvicorn_log_level: str = setting(
        "info", "log level of the web server", choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM; 0 aborts them", metavar="SECONDS"
    )
    engine_death_timeout: float = setting(
        30.0, "seconds that a server whose engine died goes on answering 503 before it exits", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        for name in ("api_key", "allowed_origins", "served_model_name"):
            value = getattr(self, name)
            if isinstance(value, str):  # one value, as YAML and keyword arguments have it
                setattr(self, name, [value])
        self._check_range("port", 0, 65535)
        self._check_range("max_num_queued_reqs", 0)
        self._check_range("max_logprobs", -1)
        for name in ("max_n", "max_prompts", "max_stop_strings", "max_body_bytes", "stream_interval"):
            self._check_range(name, 1)
        self._check_range("shutdown_timeout", 0)
        self._check_range("engine_death_timeout", 0)
        if self.generation_config not in ("auto", "octavo", "vllm"):
            raise UserError(
                f"generation_config is {self.generation_config!r}; it must be 'auto' or 'octavo'",
                param="generation_config",
            )
        if any(not key for key in self.api_key or []):
            raise UserError("api_key holds an empty key; every key must have at least one character", param="api_key")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UserError("ssl_keyfile and ssl_certfile go together; give both or neither", param="ssl_keyfile")

    def _check_range(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not (low <= value <= (math.inf if high is None else high)):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise UserError(f"{name} is {value!r}; it must be {allowed}", param=name)


def load_template(setting: str | None) -> str | None:
    """The template that a setting names: the content of a file, or the template itself."""
    if setting is None:
        return None
    is_inline = "{{" in setting or "{%" in setting
    if is_inline:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"chat_template is {setting!r}: {error.strerror}; it must be a readable file or a template",
            param="chat_template",
        ) from error

"""What the routes share: the engine, the tokenizer, the settings and the counts of one server."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.answers import split_params
from octavo.engine.client import EngineClient
from octavo.errors import UserError
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, bad_request
from octavo.server.generation import Generator, Job
from octavo.server.limits import Admission
from octavo.server.metrics import ServerMetrics
from octavo.server.params import ParamsBuilder, sampling_defaults
from octavo.server.protocol import SamplingFields
from octavo.server.templates import ChatRenderer
from octavo.server.tokens import TextCodec
from octavo.version import __version__

logger = logging.getLogger("octavo.server")

FINGERPRINT = f"octavo-{__version__}"
MAX_REQUEST_ID_CHARS = 256


@dataclass
class ServerState:
    """One server. `codec` and `chat` are None when it was started without a tokenizer."""

    client: EngineClient
    config: ServerConfig
    model_names: list[str]
    codec: TextCodec | None
    chat: ChatRenderer | None
    params: ParamsBuilder
    admission: Admission
    metrics: ServerMetrics
    generator: Generator
    started: int = field(default_factory=lambda: int(time.time()))
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def create(cls, client: EngineClient, config: ServerConfig, tokenizer: Any) -> ServerState:
        info = client.info
        names = config.served_model_name or [info.model]
        metrics = ServerMetrics(names[0], info, client.stats)
        admission = Admission(info.max_num_seqs, config.max_num_queued_reqs, metrics.count_rejection)
        return cls(
            client=client,
            config=config,
            model_names=names,
            codec=None if tokenizer is None else TextCodec(tokenizer),
            chat=None if tokenizer is None else ChatRenderer(tokenizer, config),
            params=ParamsBuilder(
                config, sampling_defaults(config, info.generation_config), info.max_model_len, info.vocab_size
            ),
            admission=admission,
            metrics=metrics,
            generator=Generator(client, tokenizer, admission, metrics),
        )

    def check_model(self, model: str | None) -> str:
        """The name that answers carry; ApiError 404 for a model that is not served."""
        if model and model not in self.model_names:
            raise ApiError(
                404, f"the model {model[:200]!r} does not exist; this server has {', '.join(self.model_names)}", "model"
            )
        return model or self.model_names[0]

    def need_generation(self, route: str) -> None:
        """Raise ApiError 400 where the model generates nothing."""
        if not self.client.info.can_generate:
            raise ApiError(
                400, f"{self.model_names[0]} makes embeddings only: it has no {route}; use /v1/embeddings", "model"
            )

    def need_codec(self, param: str) -> TextCodec:
        if self.codec is None:
            raise UserError(
                "the server was started without a tokenizer (--skip-tokenizer-init); send token ids", param=param
            )
        return self.codec

    def need_chat(self) -> ChatRenderer:
        if self.chat is None:
            raise UserError(
                "the server was started without a tokenizer (--skip-tokenizer-init); use completions", param="messages"
            )
        return self.chat

    def answer_id(self, prefix: str, request: SamplingFields, header_id: str) -> str:
        """The id of the answer: the request's own id when it brings one, else that of the HTTP request."""
        own = request.request_id
        if own is not None and not 1 <= len(own) <= MAX_REQUEST_ID_CHARS:
            raise bad_request(
                f"request_id has {len(own)} characters; it must have 1 to {MAX_REQUEST_ID_CHARS}", "request_id"
            )
        return f"{prefix}-{own or header_id}"

    def jobs(
        self, answer_id: str, request: SamplingFields, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[Job]:
        """One job for each prompt and each of its n answers; choice i*n + j is answer j to prompt i.

        Prompt log-probabilities belong to the prompt, so only its first job computes them. Engine ids end in a number
        of the server's, since clients may send the same X-Request-Id twice.
        """
        jobs: list[Job] = []
        for prompt, shared in zip(prompts, params, strict=True):
            for j, single in enumerate(split_params(shared)):
                if j:
                    single.prompt_logprobs = None
                jobs.append(
                    Job(
                        engine_id=f"{answer_id}-{next(self.numbers)}",
                        index=len(jobs),
                        prompt_ids=prompt,
                        params=single,
                        priority=request.priority or 0,
                        cache_salt=request.cache_salt,
                        stream_interval=request.stream_interval or self.config.stream_interval,
                    )
                )
        self.metrics.params_n.observe(params[0].n)
        self._log(answer_id, request, jobs)
        return jobs

    def _log(self, answer_id: str, request: SamplingFields, jobs: list[Job]) -> None:
        if self.config.enable_log_requests:
            sizes = [len(job.prompt_ids) for job in jobs]
            logger.info(
                "request %s: user=%s, %s sequences of %s to %s prompt tokens, %s",
                answer_id, request.user, len(jobs), min(sizes), max(sizes), jobs[0].params,
            )  # fmt: skip

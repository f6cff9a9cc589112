"""The engine of encoders: requests in, vectors out, one batch a step, with the same calls as `Engine`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from octavo import ops
from octavo.checkpoint.reader import open_checkpoint
from octavo.engine.config import EngineConfig
from octavo.engine.embedding import embedding_bytes, embedding_info
from octavo.engine.loading import pick_device
from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from octavo.errors import CapacityError, UserError
from octavo.models.encoder import Encoder, load_encoder
from octavo.models.sentence import SentenceConfig, pool, read_sentence_config

logger = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384
_HONOURED = frozenset(
    {
        "model", "runner", "tokenizer", "skip_tokenizer_init", "dtype", "device", "load_format", "model_impl", "seed",
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    }
)  # fmt: skip


class EncoderEngine:
    """Loads an encoder and computes what is asked of it, oldest requests first, those of a batch sorted by length."""

    def __init__(self, config: EngineConfig) -> None:
        begin = time.perf_counter()
        _check_settings(config)
        device = pick_device(config.device)
        # float32 is what these models were trained and are judged in, and they are small
        default = torch.float32 if device.type == "cpu" else ops.default_dtype(device)
        dtype = default if config.dtype == "auto" else getattr(torch, config.dtype)
        checkpoint = open_checkpoint(config.model, load_format=config.load_format, seed=config.seed, device=device)
        sentence = read_sentence_config(checkpoint.path, "mean")
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
        self._encoder = load_encoder(checkpoint, dtype, device)
        self._pooling = sentence.pooling
        self._waiting: dict[str, tuple[EngineRequest, float]] = {}
        self._stats = EngineStats()
        self._peak_waiting = 0
        self.info = _describe(config, self._encoder, sentence, device)
        self.info.embedding = embedding_info(sentence, self._encoder.hidden_size, checkpoint.config)
        self.info.load_seconds = time.perf_counter() - begin

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, item: EngineRequest) -> None:
        """Queue a request. Raises UserError when it can never run."""
        if not item.embeds:
            raise UserError(f"{self.info.model} is an encoder: it makes embeddings and generates nothing")
        if item.request_id in self._waiting:
            raise UserError(f"request_id {item.request_id!r} is already waiting", param="request_id")
        count, limit = len(item.prompt_token_ids), self.info.max_model_len
        if not 1 <= count <= limit:
            raise CapacityError(f"the input has {count} tokens; it must have 1 to {limit}", param="input")
        self._waiting[item.request_id] = (item, time.perf_counter())

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown or finished ones are ignored."""
        self._waiting.pop(request_id, None)

    def finish(self, request_id: str, stop_reason: int | str | None) -> None:
        """As `abort`: an encoder has no text that could hold a stop string."""
        self.abort(request_id)

    def drain(self) -> list[EngineOutput]:
        """Nothing is ever in flight between two steps."""
        return []

    def step(self) -> list[EngineOutput]:
        """Compute one batch; its requests end with their vector, or with the error that the batch met."""
        batch = list(self._next_batch())
        if not batch:
            return []
        batch.sort(key=lambda pair: len(pair[0].prompt_token_ids))
        begin = time.perf_counter()
        try:
            outputs = self._compute(batch, begin)
        except Exception as error:
            logger.exception("a batch of %s inputs failed", len(batch))
            reason = f"the engine could not compute this request: {error!r}"
            outputs = [EngineOutput(item.request_id, finish_reason="error", error=reason) for item, _ in batch]
        for item, _ in batch:
            del self._waiting[item.request_id]
        self._count(batch, time.perf_counter() - begin)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of the queue and the counters."""
        self._stats.waiting = len(self._waiting)
        self._stats.peak_running, self._peak_waiting = self._peak_waiting, 0
        return self._stats

    def _next_batch(self) -> Iterator[tuple[EngineRequest, float]]:
        """The oldest requests that fit in a step; always one."""
        room = self.info.max_num_batched_tokens
        for count, (item, arrival) in enumerate(self._waiting.values()):
            room -= len(item.prompt_token_ids)
            if count and (room < 0 or count >= self.info.max_num_seqs):
                return
            yield item, arrival

    @torch.inference_mode()
    def _compute(self, batch: list[tuple[EngineRequest, float]], begin: float) -> list[EngineOutput]:
        sequences = [item.prompt_token_ids for item, _ in batch]
        vectors = pool(self._encoder(sequences), [len(ids) for ids in sequences], self._pooling).cpu()
        assert self.info.embedding is not None
        seconds, outputs = time.perf_counter() - begin, []
        for (item, arrival), vector in zip(batch, vectors, strict=True):
            output = EngineOutput(item.request_id, finish_reason="stop", queue_s=begin - arrival, prefill_s=seconds)
            output.embedding = embedding_bytes(vector, self.info.embedding.is_normalized)
            outputs.append(output)
        return outputs

    def _count(self, batch: list[tuple[EngineRequest, float]], seconds: float) -> None:
        stats, tokens = self._stats, sum(len(item.prompt_token_ids) for item, _ in batch)
        stats.steps += 1
        stats.prompt_tokens += tokens
        stats.last_step_tokens, stats.last_step_s = tokens, seconds
        self._peak_waiting = max(self._peak_waiting, len(batch))


def _check_settings(config: EngineConfig) -> None:
    """Refuse what an encoder cannot honour: it has no KV cache, no answers, and runs in transformers' modules."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name not in _HONOURED and value != setting.default:
            raise UserError(
                f"{setting.name} is {value!r}, which has no meaning for {config.model}, an encoder; leave it out",
                param=setting.name,
            )
    if config.runner == "generate":
        raise UserError(f"runner is 'generate', but {config.model} is an encoder: use 'pooling'", param="runner")
    if config.model_impl == "native":
        raise UserError("model_impl is 'native', but encoders run in transformers' modules only", param="model_impl")


def _max_model_len(config: EngineConfig, encoder: Encoder, sentence: SentenceConfig) -> int:
    wanted, most = config.max_model_len, int(encoder.max_position)
    if isinstance(wanted, int):
        if wanted > most:
            raise UserError(
                f"max_model_len is {wanted}; the model was made for at most {most} tokens", param="max_model_len"
            )
        return wanted
    return most if sentence.max_seq_length is None else min(most, sentence.max_seq_length)


def _describe(config: EngineConfig, encoder: Encoder, sentence: SentenceConfig, device: torch.device) -> EngineInfo:
    default = GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS
    tokens = config.max_num_batched_tokens or default
    nothing: dict[str, Any] = dict.fromkeys(("num_blocks", "block_size", "block_bytes", "kv_bytes_per_token"), 0)
    return EngineInfo(
        model=config.model,
        max_model_len=_max_model_len(config, encoder, sentence),
        vocab_size=encoder.vocab_size,
        max_concurrency=0.0,
        max_num_seqs=config.max_num_seqs or tokens,
        max_num_batched_tokens=tokens,
        dtype=str(encoder.dtype).removeprefix("torch."),
        device=str(device),
        load_seconds=0.0,
        weight_bytes=encoder.weight_bytes(),
        eos_token_ids=[],
        can_generate=False,
        **nothing,
    )

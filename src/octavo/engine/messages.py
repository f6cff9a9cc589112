"""What the server and the engine process say to each other. Plain dataclasses; msgspec encodes them as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import Logprobs


@dataclass(slots=True)
class EngineRequest:
    """A request in tokens. `bad_words` are the token sequences that must not come, from `params.bad_words`.

    With `embeds` the hidden state of the last token is wanted, and nothing is generated.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    embeds: bool = False


@dataclass(slots=True)
class EngineOutput:
    """What one step added to a request. Times are seconds; they come with the first and the last output.

    `embedding` holds the numbers of a vector, float32 in the machine's byte order.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    embedding: bytes | None = None


@dataclass(slots=True)
class EngineStats:
    """A snapshot for metrics; counters count since the engine started.

    Peaks are the most in one step since the snapshot before: short requests come and go in between.
    """

    running: int = 0
    peak_running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    peak_kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    blocks_total: int = 0
    blocks_free: int = 0


@dataclass(slots=True)
class EmbeddingInfo:
    """How a model's embeddings are made. `matryoshka` are the sizes that one may be cut to, [] for any.

    `prompts` are texts to put before an input, by name; `default_prompt_name` says which without being asked.
    """

    size: int
    is_normalized: bool = True
    can_be_cut: bool = False
    matryoshka: list[int] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    lowercases: bool = False


@dataclass(slots=True)
class EngineInfo:
    """What the engine found out while it started. `embedding` is None where it makes no embeddings."""

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    block_bytes: int
    kv_bytes_per_token: int
    max_concurrency: float
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    load_seconds: float
    weight_bytes: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any] = field(default_factory=dict)
    can_generate: bool = True
    embedding: EmbeddingInfo | None = None

    def describe_capacity(self) -> str:
        """One line: blocks, the tokens they hold, and how many requests of full length fit."""
        size = self.num_blocks * self.block_bytes / 2**20
        return (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} tokens = {self.num_blocks * self.block_size:,} "
            f"tokens ({size:,.0f} MiB), {self.max_concurrency:.1f} requests at the full {self.max_model_len:,} tokens"
        )

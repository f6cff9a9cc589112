"""The engine's settings: one documented field each (flags, environment variables and docs are generated from them)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from octavo.errors import UserError
from octavo.settings import setting


@dataclass
class EngineConfig:
    """How to load a model and how to run it. Names and defaults follow vLLM's."""

    model: str = setting("demo", "directory, .gguf file, Hugging Face id, or 'demo'", positional=True)
    runner: str = setting(
        "auto",
        "what the model is served for: generating (a causal model then makes embeddings too) or embeddings only",
        choices=("auto", "generate", "pooling"),
    )
    tokenizer: str | None = setting(None, "directory or Hugging Face id of the tokenizer (default: the model's own)")
    skip_tokenizer_init: bool = setting(False, "load no tokenizer; prompts are token ids then")
    dtype: str = setting(
        "auto", "type of activations and plain weights", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = setting("auto", "'auto', 'cpu' or 'cuda'", choices=("auto", "cpu", "cuda"))
    load_format: str = setting(
        "auto", "'dummy' builds random weights from config.json alone", choices=("auto", "dummy")
    )
    model_impl: str = setting("auto", "whose modules run the model", choices=("auto", "native", "transformers"))
    quantization: str | None = setting(
        None, "quantize a plain checkpoint while loading, by rounding to nearest", choices=("int8", "fp8", "w4a16")
    )
    requantize: str | None = setting(
        None,
        "round weights that a checkpoint stores in a type without a kernel (GGUF's Q6_K, FP8 by block) to 4 bits while "
        "loading; they are dequantized otherwise",
        choices=("W4A16",),
    )
    dense_copies: bool | None = setting(
        None,
        "keep a bf16 copy of 4- and 8-bit weights on a GPU, with which large steps are faster (default: if all copies "
        "take at most an eighth of its memory)",
    )
    max_model_len: int | str | None = setting(
        None, "context length in tokens, prompt and output together; 'auto' or -1 takes what fits", metavar="TOKENS"
    )
    block_size: int = setting(16, "tokens a block of the KV cache")
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache; fp8 (e4m3, values up to 448) has fast kernels on a GPU only",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
    )
    kv_cache_memory_bytes: int | None = setting(None, "size of the KV cache; overrides gpu_memory_utilization")
    gpu_memory_utilization: float = setting(
        0.9, "share of the device's memory that weights and KV cache may use together"
    )
    max_num_seqs: int | None = setting(
        None, "requests that run at the same time (default: 256 on a GPU, 512 in a server on one, 64 on a CPU)"
    )
    max_num_batched_tokens: int | None = setting(
        None, "tokens computed in one step (default: 2048 on a CPU, 16384 of prompts and max_num_seqs on a GPU)"
    )
    max_prefill_tokens_with_decodes: int | None = setting(
        None,
        "prompt tokens in a step that also decodes, so that streams go on (default in a server: 64 on a CPU, half of "
        "what waits on a GPU, from 512 to 2048; else no cap)",
    )
    target_itl_ms: float | None = setting(
        None,
        "gap between a stream's tokens that the cap on prompt tokens keeps, by the step times measured so far; "
        "max_prefill_tokens_with_decodes wins over it",
        metavar="MS",
    )
    enable_prefix_caching: bool = setting(True, "share the KV blocks of common prefixes between requests")
    scheduling_policy: str = setting("fcfs", "who goes first", choices=("fcfs", "priority"))
    tensor_parallel_size: int = setting(1, "devices that share the model (more than 1 is not available yet)")
    enforce_eager: bool = setting(False, "run without CUDA graphs, which starts sooner and is slower")
    async_scheduling: bool | None = setting(
        None, "launch a step before the last one's tokens are read (default: on a GPU)"
    )
    deterministic: bool = setting(
        False,
        "tokens and log-probabilities do not depend, bit by bit, on what runs beside a request, on chunks, on prefix "
        "hits or on preemptions; slower, on a CPU much slower; needs bfloat16 on a GPU",
    )
    seed: int = setting(0, "seed of requests that bring none")

    def __post_init__(self) -> None:
        for field in fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            is_unset = value is None and field.default is None
            _require(
                not choices or is_unset or value in choices, field.name, value, f"one of {', '.join(choices or ())}"
            )
        _require(self.block_size in (8, 16, 32, 64, 128), "block_size", self.block_size, "one of 8, 16, 32, 64, 128")
        _require(
            0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]"
        )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_tokens_with_decodes",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        gap = self.target_itl_ms
        _require(gap is None or 0 < gap < math.inf, "target_itl_ms", gap, "above 0")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        _require(
            seqs is None or tokens is None or seqs <= tokens,
            "max_num_batched_tokens", tokens, f"at least max_num_seqs = {seqs}: each running request takes one a step",
        )  # fmt: skip
        if self.max_model_len == -1:  # vLLM's other spelling
            self.max_model_len = "auto"
        length = self.max_model_len
        if isinstance(length, str) and length != "auto":
            raise UserError(
                f"max_model_len is {length!r}; it must be a number of tokens or 'auto'", param="max_model_len"
            )
        _require(not isinstance(length, int) or length >= 1, "max_model_len", length, "at least 1, or 'auto'")
        _require(self.tensor_parallel_size == 1, "tensor_parallel_size", self.tensor_parallel_size, "1 in this version")

    @classmethod
    def from_kwargs(cls, **kwargs: object) -> EngineConfig:
        """The configuration for keyword arguments; an unknown one is a TypeError that names the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise TypeError(f"unknown argument {unknown[0]!r}; LLM takes {', '.join(sorted(known))}")
        return cls(**kwargs)  # type: ignore[arg-type]


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise UserError(f"{name} is {value!r}; it must be {allowed}", param=name)

"""The public operations. Each checks nothing that costs time, and runs the first candidate that serves its tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.errors import UserError
from octavo.ops import deterministic as blocked
from octavo.ops import reference, sampling
from octavo.ops.cpu import functions as cpu_functions
from octavo.ops.cpu import library as cpu_library
from octavo.ops.cpu import weights as cpu_weights
from octavo.ops.dispatch import Candidate, Operation
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.packed_weight import Layout, PackedWeight, QuantizedWeightLike, TorchDense, TorchQuantized
from octavo.ops.permuted import PermutedWeight
from octavo.ops.triton import runtime as triton_runtime
from octavo.ops.triton import weights as triton_weights
from octavo.ops.triton import weights_8bit as triton_weights_8bit
from octavo.ops.triton import weights_deterministic as fixed_weights

_BF16 = (torch.bfloat16,)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LOGITS = (torch.float32, torch.bfloat16)


def _operation(name: str, covers: str, *gpu: Candidate) -> Operation:
    """The candidates of an operation, fastest first; `covers` says what the kernel serves beyond its data types."""
    return Operation(
        name,
        *gpu,
        Candidate("cpu", getattr(cpu_functions, name), ("cpu",), _BF16, cpu_library.unavailable(), covers),
        Candidate("torch", getattr(reference, name), note="the reference"),
    )


def _elementwise(name: str, module: str = "elementwise") -> Operation:
    function = triton_runtime.lazy(module, name)
    reason, note = triton_runtime.unavailable(), "norms of rows of up to 65536 numbers"
    return _operation(name, "AVX2, AVX-512", Candidate("triton", function, ("cuda",), _FLOATS, reason, note))


def _paged(name: str, module: str) -> Operation:
    """An operation on the pages of the cache, with its kernel in `octavo.ops.triton.<module>`."""
    gpu = Candidate(
        "triton",
        triton_runtime.lazy(module, name),
        ("cuda",),
        _FLOATS,
        triton_runtime.unavailable(),
        "caches in the plain order, float8 included; any head size; up to 64 query heads a key head",
    )
    return _operation(name, _PAGES, gpu)


def _sampling(name: str) -> Operation:
    function = triton_runtime.lazy("sampling", name)
    return Operation(
        name,
        Candidate("triton", function, ("cuda",), _LOGITS, triton_runtime.unavailable(), "any number of rows"),
        Candidate("torch", getattr(sampling, name), note="the reference"),
    )


_RMS_NORM = _elementwise("rms_norm")
_ADD_RMS_NORM = _elementwise("add_rms_norm")
_DETERMINISTIC_NORM = _elementwise("rms_norm", "norm_deterministic")
_DETERMINISTIC_ADD_NORM = _elementwise("add_rms_norm", "norm_deterministic")
_SILU_MUL = _elementwise("silu_mul")
_GELU_TANH_MUL = _elementwise("gelu_tanh_mul")
_PAGES = "AVX2, AVX-512; head sizes and block sizes that are multiples of 16, heads up to 512"
_ROTARY_AND_STORE = _paged("rotary_and_store", "rotary")
_STORE_KV = _paged("store_kv", "rotary")
_PAGED_ATTENTION = _paged("paged_attention", "attention")
_DETERMINISTIC_ATTENTION = Operation(
    "paged_attention, deterministic",
    Candidate(
        "triton",
        triton_runtime.lazy("attention_deterministic", "paged_attention"),
        ("cuda",),
        _FLOATS,
        triton_runtime.unavailable(),
        "as paged_attention",
    ),
    Candidate("torch", blocked.paged_attention, ("cpu",), note="a row at a time"),
)

_ARGMAX = _sampling("argmax")
_SAMPLE_TOKENS = _sampling("sample_tokens")
_LOG_SOFTMAX = Operation(
    "log_softmax",
    Candidate(
        "triton",
        triton_runtime.lazy("log_softmax", "log_softmax"),
        ("cuda",),
        _LOGITS,
        triton_runtime.unavailable(),
        "any number of rows",
    ),
    Candidate("torch", sampling.log_softmax, note="the reference"),
)

OPERATIONS = (
    _RMS_NORM,
    _ADD_RMS_NORM,
    _SILU_MUL,
    _GELU_TANH_MUL,
    _ROTARY_AND_STORE,
    _STORE_KV,
    _PAGED_ATTENTION,
    _DETERMINISTIC_ATTENTION,
    _ARGMAX,
    _SAMPLE_TOKENS,
    _LOG_SOFTMAX,
)


# The candidates of `linear`, fastest first; a weight is packed once for the first that takes it.
LAYOUTS = (
    Layout("cpu tiles", cpu_weights.rejects, cpu_weights.pack, "AVX2, AVX-512; bf16, 4- and 8-bit groups, int8 x int8"),
    Layout(
        "triton codes", triton_weights.rejects_codes, triton_weights.pack_codes, "few rows in a kernel, else cuBLAS"
    ),
    Layout(
        "triton dense", triton_weights.rejects_dense, triton_weights.pack_dense, "few rows in a kernel, else cuBLAS"
    ),
    Layout("triton 8-bit", triton_weights_8bit.rejects, triton_weights_8bit.pack, "int8 x int8, FP8 x FP8"),
    Layout("torch dense", TorchDense.rejects, TorchDense, "oneDNN or BLAS"),
    Layout("torch dequantize", TorchQuantized.rejects, TorchQuantized, "the reference"),
)

# Those whose product of a row is the same, bit by bit, whatever the other rows and however many they are.
DETERMINISTIC_LAYOUTS = (
    Layout("triton fixed tiles", fixed_weights.rejects, fixed_weights.pack, "bfloat16 inputs on a GPU"),
    Layout("torch dense in blocks", blocked.BlockedDense.rejects, blocked.BlockedDense, "on a CPU"),
    Layout("torch dequantize in blocks", blocked.BlockedQuantized.rejects, blocked.BlockedQuantized, "on a CPU"),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [T, H], weight [H]; float32 inside.

    deterministic: a row has the same bits among any number of rows.
    """
    return (_DETERMINISTIC_NORM if deterministic else _RMS_NORM)(x, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, deterministic: bool = False) -> Tensor:
    """residual += x in place, then the RMS norm of residual; all [T, H]. deterministic: see `rms_norm`."""
    return (_DETERMINISTIC_ADD_NORM if deterministic else _ADD_RMS_NORM)(x, residual, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:] for x [T, 2 I]."""
    return _SILU_MUL(x)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(x[:, :I]) * x[:, I:] for x [T, 2 I], with the tanh approximation of GELU."""
    return _GELU_TANH_MUL(x)


def rotary_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> Tensor:
    """Split qkv [T, (Hq + 2 Hkv) D], norm and rotate q and k, write k and v to the cache; returns q [T, Hq, D].

    positions: int64 [T]. cos_sin: [max_pos, rotary_dim], cosines then sines; only the first rotary_dim channels of a
    head turn. q_norm, k_norm: weights [D] of an RMS norm over the head, before the rotation. `interleaved` pairs
    channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """
    return _ROTARY_AND_STORE(
        qkv, positions, cos_sin, cache, meta, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps, interleaved
    )


def store_kv(k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMetadata) -> None:
    """Write k, v [T, Hkv, D] to the slots of `meta.slot_mapping`."""
    _STORE_KV(k, v, cache, meta)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the pages of each request; returns [T, Hq * D].

    The KV of this step is in the cache already. A query at position p sees positions p - window < j <= p; `softcap`
    replaces a score s by softcap * tanh(s / softcap); `sinks` [Hq] are scores without a value (gpt-oss).

    Over a cache that is `deterministic`, a row of the result has the same bits in any step that computes it.
    """
    attention = _DETERMINISTIC_ATTENTION if cache.deterministic else _PAGED_ATTENTION
    return attention(q, cache, meta, scale, window, softcap, sinks)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in float32 of logits [R, V]. A row's depend on nothing but that row."""
    return _LOG_SOFTMAX(logits)


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest logit, the lowest on ties: [R, V] -> int64 [R]; -1 where a row holds a NaN."""
    return _ARGMAX(logits)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token for each row of logits [R, V] (float32 or bfloat16): int64 [R].

    temperature, top_p, min_p: float32 [R]; top_k: int32 [R] (0: off); seed, position: int64 [R], position being the
    number of tokens sampled before. A temperature below `sampling.GREEDY_TEMPERATURE` takes the largest logit, as
    `argmax`. -1 where a row holds a NaN, or is to be drawn and has no finite largest logit. A row's token depends on
    nothing but that row. `octavo.ops.sampling` states ties and rounding.
    """
    return _SAMPLE_TOKENS(logits, temperature, top_k, top_p, min_p, seed, position)


def pack_weight(
    weight: Tensor | QuantizedWeightLike,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
) -> PackedWeight:
    """Bring a weight [N, K] into the order of the fastest product for this device; `dtype` is that of the inputs.

    deterministic: the product of a row is the same, bit by bit, whatever the other rows and however many they are.
    Raises UserError for a quantization that no kernel serves, or a weight that no deterministic one does.
    """
    device = torch.device(device)
    if not isinstance(weight, Tensor) and weight.order is not None:
        in_order = replace(weight, order=None)  # type: ignore[type-var]
        return PermutedWeight(pack_weight(in_order, dtype, device, deterministic), weight.order, device)
    if deterministic:
        return _pack_deterministic(weight, dtype, device)
    for layout in LAYOUTS:
        if layout.rejects(weight, dtype, device) is None:
            return layout.pack(weight, dtype, device)
    raise UserError(f"no layout takes a weight of shape {tuple(weight.shape)} in {dtype} on {device}")


def _pack_deterministic(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    reasons = []
    for layout in DETERMINISTIC_LAYOUTS:
        reason = layout.rejects(weight, dtype, device)
        if reason is None:
            return layout.pack(weight, dtype, device)
        reasons.append(f"{layout.name}: {reason}")
    raise UserError(
        f"deterministic products serve bfloat16 inputs on a GPU, and any on a CPU, but no weight of shape "
        f"{tuple(weight.shape)} in {dtype} on {device} ({'; '.join(reasons)}); leave deterministic out",
        param="deterministic",
    )


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] times the transposed weight plus bias [N]: [T, N] in x's dtype, or `out_dtype` (float32 for logits)."""
    return packed.linear(x, bias, x.dtype if out_dtype is None else out_dtype)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 on CUDA and on a CPU with bfloat16 products, else float32."""
    if torch.device(device).type != "cpu" or cpu_library.level() > 0 or cpu_library.torch_has_bfloat16_products():
        return torch.bfloat16
    return torch.float32


def report(device: torch.device | str = "cpu") -> list[tuple[str, str, bool, str]]:
    """(operation, candidate, chosen, reason) of every candidate for `default_dtype(device)`, for `octavo info`."""
    device = torch.device(device)
    dtype = default_dtype(device)
    rows = [row for operation in OPERATIONS for row in operation.report(device.type, dtype)]
    return [*_report_layouts(dtype, device), *rows, *_report_fused(dtype, device)]


def _report_layouts(dtype: torch.dtype, device: torch.device) -> list[tuple[str, str, bool, str]]:
    """The candidates of `linear` for a plain weight; quantized ones may take another (`PackedWeight.describe`)."""
    rows = []
    taken = False
    for layout in LAYOUTS:
        reason = layout.rejects(torch.empty(16, 64, device=device), dtype, device)
        chosen = reason is None and not taken
        if reason is None:
            reason = layout.note if chosen else "a faster one serves plain weights"
        taken = taken or chosen
        rows.append(("linear", layout.name, chosen, reason))
    return rows


def _report_fused(dtype: torch.dtype, device: torch.device) -> list[tuple[str, str, bool, str]]:
    """Whether whole decoder layers are served (`fuse_decoder`) or run operation by operation."""
    candidates = (
        ("cpu fused", "cpu", cpu_library.unavailable(), "one call a layer, where its weights and heads allow"),
        ("triton fused", "cuda", triton_runtime.unavailable(), "few launches a layer, fewest up to 16 decodes"),
    )
    rows = []
    for name, kind, reason, note in candidates:
        if reason is None and (device.type != kind or dtype != torch.bfloat16):
            reason = f"serves bfloat16 on {kind}, not {dtype} on {device.type}"
        rows.append(("decoder_layer", name, reason is None, reason or note))
    fused = any(chosen for _, _, chosen, _ in rows)
    note = "a faster one serves this" if fused else "always possible"
    return [*rows, ("decoder_layer", "single operations", not fused, note)]

"""Every kernel behind one function: a torch reference that defines it, and faster versions for CPU and GPU."""

from octavo.ops.decoder import DecoderLayer, FusedDecoder, fuse_decoder
from octavo.ops.functions import (
    add_rms_norm,
    argmax,
    default_dtype,
    gelu_tanh_mul,
    linear,
    pack_weight,
    paged_attention,
    report,
    rms_norm,
    rotary_and_store,
    sample_tokens,
    silu_mul,
    store_kv,
)
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.packed_weight import PackedWeight

__all__ = [
    "AttentionMetadata",
    "DecoderLayer",
    "FusedDecoder",
    "KVCache",
    "PackedWeight",
    "add_rms_norm",
    "argmax",
    "default_dtype",
    "fuse_decoder",
    "gelu_tanh_mul",
    "linear",
    "pack_weight",
    "paged_attention",
    "report",
    "rms_norm",
    "rotary_and_store",
    "sample_tokens",
    "silu_mul",
    "store_kv",
]

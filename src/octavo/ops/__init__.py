"""Every kernel behind one function: a torch reference that defines it, and faster versions for CPU and GPU."""

from octavo.ops.compile_ahead import begin_ahead, compile_ahead, import_attention, plan_attention
from octavo.ops.decoder import DecoderLayer, FusedDecoder, fuse_decoder
from octavo.ops.experts import experts, pack_experts
from octavo.ops.experts_base import Expert, PackedExperts
from octavo.ops.functions import (
    add_rms_norm,
    argmax,
    default_dtype,
    gelu_tanh_mul,
    linear,
    log_softmax,
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
from octavo.ops.latent import latent_attention, latent_rotary_and_store
from octavo.ops.packed_weight import PackedWeight
from octavo.ops.step_inputs import (
    NUM_SAMPLING_WORDS,
    RequestState,
    StepTensors,
    keep_tokens,
    prepare_inputs,
    sampling_inputs,
    write_state,
)

__all__ = [
    "NUM_SAMPLING_WORDS",
    "AttentionMetadata",
    "DecoderLayer",
    "Expert",
    "FusedDecoder",
    "KVCache",
    "PackedExperts",
    "PackedWeight",
    "RequestState",
    "StepTensors",
    "add_rms_norm",
    "argmax",
    "begin_ahead",
    "compile_ahead",
    "default_dtype",
    "experts",
    "fuse_decoder",
    "gelu_tanh_mul",
    "import_attention",
    "keep_tokens",
    "latent_attention",
    "latent_rotary_and_store",
    "linear",
    "log_softmax",
    "pack_experts",
    "pack_weight",
    "paged_attention",
    "plan_attention",
    "prepare_inputs",
    "report",
    "rms_norm",
    "rotary_and_store",
    "sample_tokens",
    "sampling_inputs",
    "silu_mul",
    "store_kv",
    "write_state",
]

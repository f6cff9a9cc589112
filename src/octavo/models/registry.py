"""From a checkpoint to a model: which implementation serves an architecture, and the refusal of what none serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from octavo.checkpoint.base import Checkpoint
from octavo.errors import UnsupportedModelError, UserError
from octavo.layers.quantize import check_quantization
from octavo.layers.requantize import RequantizingSource, check_requantize
from octavo.layers.weights import WeightSource
from octavo.models.base import CausalLM
from octavo.models.decoder import DecoderLM
from octavo.models.decoder_config import DecoderConfig
from octavo.models.deepseek import deepseek_v2_config, deepseek_v3_config
from octavo.models.gemma2 import gemma2_config
from octavo.models.gemma3 import gemma3_config
from octavo.models.llama import granite_config, granite_hybrid_config, llama_config, mistral_config
from octavo.models.mixtral import mixtral_config
from octavo.models.olmo2 import olmo2_config
from octavo.models.phi3 import phi3_config
from octavo.models.qwen2 import qwen2_config
from octavo.models.qwen3 import qwen3_config
from octavo.models.qwen3_moe import qwen3_moe_config

logger = logging.getLogger(__name__)

NATIVE: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "GraniteForCausalLM": granite_config,
    "GraniteMoeHybridForCausalLM": granite_hybrid_config,
    "Gemma2ForCausalLM": gemma2_config,
    "Gemma3ForCausalLM": gemma3_config,
    "Olmo2ForCausalLM": olmo2_config,
    "Phi3ForCausalLM": phi3_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
    "MixtralForCausalLM": mixtral_config,
    "Qwen3MoeForCausalLM": qwen3_moe_config,
    "DeepseekV2ForCausalLM": deepseek_v2_config,
    "DeepseekV3ForCausalLM": deepseek_v3_config,
}
MODEL_IMPLS = ("auto", "native", "transformers")
_SMALL_WEIGHT = 2**23  # elements of a layer's largest weight
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    model_impl: str = "auto",
    quantization: str | None = None,
    requantize: str | None = None,
    max_model_len: int | None = None,
    deterministic: bool = False,
) -> CausalLM:
    """Builds the model of a checkpoint with its weights, ready to have a KV cache bound.

    Args:
        checkpoint: an opened checkpoint.
        dtype: float32, bfloat16 or float16: activations, KV cache and plain weights.
        device: where it runs.
        model_impl: "native" and "transformers" force one implementation, "auto" prefers the native one.
        quantization: quantize plain linear weights on load: "int8", "fp8" or "w4a16".
        requantize: "W4A16" rounds linear weights that no kernel reads as they are stored to 4 bits, which are
            dequantized otherwise.
        max_model_len: longest sequence that will be served; shortens position tables, and chooses between frequencies
            that a model has for short and for long contexts.
        deterministic: a token's hidden state and logits have the same bits whatever else is in its step.

    Raises:
        UserError: `deterministic`, and no kernel of that kind serves the model.
        UnsupportedModelError: no implementation computes this architecture right. Raised before any tensor is read.
        CheckpointError: a tensor is missing or has another shape than the configuration implies.
    """
    _check_arguments(dtype, device, model_impl, quantization)
    check_requantize(requantize, quantization, checkpoint)
    with _loading_threads(checkpoint.config):
        read = WeightSource if requantize is None else RequantizingSource
        source = read(checkpoint, dtype, device, quantization, deterministic)
        return _load(checkpoint, source, model_impl, max_model_len)


def _load(checkpoint: Checkpoint, source: WeightSource, model_impl: str, max_model_len: int | None) -> CausalLM:
    architecture = architecture_of(checkpoint)
    if model_impl != "transformers":
        config, reason = native_config(architecture, checkpoint.config)
        if config is not None:
            if config.latent is not None and source.deterministic:
                raise UserError(
                    f"deterministic is True, but {architecture} has latent attention, which has no deterministic "
                    "kernel; leave it out",
                    param="deterministic",
                )
            model: CausalLM = DecoderLM(config, source, max_model_len)
            return model.eval()
        if model_impl == "native":
            raise UnsupportedModelError(
                f"{architecture} has no native implementation here: {reason}. "
                f"Native: {', '.join(NATIVE)}. Use model_impl='transformers' (or 'auto')."
            )
        logger.info("%s: served through transformers, since %s", architecture, reason)
    if source.deterministic:
        raise UserError(
            f"deterministic is True, but {architecture} would be served through transformers, whose own code sums in "
            f"an order that depends on the batch; it is there for {', '.join(NATIVE)} with model_impl 'auto' or "
            "'native'",
            param="deterministic",
        )
    from octavo.models.transformers_route import load_transformers_model

    return load_transformers_model(architecture, source, max_model_len)


@contextmanager
def _loading_threads(config: dict[str, Any]) -> Iterator[None]:
    """One thread while a small model is loaded.

    Its thousands of copies take some ten microseconds each; threads gain little there, and on a busy machine they wait
    for each other at every one (measured on two shared cores: 0.7 s with one thread, 3 to 8 s with two).
    """
    threads = torch.get_num_threads()
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if isinstance(hidden, int) and isinstance(inner, int) and hidden * inner < _SMALL_WEIGHT:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def native_config(architecture: str, config: dict[str, Any]) -> tuple[DecoderConfig | None, str]:
    """The native reading of a configuration, or None and the reason why there is none."""
    read = NATIVE.get(architecture)
    if read is None:
        return None, "the architecture is not written natively"
    decoder = read(config)
    reason = decoder.unsupported_reason()
    return (None, reason) if reason else (decoder, "")


def architecture_of(checkpoint: Checkpoint) -> str:
    """The class name that `config.json` gives under `architectures`."""
    architectures = checkpoint.config.get("architectures") or []
    if not architectures:
        raise UnsupportedModelError(
            f"{checkpoint.path}: config.json names no architecture "
            f"(model_type {checkpoint.config.get('model_type')!r}); "
            "add the class name of a causal language model under 'architectures'."
        )
    return str(architectures[0])


def _check_arguments(dtype: torch.dtype, device: torch.device | str, model_impl: str, quantization: str | None) -> None:
    if model_impl not in MODEL_IMPLS:
        raise UserError(f"model_impl {model_impl!r} is not one of {', '.join(MODEL_IMPLS)}", param="model_impl")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype} is not one of float32, bfloat16, float16", param="dtype")
    if dtype == torch.float16 and torch.device(device).type == "cpu":
        logger.warning(
            "float16 on a CPU is computed slowly and overflows beyond 65504; bfloat16 or float32 serve better"
        )
    check_quantization(quantization)

"""A transformers model without memory for its weights, and how it gets them one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo.compress.blocks import refuse_unless_chain
from octavo.compress.causal_attention import use_causal_kernel
from octavo.compress.norm_kernel import use_norm_kernel
from octavo.errors import UnsupportedModelError


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that blocks run in: that of the checkpoint where the device multiplies it faster, else float32."""
    fast = device.type == "cuda" or (stored == torch.bfloat16 and multiplies_bfloat16())
    return stored if fast else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16 (AMX's tiles or AVX-512's dot products).

    With either bfloat16 layers take a quarter to a half of what float32 ones do; without, no less.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16", False) or capabilities.get("avx512_bf16", False))


class _EmptyOnMeta(TorchFunctionMode):
    """torch.empty makes no memory: weights start on the meta device, while computed buffers become what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The causal language model of a config without memory for its weights; UnsupportedModelError if there is none.

    Buffers that are computed are on `device`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    content = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        parsed = AutoConfig.for_model(config["model_type"], **content)
    except (KeyError, ValueError):
        raise UnsupportedModelError(
            f"model_type {config.get('model_type')!r} is not one that this transformers version knows"
        ) from None
    refuse_unless_chain(parsed, str(config.get("architectures", [parsed.model_type])[0]))
    try:
        with torch.device(device), _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except ValueError as error:
        raise UnsupportedModelError(f"model_type {parsed.model_type!r}: {str(error).splitlines()[0][:200]}") from None
    if torch.device(device).type == "cpu":
        use_causal_kernel(model)
        use_norm_kernel(model)
    return model.eval().requires_grad_(False)


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter or buffer `name` (dotted) of a module by one with this value."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value

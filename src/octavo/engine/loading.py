"""From a configuration to a model in memory, with what the engine must know to size the rest."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from octavo import ops
from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.reader import open_checkpoint
from octavo.core.cache_groups import CacheGroup, group_layers
from octavo.engine.config import EngineConfig
from octavo.errors import UserError
from octavo.models import load_model
from octavo.models.base import CausalLM
from octavo.models.body import complete, is_body

logger = logging.getLogger(__name__)


@dataclass
class LoadedModel:
    """A model, ready to run once its KV cache is bound."""

    model: CausalLM
    checkpoint: Checkpoint
    groups: list[CacheGroup]
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    memory_utilization: float
    eos_token_ids: list[int]
    generation_config: dict[str, Any] = field(default_factory=dict)
    can_generate: bool = True

    def free_bytes(self) -> int:
        """Memory of the device that the engine may still take: its share of all of it, less what is in use now."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return int(max(0, free - (1 - self.memory_utilization) * total))
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
        return int(page * pages * self.memory_utilization)


def load(config: EngineConfig) -> LoadedModel:
    """Open the checkpoint and build the model on its device."""
    device = pick_device(config.device)
    dtype = _pick_dtype(config.dtype, device)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format, seed=config.seed, device=device)
    has_output = not is_body(checkpoint.config)
    if not has_output and config.runner == "generate":
        raise UserError(
            f"runner is 'generate', but {config.model} was saved without its output layer; use 'pooling'",
            param="runner",
        )
    checkpoint = complete(checkpoint)
    length = config.max_model_len if isinstance(config.max_model_len, int) else None
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        model_impl=config.model_impl,
        quantization=config.quantization,
        requantize=config.requantize,
        max_model_len=length,
        deterministic=config.deterministic,
    )
    kv_dtype = _pick_kv_dtype(config.kv_cache_dtype, dtype)
    if kv_dtype == torch.float8_e4m3fn and (checkpoint.config.get("quantization_config") or {}).get("kv_cache_scheme"):
        logger.warning(
            "the checkpoint has scales for its KV cache, which are not used: keys and values are stored as they are, "
            "those beyond 448 as 448"
        )
    specs = [replace(spec, bytes_per_element=kv_dtype.itemsize) for spec in model.kv_cache_specs()]
    return LoadedModel(
        model=model,
        checkpoint=checkpoint,
        groups=group_layers(specs),
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        memory_utilization=config.gpu_memory_utilization,
        eos_token_ids=_eos_token_ids(checkpoint),
        generation_config=checkpoint.generation_config,
        can_generate=has_output and config.runner != "pooling",
    )


def pick_device(name: str) -> torch.device:
    """The device that a configuration names; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but torch finds no usable GPU; use device='cpu'", param="device")
    return torch.device(name)


def _pick_dtype(name: str, device: torch.device) -> torch.dtype:
    return ops.default_dtype(device) if name == "auto" else getattr(torch, name)  # type: ignore[no-any-return]


def _pick_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)  # type: ignore[no-any-return]


def _eos_token_ids(checkpoint: Checkpoint) -> list[int]:
    """All end-of-sequence ids: those of generation_config.json (chat models list several), else config.json's."""
    found = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    if found is None:
        return []
    return [int(t) for t in found] if isinstance(found, list) else [int(found)]

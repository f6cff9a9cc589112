"""Scales of an FP8 KV cache, from the largest keys (after rotary embedding) and values that calibration saw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.number_formats import FP8
from octavo.errors import UnsupportedModelError, UserError

_WATCHED = "octavo_watched"  # the name under which transformers finds our attention function
_FIXED = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
_STRATEGIES = ("tensor", "attn_head")


def check_kv_cache_scheme(scheme: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's `kv_cache_scheme`, whole, as config.json has it; UserError says what is possible."""
    known = {*_FIXED, "strategy", "group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer",
             "observer_kwargs"}  # fmt: skip
    strategy = scheme.get("strategy", "tensor")
    wrong = [key for key in scheme if key not in known or scheme[key] != _FIXED.get(key, scheme[key])]
    wrong += [key for key in ("group_size", "block_structure") if scheme.get(key)]
    if wrong or strategy not in _STRATEGIES:
        raise UserError(
            f"kv_cache_scheme {dict(scheme)} is not written; what is: num_bits 8, type float, strategy tensor or "
            "attn_head, dynamic false, symmetric true",
            param="kv_cache_scheme",
        )
    return {**_FIXED, "strategy": strategy}


@dataclass
class _Peaks:
    """Largest magnitude of each head's keys and values [heads], of one attention module."""

    keys: Tensor
    values: Tensor


@dataclass
class KeyValueWatcher:
    """Watches the attention of a model's blocks while they run.

    `start` before the first batch of a block and `stop` after the last: that gives its k_scale and v_scale, by full
    name, as they are stored. `strategy` "tensor" has one of each a layer [1], "attn_head" one a KV head [heads, 1, 1].
    """

    model: Any
    strategy: str = "tensor"
    dtype: torch.dtype = torch.bfloat16
    _seen: dict[nn.Module, _Peaks] = field(default_factory=dict)
    _block: tuple[nn.Module, str] | None = None
    _before: str | None = None

    def start(self, block: nn.Module, name: str) -> None:
        """Watch `block`, whose full name is given ("model.layers.3")."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = self._config()
        self._seen, self._block, self._before = {}, (block, name), config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register(_WATCHED, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_WATCHED, ALL_MASK_ATTENTION_FUNCTIONS[self._before or "eager"])
        config._attn_implementation = _WATCHED

    def stop(self) -> dict[str, Tensor]:
        """The scales of the block. UnsupportedModelError where its attention does not go through transformers'."""
        assert self._block is not None
        block, prefix = self._block
        self._config()._attn_implementation = self._before
        self._block = None
        scales: dict[str, Tensor] = {}
        for name, module in block.named_modules():
            if module in self._seen:
                peaks = self._seen[module]
                scales[f"{prefix}.{name}.k_scale"] = self._scale(peaks.keys)
                scales[f"{prefix}.{name}.v_scale"] = self._scale(peaks.values)
        if not scales:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: the keys and values of {prefix} cannot be seen (its attention is none "
                "of transformers' functions), so kv_cache_scheme is impossible; leave it out"
            )
        return scales

    def _config(self) -> Any:
        return self.model.config.get_text_config()

    def _scale(self, peaks: Tensor) -> Tensor:
        peaks = peaks.max().reshape(1) if self.strategy == "tensor" else peaks.reshape(-1, 1, 1)
        return (peaks / FP8.high).clamp_min(torch.finfo(torch.float32).tiny).to(self.dtype).cpu()

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Takes note of keys and values [B, heads, T, head size], then attends as before."""
        keys, values = (x.detach().abs().amax(dim=(0, 2, 3)).float() for x in (key, value))
        seen = self._seen.setdefault(module, _Peaks(keys, values))
        torch.maximum(seen.keys, keys, out=seen.keys)
        torch.maximum(seen.values, values, out=seen.values)
        return self._plain(module)(module, query, key, value, *args, **kwargs)

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # Every family's file has its own eager function, which is the default where no other is asked for.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self._before or "eager", eager)

"""compressed-tensors, written: the tensors of a module and config.json's quantization_config.

The rules are those of compressed-tensors 0.20 (pack-quantized, int-quantized); transformers and vLLM read the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.packing import pack_codes
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError

FORMAT_VERSION = "0.20.1"  # of compressed-tensors


@dataclass(frozen=True)
class CompressedGroup:
    """Modules quantized alike, for `compressed_tensors_config`: class names, full names or "re:" patterns."""

    scheme: WeightScheme
    targets: tuple[str, ...] = ("Linear",)
    actorder: str | None = None  # "static": GPTQ went through the columns by activation, the groups kept their place
    observer: str | None = None


def storage_format(scheme: WeightScheme) -> str:
    """The name of the format that stores a scheme: weights alone are packed, those with int8 activations are not."""
    if scheme.type == "float":
        return "float-quantized"
    return "pack-quantized" if scheme.activations is None else "int-quantized"


def compressed_tensors_config(
    groups: Sequence[CompressedGroup],
    ignore: Sequence[str] = (),
    kv_cache_scheme: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json's quantization_config.

    `ignore` lists every linear module that stays dense, by full name. The format is that of the groups, or
    "mixed-precision" when they differ. Nothing of our own is in a scheme: its readers refuse unknown keys there.
    """
    formats = {storage_format(group.scheme) for group in groups}
    return {
        "config_groups": {f"group_{i}": _group_config(group) for i, group in enumerate(groups)},
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": kv_cache_scheme,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": FORMAT_VERSION,
    }


def _group_config(group: CompressedGroup) -> dict[str, Any]:
    scheme, activations = group.scheme, group.scheme.activations
    weights: dict[str, Any] = {
        "dynamic": False,
        "group_size": scheme.group_size,
        "num_bits": scheme.num_bits,
        "strategy": scheme.strategy,
        "symmetric": scheme.symmetric,
        "type": scheme.type,
    }
    weights |= {key: value for key, value in (("actorder", group.actorder), ("observer", group.observer)) if value}
    inputs = None
    if activations is not None:
        inputs = {
            "dynamic": activations.dynamic,
            "group_size": None,
            "num_bits": activations.num_bits,
            "strategy": activations.strategy,
            "symmetric": activations.symmetric,
            "type": activations.type,
        }
    return {
        "format": storage_format(scheme),
        "input_activations": inputs,
        "output_activations": None,
        "targets": list(group.targets),
        "weights": weights,
    }


def compressed_parameters(
    module: str,
    codes: Tensor,
    scale: Tensor,
    scheme: WeightScheme,
    zero_point: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """The stored tensors of one quantized linear layer.

    codes: signed int8 [N, K]; scale [N, G]; zero_point [N, G] in the codes' range for an asymmetric scheme, else None
    (readers refuse one that is stored for a symmetric scheme). The weight is scale * (codes - zero_point).
    """
    if scheme.type != "int":
        raise CheckpointError(f"{module}: {scheme.num_bits}-bit {scheme.type} weights are not written; int is")
    if (zero_point is None) != scheme.symmetric:
        raise CheckpointError(f"{module}: a zero point belongs to an asymmetric scheme and to no other: {scheme}")
    rows, columns = codes.shape
    wanted = (rows, scheme.num_groups(columns))
    for name, given in (("scale", scale), ("zero_point", zero_point)):
        if given is not None and tuple(given.shape) != wanted:
            raise CheckpointError(f"{module}: {name} has shape {list(given.shape)}; it must be {list(wanted)}")
    stored_scale = scale.to(scale_dtype)
    if storage_format(scheme) == "int-quantized":
        if zero_point is not None:
            raise CheckpointError(f"{module}: weights beside int8 activations must be symmetric")
        return {f"{module}.weight": codes.to(torch.int8), f"{module}.weight_scale": stored_scale}
    parameters = {
        f"{module}.weight_packed": pack_codes(codes, scheme.num_bits),
        f"{module}.weight_scale": stored_scale,
        f"{module}.weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if zero_point is not None:
        packed = pack_codes(zero_point.to(torch.int8).T.contiguous(), scheme.num_bits)
        parameters[f"{module}.weight_zero_point"] = packed.T.contiguous()
    return parameters


def signed_codes(weight: QuantizedWeight) -> Tensor:
    """The codes of an in-memory weight as int8 [N, K] in the signed range that is stored."""
    return (weight.unpacked_codes().to(torch.int16) - 8).to(torch.int8) if weight.scheme.num_bits == 4 else weight.codes

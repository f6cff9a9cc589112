"""compressed-tensors, written: the tensors of a module and config.json's quantization_config.

The rules are those of compressed-tensors 0.20 (pack-quantized, int-quantized, float-quantized, naive-quantized,
nvfp4-pack-quantized, mxfp4-pack-quantized); transformers and vLLM read the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.packing import pack_codes
from octavo.checkpoint.quantized import QuantizedWeight, pack_nibbles
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError

FORMAT_VERSION = "0.20.1"  # of compressed-tensors
_SCALE_DTYPES = {"nvfp4-pack-quantized": torch.float8_e4m3fn, "mxfp4-pack-quantized": torch.uint8}


@dataclass(frozen=True)
class CompressedGroup:
    """Modules quantized alike, for `compressed_tensors_config`: class names, full names or "re:" patterns."""

    scheme: WeightScheme
    targets: tuple[str, ...] = ("Linear",)
    actorder: str | None = None  # "static": GPTQ went through the columns by activation, the groups kept their place
    observer: str | None = None


def storage_format(scheme: WeightScheme) -> str:
    """The name of the format that stores a scheme.

    Integers are packed, unless they fill their bytes beside int8 activations.
    """
    if scheme.type == "float":
        if scheme.num_bits == 4:
            return "mxfp4-pack-quantized" if scheme.power_of_two else "nvfp4-pack-quantized"
        return "float-quantized" if scheme.activations is not None else "naive-quantized"
    return "int-quantized" if scheme.activations is not None and scheme.num_bits == 8 else "pack-quantized"


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
    if scheme.block_structure is not None:
        weights["block_structure"] = list(scheme.block_structure)
    if storage_format(scheme) in _SCALE_DTYPES:
        dtype = str(_SCALE_DTYPES[storage_format(scheme)])
        weights |= {"scale_dtype": dtype, "zp_dtype": dtype}
    weights |= {key: value for key, value in (("actorder", group.actorder), ("observer", group.observer)) if value}
    inputs = None
    if activations is not None:
        inputs = {
            "dynamic": activations.dynamic,
            "group_size": activations.group_size,
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
    global_scale: float | None = None,
    input_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """The stored tensors of one quantized linear layer: W = scale * (code - zero_point), / global_scale for NVFP4.

    codes [N, K]: signed int8, float8_e4m3fn, or E2M1 codes 0..15 one a byte. scale: [N, G]; [1, 1] for a tensor,
    [ceil(N / rows), ceil(K / columns)] for blocks; powers of two for MXFP4. zero_point [N, G] in the codes' range for
    an asymmetric scheme, else None (readers refuse one that is stored for a symmetric scheme). input_scale: one number,
    of static activations.
    """
    _check(module, codes, scale, zero_point, scheme)
    parameters = _weight_parameters(module, codes, scheme)
    if scheme.power_of_two:
        parameters[f"{module}.weight_scale"] = (torch.log2(scale.float()).round() + 127).to(torch.uint8)
    elif scheme.strategy == "tensor_group":
        if global_scale is None:
            raise CheckpointError(f"{module}: NVFP4 needs the global scale that its scales are shares of")
        parameters[f"{module}.weight_scale"] = scale.to(torch.float8_e4m3fn)
        parameters[f"{module}.weight_global_scale"] = torch.tensor([global_scale], dtype=torch.float32)
    else:
        stored = scale.reshape(1) if scheme.strategy == "tensor" else scale
        parameters[f"{module}.weight_scale"] = stored.to(scale_dtype)
    if zero_point is not None:
        packed = pack_codes(zero_point.to(torch.int8).T.contiguous(), scheme.num_bits)
        parameters[f"{module}.weight_zero_point"] = packed.T.contiguous()
    if input_scale is not None:
        parameters[f"{module}.input_scale"] = input_scale.reshape(1).to(scale_dtype)
    return parameters


def _weight_parameters(module: str, codes: Tensor, scheme: WeightScheme) -> dict[str, Tensor]:
    form = storage_format(scheme)
    if form == "pack-quantized":
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {f"{module}.weight_packed": pack_codes(codes, scheme.num_bits), f"{module}.weight_shape": shape}
    if scheme.type == "float" and scheme.num_bits == 4:
        return {f"{module}.weight_packed": pack_nibbles(codes)}
    return {f"{module}.weight": codes.to(torch.int8) if scheme.type == "int" else codes.to(torch.float8_e4m3fn)}


def _check(module: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: WeightScheme) -> None:
    if (zero_point is None) != scheme.symmetric:
        raise CheckpointError(f"{module}: a zero point belongs to an asymmetric scheme and to no other: {scheme}")
    rows, columns = codes.shape
    wanted = (1, 1) if scheme.strategy == "tensor" else (rows, scheme.num_groups(columns))
    if scheme.block_structure is not None:
        wanted = (-(-rows // scheme.block_structure[0]), -(-columns // scheme.block_structure[1]))
    for name, given in (("scale", scale), ("zero_point", zero_point)):
        if given is not None and tuple(given.shape) != wanted:
            raise CheckpointError(f"{module}: {name} has shape {list(given.shape)}; it must be {list(wanted)}")
    if zero_point is not None and storage_format(scheme) == "int-quantized":
        raise CheckpointError(f"{module}: weights beside int8 activations must be symmetric")


def signed_codes(weight: QuantizedWeight) -> Tensor:
    """The codes of an in-memory weight as int8 [N, K] in the signed range that is stored."""
    return (weight.unpacked_codes().to(torch.int16) - 8).to(torch.int8) if weight.scheme.num_bits == 4 else weight.codes

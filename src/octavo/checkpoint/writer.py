"""The way out: shards of safetensors, compressed-tensors' tensors and config, and conversion to plain safetensors."""

from __future__ import annotations

from octavo.checkpoint.compressed_writer import (
    CompressedGroup,
    compressed_parameters,
    compressed_tensors_config,
    signed_codes,
    storage_format,
)
from octavo.checkpoint.convert import convert
from octavo.checkpoint.packing import pack_codes, unpack_codes
from octavo.checkpoint.shards import ShardWriter, write_json

__all__ = [
    "CompressedGroup",
    "ShardWriter",
    "compressed_parameters",
    "compressed_tensors_config",
    "convert",
    "pack_codes",
    "signed_codes",
    "storage_format",
    "unpack_codes",
    "write_json",
]
